"""The ledger in memory: host by host, and as it will be after the decision in the making."""
