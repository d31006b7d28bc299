"""The read side: the ledger and its history for whoever looks on. It changes nothing."""
