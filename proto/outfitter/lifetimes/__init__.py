"""How long a context lasts: as long as an object, as the last of several users, or as another process."""
