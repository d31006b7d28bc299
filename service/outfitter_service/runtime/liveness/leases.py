"""Leases: how long each worker may be silent. They are only in memory; times are monotonic seconds from the caller.

A passed deadline is only a suspicion here. silence.py judges it: silence counts once all messages that were sent before
the deadline are decided.
"""

from __future__ import annotations

import heapq
import itertools
import math

from outfitter_proto.keys import AllocationKey

_IN_ROUNDS = -math.inf
"""The check time of a key whose deadline has passed: it is in no heap."""


class Leases:
    """Deadlines by allocation key. An allocation whose owner is watched has no lease, nor one that wants none.
    `is_round_open`: the current round of `due` is not over."""

    def __init__(self, grace_s: float) -> None:
        """`grace_s`: seconds between a lease's end and its deadline."""
        self.grace_s = grace_s
        self._length: dict[AllocationKey, float] = {}
        self._deadline: dict[AllocationKey, float] = {}
        # each key has one check, at the latest at its deadline; a renewal moves the deadline and not the check. Keys
        # whose deadline has passed are checked in rounds instead: each is due in this round, or done
        self._check_at: dict[AllocationKey, float] = {}
        self._heap: list[tuple[float, AllocationKey]] = []
        self._due_now: dict[AllocationKey, None] = {}
        self._done_this_round: dict[AllocationKey, None] = {}
        self.is_round_open = False

    def __contains__(self, key: AllocationKey) -> bool:
        return key in self._deadline

    def __len__(self) -> int:
        return len(self._deadline)

    def keys(self) -> set[AllocationKey]:
        """The allocations that have a lease."""
        return set(self._deadline)

    def start(self, key: AllocationKey, length_s: float, now: float) -> None:
        """Start a lease, or start it again with another length."""
        self._length[key] = length_s
        self._deadline[key] = now + length_s + self.grace_s
        if self._check_at.get(key, math.inf) > self._deadline[key]:
            self._schedule_check(key, self._deadline[key])

    def renew(self, key: AllocationKey, now: float) -> None:
        """A sign of life: one whole lease from now, if there is one."""
        length = self._length.get(key)
        if length is not None:
            self._deadline[key] = now + length + self.grace_s

    def drop(self, key: AllocationKey) -> None:
        """Drop the lease: the allocation has ended, or its owner is watched."""
        self._length.pop(key, None)
        for by_key in (self._deadline, self._check_at, self._due_now, self._done_this_round):
            by_key.pop(key, None)

    def clear(self) -> None:
        """Drop all leases."""
        for by_key in (self._length, self._deadline, self._check_at):
            by_key.clear()
        for checks in (self._heap, self._due_now, self._done_this_round):
            checks.clear()

    def renew_all(self, now: float) -> None:
        """Give every worker one whole lease: after an outage, a restart or a suspended machine silence proves
        nothing."""
        for key in self._deadline:
            self.renew(key, now)

    def postpone(self, seconds: float) -> None:
        """For so long nobody's silence counts."""
        for key in self._deadline:
            self._deadline[key] += seconds

    def deadline(self, key: AllocationKey) -> float:
        """When the key's lease and grace end. Raises KeyError if it has no lease."""
        return self._deadline[key]

    def due(self, now: float, most: int | None = None) -> list[AllocationKey]:
        """Keys whose deadline has passed, the earliest first. They stay until dropped or renewed.

        One call returns at most `most` keys, and the next calls return the others. Each key comes once in a round, and
        `is_round_open` says that the round is not over. So keys that cannot be judged yet do not delay the others.
        """
        self._gather(now, most)
        due: list[AllocationKey] = []
        for key in list(itertools.islice(self._due_now, most)):
            del self._due_now[key]
            if self._deadline[key] <= now:
                due.append(key)
            else:
                self._schedule_check(key, self._deadline[key])
        self._done_this_round |= dict.fromkeys(due)
        self.is_round_open = bool(self._due_now) or (bool(self._heap) and self._heap[0][0] <= now)
        if not self.is_round_open:
            self._due_now, self._done_this_round = self._done_this_round, self._due_now
        return sorted(due, key=self._deadline.__getitem__)

    def _gather(self, now: float, most: int | None) -> None:
        """Move keys whose check is due into this round, or check them again at their deadline."""
        checked = 0
        while self._heap and self._heap[0][0] <= now and (most is None or checked < most):
            checked += 1
            at, key = heapq.heappop(self._heap)
            if self._check_at.get(key) != at:
                continue
            if self._deadline[key] <= now:
                self._check_at[key] = _IN_ROUNDS
                self._due_now[key] = None
            else:
                self._schedule_check(key, self._deadline[key])

    def _schedule_check(self, key: AllocationKey, at: float) -> None:
        self._check_at[key] = at
        heapq.heappush(self._heap, (at, key))
        if len(self._heap) > 2 * len(self._check_at) + 64:
            # checks of dropped leases stay in the heap until their time comes
            self._heap = [(at, key) for key, at in self._check_at.items() if at != _IN_ROUNDS]
            heapq.heapify(self._heap)
