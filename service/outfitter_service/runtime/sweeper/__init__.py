"""The sweeper: messages for hosts that have no manager become dead letters."""
