"""The way to the bus's file: where it may live, whose turn it is, a connection in its own thread, and pokes."""
