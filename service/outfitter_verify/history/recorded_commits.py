"""Which commits history has, and whether a gap in their numbers is legal.

History can be switched off, and its topic can be recreated. A manager writes all its commits into history, or none. So
a gap is legal if the ledger shows a commit in it by a manager that writes no history.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from itertools import pairwise
from operator import attrgetter
from typing import Any

from outfitter_verify import wire
from outfitter_verify.ledger.walk import LedgerWalk

NOT_RECORDED = "it was not written for a while (was it switched off?)"

CommitId = tuple[str, int]
"""A commit: its writer and its number."""

_number = attrgetter("checkpoint.commit")


class RecordedCommits:
    """The commits that history has. Add every checkpoint and snapshot in order; then ask about gaps."""

    def __init__(self) -> None:
        self.instances: set[tuple[str, str]] = set()
        """Each writer with the instance of a manager that writes history."""
        self._instance: defaultdict[str, dict[int, str]] = defaultdict(dict)
        """By writer and commit: the instance of the manager."""
        self._numbers: defaultdict[str, list[int]] = defaultdict(list)
        """By writer: the numbers of its commits, sorted."""
        self._snapshots: set[tuple[str, object]] = set()
        """Writers, each with the commit at which a snapshot begins."""
        self._legal: dict[tuple[str, int, int | None], bool] = {}
        """The gaps that were judged: writer, the numbers on both sides, and the verdict."""

    def commit(self, checkpoint: wire.Checkpoint) -> None:
        """Add a commit."""
        writer, number = checkpoint.writer, checkpoint.commit
        if number in self._instance[writer]:
            return
        self._instance[writer][number] = checkpoint.instance
        self.instances.add((writer, checkpoint.instance))
        insort(self._numbers[writer], number)

    def snapshot(self, body: dict[str, Any]) -> None:
        """Add a piece of a snapshot."""
        if isinstance(body.get("writer"), str) and isinstance(body.get("begun"), int):
            self._snapshots.add((body["writer"], body["begun"]))

    def begins_anew(self, writer: str, number: int) -> bool:
        """Whether a writer's history begins after this commit, with a snapshot: the topic was recreated."""
        first = self._numbers[writer][:1]
        return bool(first) and number < first[0] and (writer, first[0]) in self._snapshots

    def leaves_out(self, ledger: LedgerWalk, after: CommitId | None, before: CommitId) -> bool:
        """Whether history may lack commits between two of its own (None: between its beginning and `before`)."""
        writer, number = before
        if after is None or after[0] == writer:
            return self._gap(ledger, writer, after[1] if after is not None else 0, number)
        return self._gap(ledger, after[0], after[1], None) or self._gap(ledger, writer, 0, number)

    def _gap(self, ledger: LedgerWalk, writer: str, after: int, before: int | None) -> bool:
        numbers = self._numbers[writer]
        low = bisect_right(numbers, after)
        high = bisect_left(numbers, before) if before is not None else len(numbers)
        recorded = [after, *numbers[low:high]]
        pairs: list[tuple[int, int | None]] = [*pairwise(recorded), (recorded[-1], before)]
        gaps = [(start, end) for start, end in pairs if end is None or end > start + 1]
        return any(self._is_legal(ledger, writer, start, end) for start, end in gaps)

    def _is_legal(self, ledger: LedgerWalk, writer: str, low: int, high: int | None) -> bool:
        """Whether history may lack the commits between two numbers (both exclusive; None: all later ones)."""
        gap = writer, low, high
        if gap not in self._legal:
            self._legal[gap] = self._judge(ledger, writer, low, high)
        return self._legal[gap]

    def _judge(self, ledger: LedgerWalk, writer: str, low: int, high: int | None) -> bool:
        in_ledger = ledger.commits.writers.get(writer)
        commits = in_ledger.commits if in_ledger is not None else []
        first = bisect_right(commits, low, key=_number)
        last = bisect_left(commits, high, key=_number) if high is not None else len(commits)
        shown = [commit.checkpoint for commit in commits[first:last]]
        if any((writer, checkpoint.instance) not in self.instances for checkpoint in shown):
            return True
        if high is None:
            return False
        if self.begins_anew(writer, high - 1):
            return True
        if high - low - 1 <= len(shown):
            return False
        # The ledger does not show who wrote them. A host's manager that wrote before and after has written them, too.
        instances = self._instance[writer]
        is_same = low in instances and instances.get(low) == instances.get(high)
        return not (is_same and writer.startswith("host/"))
