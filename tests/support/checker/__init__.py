"""The independent checker: its verdict on a bus, streams written by hand, violations planted in them."""
