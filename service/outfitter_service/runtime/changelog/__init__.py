"""The ledger topic as a changelog: restored, written, snapshotted, and compared with the topics' shape."""
