"""What a processor says of its commits: metrics, log lines, gauges, and the self-check of exclusivity."""
