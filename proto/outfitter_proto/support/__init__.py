"""Small helpers. Of the wire's records they use only `Owner`."""
