"""One commit: its decisions, what led to them, what it writes, and how large it may be."""
