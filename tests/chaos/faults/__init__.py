"""One fault a test, on real brokers under load: `make chaos` runs them, `make test` does not."""
