"""One commit: its events and decisions, what it writes, and how large it may be."""
