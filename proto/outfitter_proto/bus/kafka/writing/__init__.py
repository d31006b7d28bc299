"""Writing to Kafka, with and without transactions."""
