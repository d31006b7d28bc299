"""Reads the registrations topic for a processor: ahead of its decisions, and within its scope."""
