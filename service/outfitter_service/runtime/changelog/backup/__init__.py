"""Backup: copies the committed ledger and unanswered registrations into a file, and writes it into new topics."""
