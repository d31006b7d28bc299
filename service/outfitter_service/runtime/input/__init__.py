"""The registrations topic as a processor reads it: ahead of its decisions, and within its scope."""
