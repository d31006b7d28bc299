"""Commands that act for a worker."""
