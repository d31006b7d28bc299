"""Rebuilding a partition from history: several writers at once, holes, moments, and what a later version may write."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from outfitter_service.query.rebuild import RebuiltPartition
from outfitter_service.query.replay import Replay

BEGUN = datetime(2026, 1, 1, tzinfo=UTC)


def line(kind: str, **fields: Any) -> bytes:
    return msgspec.json.encode({"type": kind, **fields})


def record(writer: str, worker: str, commit: int, **fields: Any) -> dict[str, Any]:
    """As much of an allocation as a replay looks at, and some more."""
    return {"type": "allocation", "host": writer, "worker": worker, "incarnation": "1", "writer": f"host/{writer}",
            "commit": commit, **fields}  # fmt: skip


class Writing:
    """What one writer says, commit by commit, a second each."""

    def __init__(self, name: str, commit: int = 0, *, ledger_id: str = "ledger") -> None:
        self.name = name
        self.commit = commit
        self.ledger_id = ledger_id

    @property
    def at(self) -> datetime:
        """The moment of the newest commit."""
        return BEGUN + timedelta(seconds=self.commit)

    def end(self, **more: Any) -> bytes:
        self.commit += 1
        position = {"topic_id": "t", "partition": 0, "from": 0, "to": self.commit}
        checkpoint = {
            "type": "checkpoint", "writer": f"host/{self.name}", "instance": "i", "cluster": "c", "scope": "host",
            "commit": self.commit, "token": 0, "input": position, "at": self.at,
            "ledger_id": self.ledger_id,
        }  # fmt: skip
        return line("commit", writer=f"host/{self.name}", checkpoint=checkpoint, **more)

    def step(self, worker: str, **fields: Any) -> bytes:
        told = record(self.name, worker, self.commit + 1, **fields)
        return line("transition", host=self.name, worker=worker, incarnation="1", record=told)

    def snapshot(self, *workers: str, part: int = 0, last: bool = True, begun: int | None = None) -> bytes:
        records = {f"{self.name}/{one}/1": record(self.name, one, self.commit + 1) for one in workers}
        fields = {"begun": begun or self.commit + 1, "part": part, "last": last}
        return line("snapshot", writer=f"host/{self.name}", records=records, **fields)


def played(*lines: bytes, **how: Any) -> dict[str, Any]:
    """The state after these lines, without the checkpoints."""
    replay = Replay(**how)
    for one in lines:
        replay.add(one)
    return {
        key: msgspec.json.decode(kept.wire)
        for key, kept in replay.records.items()
        if not key.startswith("@checkpoint/")
    }


def test_transactions_of_several_writers_may_be_mixed_and_end_each_by_its_own_commit() -> None:
    a, b = Writing("a"), Writing("b", 7)
    lines = [a.snapshot(), b.snapshot(), a.step("x"), b.step("y"), b.end(), b.step("z"), a.end()]
    assert played(*lines).keys() == {"a/x/1", "b/y/1"}
    assert played(*lines[:-1]).keys() == {"b/y/1"}


def test_nothing_is_known_before_a_snapshot_is_whole() -> None:
    a = Writing("a")
    lines = [a.step("x"), a.end(), a.snapshot("x", last=False), a.end(), a.step("y"), a.end()]
    assert played(*lines) == {}
    lines += [a.snapshot("z", part=1, begun=2), a.end()]
    assert played(*lines).keys() == {"a/x/1", "a/y/1", "a/z/1"}


def test_a_piece_too_many_changes_nothing_and_a_piece_too_few_leaves_it_unknown() -> None:
    def told(*parts: int) -> dict[str, Any]:
        a = Writing("a")
        lines = []
        for part in parts:
            lines += [a.snapshot(f"w{part}", part=part, begun=1, last=part == 2), a.end()]
        return played(*lines)

    assert told(0, 1, 1, 2).keys() == told(0, 1, 2).keys() == {"a/w0/1", "a/w1/1", "a/w2/1"}
    assert told(0, 2) == told(1, 2) == {}


def test_where_a_commit_is_missing_nothing_is_known_until_the_next_snapshot() -> None:
    a = Writing("a")
    lines = [a.snapshot("x"), a.end()]
    a.commit += 1
    lines += [a.step("y"), a.end()]
    assert played(*lines) == {}
    lines += [a.snapshot("y"), a.end(), a.step("z"), a.end()]
    assert played(*lines).keys() == {"a/y/1", "a/z/1"}


def test_a_snapshot_in_the_very_commit_after_a_hole_is_taken() -> None:
    a = Writing("a")
    lines = [a.snapshot("x"), a.end()]
    a.commit += 5
    lines += [a.step("y"), a.snapshot("y"), a.end()]
    assert played(*lines).keys() == {"a/y/1"}


def test_what_is_over_at_a_moment_is_not_undone_by_what_came_later() -> None:
    a, b = Writing("a"), Writing("b")
    lines = [a.snapshot("x"), a.end(), b.snapshot("y"), b.end(), a.end(dropped=["a/x/1"]), a.step("z"), a.end()]
    assert played(*lines, until=BEGUN + timedelta(seconds=1)).keys() == {"a/x/1", "b/y/1"}
    assert played(*lines, until=BEGUN + timedelta(seconds=2)).keys() == {"b/y/1"}
    assert played(*lines, commits={"host/a": 2}).keys() == {"b/y/1"}
    assert played(*lines, until=BEGUN) == {}


def test_of_a_lost_ledger_nothing_is_left_in_the_one_that_was_begun_anew() -> None:
    """Commits count from 1 again, so the lost one's may have the number of the last."""
    lost, a = Writing("a", ledger_id="lost"), Writing("a", ledger_id="new")
    lines = [lost.snapshot("x"), lost.end(), lost.step("y"), lost.end(), lost.end()]
    lines += [a.snapshot("z"), a.end(), a.step("new"), a.end()]
    ends = {"commits": {"host/a": 2}, "ledgers": {"host/a": "new"}}
    assert played(*lines, **ends).keys() == {"a/z/1", "a/new/1"}
    assert played(*lines, **ends, until=BEGUN + timedelta(seconds=2)).keys() == {"a/x/1", "a/y/1"}


