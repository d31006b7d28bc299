"""Connections to brokers: log-in, errors that name their cause, and the cluster's leaders."""
