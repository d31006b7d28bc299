"""Leases: how long each worker may be silent. In memory only; times are monotonic seconds given by the caller.

A lease that has run out is only suspected here. Whoever hears the input judges it (runtime/processor.py):
silence counts when everything sent before the deadline has been processed.
"""

from __future__ import annotations

import heapq
import math


class Leases:
    """Deadlines by allocation key. A key without a lease (owner watched, or none asked for) is not in here."""

    def __init__(self, grace_s: float) -> None:
        self.grace_s = grace_s
        self._length: dict[str, float] = {}
        self._deadline: dict[str, float] = {}
        # one look at each key, at the latest at its deadline; a renewal moves the deadline and not the look
        self._look: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def __contains__(self, key: str) -> bool:
        return key in self._deadline

    def __len__(self) -> int:
        return len(self._deadline)

    def keys(self) -> set[str]:
        """The allocations that have a lease."""
        return set(self._deadline)

    def start(self, key: str, length_s: float, now: float) -> None:
        """Begin a lease, or begin it anew with another length."""
        self._length[key] = length_s
        self._deadline[key] = now + length_s + self.grace_s
        if self._look.get(key, math.inf) > self._deadline[key]:
            self._look_at(key, self._deadline[key])

    def renew(self, key: str, now: float) -> None:
        """A sign of life: one whole lease from now, if there is one."""
        length = self._length.get(key)
        if length is not None:
            self._deadline[key] = now + length + self.grace_s

    def drop(self, key: str) -> None:
        """The allocation is over, or its owner is watched."""
        self._length.pop(key, None)
        self._deadline.pop(key, None)
        self._look.pop(key, None)

    def clear(self) -> None:
        """Nobody has a lease any more."""
        for by_key in (self._length, self._deadline, self._look):
            by_key.clear()
        self._heap.clear()

    def renew_all(self, now: float) -> None:
        """After an outage, a restart or a suspended machine nobody could be heard: one whole lease for all."""
        for key in self._deadline:
            self.renew(key, now)

    def deadline(self, key: str) -> float:
        """When the key's lease and grace end. Raises KeyError when it has no lease."""
        return self._deadline[key]

    def due(self, now: float) -> list[str]:
        """The keys whose deadline has passed, the earliest first. They stay until dropped or renewed."""
        looked: list[str] = []
        while self._heap and self._heap[0][0] <= now:
            at, key = heapq.heappop(self._heap)
            if self._look.get(key) == at:
                looked.append(key)
                del self._look[key]
        for key in looked:
            self._look_at(key, self._deadline[key])
        return sorted([key for key in looked if self._deadline[key] <= now], key=self._deadline.__getitem__)

    def _look_at(self, key: str, at: float) -> None:
        self._look[key] = at
        heapq.heappush(self._heap, (at, key))
        if len(self._heap) > 2 * len(self._look) + 64:
            # dropped leases leave their looks behind, for as long as the lease would have been
            self._heap = [(at, key) for key, at in self._look.items()]
            heapq.heapify(self._heap)
