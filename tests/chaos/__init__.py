"""Faults on real brokers, under load, with a checker after each; `make chaos`. See tests/README.md."""
