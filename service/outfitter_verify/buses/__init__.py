"""Reading a cluster's committed records from a bus: Kafka, or the embedded bus's file."""

from __future__ import annotations

TOPICS = ("registrations", "allocations", "history", "dead-letters")
"""A cluster's topics, each after the cluster's name and a dot."""
CONTROL = "control"
"""The topic of operators' orders, without which a cluster works."""


class UnreadableError(Exception):
    """There is nothing to check, or it cannot be read completely. The message has the remedy."""
