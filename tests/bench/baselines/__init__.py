"""What Outfitter is compared with: the same job without it, each in a process of its own."""
