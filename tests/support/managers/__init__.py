"""Managers for tests: as processes of their own, in this process, or as a test tells them."""
