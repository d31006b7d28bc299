"""The rules alone: a host to talk to, a world of random events, what was decided."""
