"""Reports a processor's commits: metrics, log lines, gauges, and the self-check of exclusivity."""
