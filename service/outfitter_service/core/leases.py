"""Leases: how long each worker may be silent. In memory only; times are monotonic seconds given by the caller.

A lease that has run out is only suspected here. Whoever hears the input judges it (runtime/processor.py):
silence counts when everything sent before the deadline has been processed.
"""

from __future__ import annotations

import heapq


class Leases:
    """Deadlines by allocation key. A key without a lease (owner watched, or none asked for) is not in here."""

    def __init__(self, grace_s: float) -> None:
        self.grace_s = grace_s
        self._length: dict[str, float] = {}
        self._deadline: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def __contains__(self, key: str) -> bool:
        return key in self._deadline

    def __len__(self) -> int:
        return len(self._deadline)

    def start(self, key: str, length_s: float, now: float) -> None:
        """Begin a lease, or begin it anew with another length."""
        self._length[key] = length_s
        self._deadline[key] = now + length_s + self.grace_s
        heapq.heappush(self._heap, (self._deadline[key], key))

    def renew(self, key: str, now: float) -> None:
        """A sign of life: one whole lease from now, if there is one."""
        length = self._length.get(key)
        if length is not None:
            self._deadline[key] = now + length + self.grace_s

    def drop(self, key: str) -> None:
        """The allocation is over, or its owner is watched."""
        self._length.pop(key, None)
        self._deadline.pop(key, None)

    def renew_all(self, now: float) -> None:
        """After an outage, a restart or a suspended machine nobody could be heard: one whole lease for all."""
        for key in self._deadline:
            self.renew(key, now)

    def deadline(self, key: str) -> float:
        """When the key's lease and grace end. Raises KeyError when it has no lease."""
        return self._deadline[key]

    def due(self, now: float) -> list[str]:
        """The keys whose deadline has passed. They stay until dropped or renewed."""
        found: list[str] = []
        keep: list[tuple[float, str]] = []
        while self._heap and self._heap[0][0] <= now:
            _, key = heapq.heappop(self._heap)
            deadline = self._deadline.get(key)
            if deadline is None:
                continue
            keep.append((deadline, key))
            if deadline <= now:
                found.append(key)
        for item in dict.fromkeys(keep):
            heapq.heappush(self._heap, item)
        return list(dict.fromkeys(found))

    def next_deadline(self) -> float | None:
        """No lease is due before this time; None when there is none."""
        return self._heap[0][0] if self._heap else None
