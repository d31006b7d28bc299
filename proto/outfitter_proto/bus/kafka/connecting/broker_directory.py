"""What one bus has learnt of its brokers, for all of its clients: which there are, who hung of late, who leads by now.

A broker that was frozen or cut off goes on as if nothing had happened when it wakes: it still takes itself for the
leader, and answers from a log that ends where it fell asleep, until it hears of its successor. A ledger restored from
that would lack commits. So a leader counts only while no later one (a higher leader epoch, KIP-101) is known.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from outfitter_proto.bus.addresses import Node

DOUBT_S = 2.0
"""Seconds for which a broker that hung is asked last, and not connected to while there are others. Each client that
waits for it by itself would lose a request's time-out."""


class BrokerDirectory:
    """See the module. `nodes` are the addresses to begin with."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._nodes = dict.fromkeys(nodes)
        self._doubted: dict[Node, float] = {}
        self._epochs: dict[tuple[str, int], int] = {}

    def learn(self, nodes: Iterable[Node]) -> None:
        """There are these, too."""
        self._nodes.update(dict.fromkeys(nodes))

    def doubt(self, node: Node) -> None:
        """It did not answer what it could have answered alone, or is behind the others."""
        self._doubted[node] = time.monotonic()

    def doubtful(self, node: Node) -> bool:
        """Whether to ask somebody else rather, while there is somebody else."""
        return len(self._nodes) > 1 and time.monotonic() - self._doubted.get(node, -DOUBT_S) < DOUBT_S

    def order(self) -> list[Node]:
        """All known, in the order in which to ask."""
        return sorted(self._nodes, key=self.doubtful)

    def newest(self, topic_id: str, partition: int, epoch: int) -> bool:
        """Whether no later leader epoch of the partition is known; this one is known from now on."""
        known = self._epochs.get((topic_id, partition), -1)
        self._epochs[topic_id, partition] = max(known, epoch)
        return epoch >= known
