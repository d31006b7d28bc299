"""Processes that tests start, own allocations with, or wait for."""
