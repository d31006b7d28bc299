"""Runs drivers: builds them, calls them within time limits, and translates their answers for the core."""
