"""`outfitter hold` and `outfitter-lease`: devices for another process than their own."""
