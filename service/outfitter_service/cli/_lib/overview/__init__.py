"""The screen of `outfitter top`: a cluster in a terminal, from the bus or from an API."""
