"""How `outfitter run` starts its command, watches it and passes signals on."""
