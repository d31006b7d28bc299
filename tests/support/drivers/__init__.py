"""Drivers and machines whose devices do what a test says."""
