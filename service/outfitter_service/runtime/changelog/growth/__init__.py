"""Growing on purpose: more partitions, and each host's records where they belong then."""
