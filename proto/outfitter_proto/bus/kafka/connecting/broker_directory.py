"""The brokers of one bus, shared by its clients: their addresses, which hung recently, and the newest leaders.

A broker that was frozen or cut off continues as leader when it wakes, until it learns of its successor. Its log ends
where it froze, so a ledger restored from it would lack commits. Therefore clients use a leader only while they know no
later one (a higher leader epoch, KIP-101).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from outfitter_proto.bus.addresses import Node

DOUBT_S = 2.0
"""Seconds for which clients avoid a broker that hung, if there are others. Otherwise each client would wait for it
until a request's time-out."""


class BrokerDirectory:
    """See the module. `bootstrap`: the addresses in the bus's URL. They may be brokers, or lead to brokers."""

    def __init__(self, bootstrap: Iterable[Node]) -> None:
        self._bootstrap = tuple(dict.fromkeys(bootstrap))
        self._brokers: dict[int, Node] = {}
        self._answered_last: Node | None = None
        self._slow: set[Node] = set()
        self._doubted: dict[Node, float] = {}
        self._epochs: dict[tuple[str, int], int] = {}

    def learn(self, brokers: Mapping[int, Node]) -> None:
        """Replace the brokers, by number, with those in the newest metadata."""
        if brokers:
            self._brokers = dict(brokers)

    def address(self, number: int) -> Node | None:
        """A broker's newest address; None: unknown."""
        return self._brokers.get(number)

    def brokers(self) -> list[Node]:
        """The brokers in the newest metadata, in the order of preference."""
        return sorted(dict.fromkeys(self._brokers.values()), key=self.doubtful)

    def answered(self, node: Node, *, before: Iterable[Node] = ()) -> None:
        """Note that a new connection to this address works. `before`: those that were tried earlier, in vain so far."""
        self._answered_last = node
        self._slow.update(before)
        self._slow.discard(node)

    def doubt(self, node: Node) -> None:
        """Note a broker that is behind the others, or did not answer a request that needs no other broker."""
        self._doubted[node] = time.monotonic()

    def doubtful(self, node: Node) -> bool:
        """Whether to prefer other brokers."""
        is_only = not any(other != node for other in self._brokers.values() or self._bootstrap)
        return not is_only and time.monotonic() - self._doubted.get(node, -DOUBT_S) < DOUBT_S

    def order(self) -> list[Node]:
        """All known addresses, in the order of preference."""
        first, last = self.choices()
        return first + last

    def choices(self) -> tuple[list[Node], list[Node]]:
        """The known addresses to try first, and those to try only if none of these answers."""
        answered = () if self._answered_last is None else (self._answered_last,)
        known = {*self._bootstrap, *self._brokers.values()}
        nodes = [
            node for node in dict.fromkeys((*answered, *self._bootstrap, *self._brokers.values())) if node in known
        ]
        last = [node for node in nodes if node in self._slow or self.doubtful(node)]
        return [node for node in nodes if node not in last], last

    def note_epoch(self, topic_id: str, partition: int, epoch: int) -> bool:
        """Note a leader epoch of the partition. Returns whether no later one is known."""
        newest = self._epochs.get((topic_id, partition), -1)
        self._epochs[topic_id, partition] = max(newest, epoch)
        return epoch >= newest
