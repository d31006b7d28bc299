"""What commands share."""
