"""Small helpers. They use no record of the wire but `Owner`."""
