"""Backup: copies the committed ledger into a file, and writes such a file into new topics."""
