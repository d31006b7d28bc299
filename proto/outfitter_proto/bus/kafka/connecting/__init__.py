"""Connections to brokers: log-in, errors with their cause, and the cluster's leaders."""
