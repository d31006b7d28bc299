"""Buses for tests: one that fails where it is told to, topics made anew, all that is committed."""
