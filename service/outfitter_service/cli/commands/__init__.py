"""The commands: one file each, imported on use."""