def test_a_writer_that_the_ledger_does_not_know_has_nothing_now_and_had_something_then() -> None:
    a = Writing("a")
    replay = Replay()
    for each in (a.snapshot("x"), a.end()):
        replay.add(each)
    now, then = (RebuiltPartition(partition=0, checkpoints={}, replay=replay, until=until) for until in (None, BEGUN))
    assert now.records == {}
    assert "a/x/1" in then.records


def test_a_reading_that_begins_within_a_commit_is_as_good() -> None:
    """Whatever of the first piece's own commit stands before it is in a piece."""
    a = Writing("a")
    lines = [a.step("x"), a.step("y"), a.snapshot("x", last=False), a.end(), a.snapshot("y", part=1, begun=1), a.end()]
    for start in range(3):
        assert played(*lines[start:]).keys() == {"a/x/1", "a/y/1"}


def test_what_is_brought_up_to_date_keeps_the_rest_and_what_a_later_version_added() -> None:
    a = Writing("a")
    lines = [a.snapshot(), a.step("x", colour="red", reason=None, queue_position=3), a.end()]
    names = {"host": "a", "worker": "x", "incarnation": "1", "writer": "host/a"}
    lines += [line("refresh", **names, changed={"reason": "busy", "commit": 2}), a.end(positions={"a/x/1": 1})]
    assert played(*lines) == {"a/x/1": record("a", "x", 2, colour="red", reason="busy", queue_position=1)}


@pytest.mark.parametrize(
    "foreign", [b"", b"{", b"\xff", b'{"type":"of-a-later-version"}', b"[1]", b'{"type":"commit"}']
)
def test_what_is_no_history_is_passed_over(foreign: bytes) -> None:
    a = Writing("a")
    assert played(foreign, a.snapshot("x"), foreign, a.end(), foreign).keys() == {"a/x/1"}
