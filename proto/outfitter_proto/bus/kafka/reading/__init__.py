"""Reading from Kafka: fetch loop, record batches and codecs."""
