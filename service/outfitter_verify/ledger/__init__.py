"""Checks of the ledger alone, at each of its prefixes: writers, commits, devices and the queue."""
