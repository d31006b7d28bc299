"""What `outfitter doctor` checks, and how."""
