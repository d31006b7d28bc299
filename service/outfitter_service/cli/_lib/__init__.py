"""Code that commands share."""
