"""Connecting to the bus's file: its location, the writers' lock, a connection in its own thread, wake-ups."""
