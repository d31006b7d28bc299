"""Benchmarks against a real broker and the embedded bus: `make bench`. They are no tests and assert nothing."""
