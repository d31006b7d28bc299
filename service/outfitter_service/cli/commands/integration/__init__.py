"""Commands whose output other programs read."""
