"""The ledger topic as a changelog: encoding, restore, snapshots, and checks of the topics' layout."""
