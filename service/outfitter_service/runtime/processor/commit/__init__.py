"""One commit: its events and decisions, what it writes, how large it may be, and who waits for it."""
