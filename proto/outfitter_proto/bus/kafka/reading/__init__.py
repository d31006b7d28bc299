"""Reading from Kafka: a fetch loop, record batches and their codecs."""
