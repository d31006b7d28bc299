"""Writing to Kafka: in transactions, and outside of them."""
