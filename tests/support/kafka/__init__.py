"""Real brokers for tests, and harm to them."""
