"""The read side: the ledger and its history for commands that only show them."""
