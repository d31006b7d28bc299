"""The sweeper: makes dead letters of messages for hosts that have no manager."""
