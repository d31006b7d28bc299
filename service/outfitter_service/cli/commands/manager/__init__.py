"""Commands for operating managers and their topics."""
