"""Drivers at work: loaded, called within time limits, their answers translated for the core."""
