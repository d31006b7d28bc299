"""`outfitter run`: starting its command, watching it and passing signals on."""
