"""The session behind a context: one incarnation's conversation with its manager."""
