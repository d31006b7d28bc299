"""Growth: adds partitions, and moves each host's records to its new partition."""
