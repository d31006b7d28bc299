"""The retained runs of one host's workers: all records, and how long the final ones are over."""

from __future__ import annotations

from bisect import bisect_left, insort
from datetime import datetime

from outfitter_proto.keys import AllocationKey
from outfitter_proto.records import FINAL_STATES, Allocation

Run = tuple[int, AllocationKey]
"""(offset of the first registration, allocation key) of one incarnation. The last in order is the newest."""

Ending = tuple[datetime, AllocationKey]
"""(when it ended or failed, allocation key). The first in order is deleted first."""


class RunIndex:
    """The retained runs of one host's workers. It is a function of all records."""

    def __init__(self) -> None:
        self.incarnations: dict[str, tuple[Run, ...]] = {}
        """All of each worker, the newest last. They are in a tuple: the garbage collector traverses a tuple of texts
        and numbers only once, but a list in each collection."""
        self.endings: list[Ending] = []
        """The final records, the oldest first, whatever the clock did."""
        self.past: dict[str, list[Ending]] = {}
        """The same by worker."""

    @property
    def final_count(self) -> int:
        """How many of the records are final."""
        return len(self.endings)

    def newest(self, worker: str) -> AllocationKey | None:
        """The key of a worker's newest incarnation."""
        incarnations = self.incarnations.get(worker)
        return incarnations[-1][1] if incarnations else None

    def change(self, key: AllocationKey, before: Allocation | None, after: Allocation | None) -> None:
        """Replace a record by another one. None: there is none."""
        if before is not None and before.state in FINAL_STATES:
            ending = (before.since, key)
            del self.endings[bisect_left(self.endings, ending)]
            past = self.past[before.worker]
            del past[bisect_left(past, ending)]
            if not past:
                del self.past[before.worker]
        if after is None:
            if before is not None:
                self._forget(key, before)
            return
        self._add(key, after)
        if after.state in FINAL_STATES:
            ending = (after.since, key)
            insort(self.endings, ending)
            insort(self.past.setdefault(after.worker, []), ending)

    def add_first(self, key: AllocationKey, record: Allocation) -> None:
        """Add the first record of a worker, which is not final."""
        self.incarnations[record.worker] = ((record.source.offset, key),)

    def _add(self, key: AllocationKey, record: Allocation) -> None:
        run = (record.source.offset, key)
        runs = self.incarnations.get(record.worker)
        if runs is None:  # nearly always
            self.incarnations[record.worker] = (run,)
        elif runs[-1] < run:
            self.incarnations[record.worker] = runs + (run,)  # noqa: RUF005 - unpacking copies a thousand runs thrice
        elif runs[(position := bisect_left(runs, run)) : position + 1] != (run,):
            self.incarnations[record.worker] = (*runs[:position], run, *runs[position:])

    def _forget(self, key: AllocationKey, record: Allocation) -> None:
        runs = self.incarnations[record.worker]
        position = bisect_left(runs, (record.source.offset, key))
        runs = runs[:position] + runs[position + 1 :] if position else runs[1:]
        if runs:
            self.incarnations[record.worker] = runs
        else:
            del self.incarnations[record.worker]
