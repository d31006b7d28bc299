"""The partition processor: events become decisions, decisions become one commit after another."""
