"""The model of Kafka: a broker with its topics and groups, the network to it, and the client behind the bus port."""
