"""The brokers of one bus, shared by its clients: their addresses, which hung recently, and the newest leaders.

A broker that was frozen or cut off continues as leader when it wakes, until it learns of its successor. Its log ends
where it froze, so a ledger restored from it would lack commits. Therefore clients use a leader only while they know no
later one (a higher leader epoch, KIP-101).
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from outfitter_proto.bus.addresses import Node

DOUBT_S = 2.0
"""Seconds for which clients avoid a broker that hung, if there are others. Otherwise each client would wait for it
until a request's time-out."""


class BrokerDirectory:
    """See the module. `nodes`: the addresses in the bus's URL."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._nodes = dict.fromkeys(nodes)
        self._doubted: dict[Node, float] = {}
        self._epochs: dict[tuple[str, int], int] = {}

    def learn(self, nodes: Iterable[Node]) -> None:
        """Add these brokers."""
        self._nodes.update(dict.fromkeys(nodes))

    def doubt(self, node: Node) -> None:
        """Note a broker that is behind the others, or did not answer a request that needs no other broker."""
        self._doubted[node] = time.monotonic()

    def doubtful(self, node: Node) -> bool:
        """Whether to prefer other brokers."""
        return len(self._nodes) > 1 and time.monotonic() - self._doubted.get(node, -DOUBT_S) < DOUBT_S

    def order(self) -> list[Node]:
        """All known brokers, in the order of preference."""
        return sorted(self._nodes, key=self.doubtful)

    def note_epoch(self, topic_id: str, partition: int, epoch: int) -> bool:
        """Note a leader epoch of the partition. Returns whether no later one is known."""
        newest = self._epochs.get((topic_id, partition), -1)
        self._epochs[topic_id, partition] = max(newest, epoch)
        return epoch >= newest
