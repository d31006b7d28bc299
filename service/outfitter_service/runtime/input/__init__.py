"""Reads the registrations topic for a processor: ahead of its decisions, and only in its scope."""
