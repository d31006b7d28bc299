"""Commands that show the ledger and its history."""
