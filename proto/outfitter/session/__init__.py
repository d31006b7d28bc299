"""The session behind a context: one incarnation's messages and records."""
