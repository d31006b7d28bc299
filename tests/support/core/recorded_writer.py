"""A writer that commits to two topics in memory, ledger and history: the real batches and snapshots around the core.

It has the interface of `world.World`, so that the same random events can be played on it. After each commit it
replays all of history and compares the end with the ledger, bytes and all.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from msgspec import UNSET

from outfitter_proto.bus import Entry
from outfitter_proto.codec import decode_ledger
from outfitter_proto.names import topics
from outfitter_proto.records import (
    Allocation,
    Checkpoint,
    Cordon,
    CordonOrder,
    Deregister,
    Heartbeat,
    Host,
    InputPosition,
    ManagerIdentity,
    Register,
    Source,
)
from outfitter_service.core import delays
from outfitter_service.core import model as m
from outfitter_service.core.decide import Rules, implied
from outfitter_service.core.state.ledger import Ledger, PutAllocation, PutRecord
from outfitter_service.query.replay import Replay
from outfitter_service.runtime.changelog.snapshots import Pace, Snapshots
from outfitter_service.runtime.processor.commit.commit import Commit
from outfitter_service.runtime.processor.reporting.gauges import StateGauges
from support.core import commits
from support.core.core_driver import HOST, START

TOPICS = topics()


def values(records: Mapping[str, bytes]) -> dict[str, Any]:
    """These records as values, by key."""
    return {key: json.loads(record) for key, record in records.items()}


class RecordedWriter:
    """One writer. `log` is what stands in history, `ledgers` the ledger after each commit that is in it, by number."""

    def __init__(self, rules: Rules, pace: Pace) -> None:
        self.rules = rules
        self.pace = pace
        self.now = START
        self.offset = 0
        self.runs = 0
        self.ledger = Ledger()
        self.topic: dict[str, bytes] = {}
        self.log: list[bytes] = []
        self.ledgers: dict[int, dict[str, bytes]] = {}
        self.starts: dict[datetime, int] = {}
        """Where in the log the commit of a moment begins."""
        self.waiting: deque[m.Event] = deque()
        self.said: list[m.Event] = []
        self.commands: list[m.Command] = []
        self.orders: dict[str, CordonOrder] = {}
        self.history = True
        self.state_gauges = StateGauges(rules.specs)
        self.snapshots = self._begin()
        manager = ManagerIdentity(instance="one", version="0", since=START)
        self.next.apply([PutRecord(Host(host=HOST, manager=manager, since=START))])
        self.commit()

    def _begin(self) -> Snapshots:
        self.runs += 1
        self.next = self._begin_commit()
        return Snapshots(self.rules.writer, f"run-{self.runs}", self.pace if self.history else None)

    def _begin_commit(self) -> Commit:
        return commits.begin(self.ledger, self.rules, self.now, history=self.history)

    # --- what `World` has, too ---

    def say(self, event: m.Event) -> None:
        self.waiting.append(event)
        while self.waiting:
            event = self.waiting.popleft()
            self.said.append(event)
            assert self.next.decide(event) is not None, "the commit has no room for it"

    def message(self, message: Register | Heartbeat | Deregister) -> None:
        self.offset += 1
        self.say(m.Incoming(message, Source(partition=0, offset=self.offset)))

    def order(self, order: CordonOrder) -> None:
        self.orders[order.id] = order
        self.say(m.OrderRead(order=order))

    def commit(self) -> None:
        commit, snapshots = self.next, self.snapshots
        commit.renumber(HOST, 1e9)
        commit.set_time(self.now)
        number = self.ledger.commits + 1
        commit.transaction.piece = snapshots.piece(self.ledger, self.now, commit=number)
        written = dict(commit.transaction.entries(TOPICS, self._checkpoint(number)))
        self._write(written[TOPICS.allocations])
        assert self.history or TOPICS.history not in written
        self.starts[commit.now] = len(self.log)
        self.log += [entry.value or b"" for entry in written.get(TOPICS.history, [])]
        self.ledger.begin_commit()
        self.ledger.end_commit()
        assert self.state_gauges.update(commit.effects.allocations, before=commit.effects.before) == []
        snapshots.committed(commit.transaction.piece, commit.transaction.history_bytes)
        if self.history:
            self.ledgers[number] = dict(self.topic)
        self.commands += commit.effects.commands
        self.waiting.extend(commit.effects.follow_ups)
        self.said.clear()
        self.now += timedelta(milliseconds=1)
        self.next = self._begin_commit()
        self.check()

    def is_out_of_sight(self, key: str) -> bool:
        record = self.ledger.allocations.get(key)
        return record is not None and delays.is_out_of_sight(record, self.rules.sees)

    def settle(self) -> None:
        for _ in range(1000):
            while self.waiting:
                self.say(self.waiting.popleft())
            self.commit()
            if not self.waiting:
                return
        raise AssertionError("follow-ups do not end")

    def fail_commit(self) -> None:
        self.next.transaction.piece = self.snapshots.piece(self.ledger, self.now, commit=self.ledger.commits + 1)
        self.ledger.rollback()
        self.snapshots.rollback()
        self.waiting.extendleft(reversed(self.said))
        self.said.clear()
        self.next = self._begin_commit()

    def crash(self, rules: Rules | None = None) -> None:
        """All memory is lost; the ledger is read again by a new run, which has these `rules`."""
        self.rules = rules or self.rules
        self.state_gauges = StateGauges(self.rules.specs)
        self._restore()
        self.snapshots = self._begin()
        self.snapshots.resume(self.last_checkpoint())

    def take_anew(self) -> None:
        """The same run takes the partition again, and goes on with its snapshot."""
        self.snapshots.rollback()
        self._restore()
        self.next = self._begin_commit()
        self.snapshots.resume(self.last_checkpoint())

    def switch(self, *, history: bool) -> None:
        """Another run, with history or without."""
        self.history = history
        self.crash()

    def pass_time(self, seconds: float) -> None:
        self.commit()
        self.now += timedelta(seconds=seconds)
        self.next.set_time(self.now)
        self.say(m.Tick(host=HOST))

    # --- its parts ---

    def _checkpoint(self, number: int) -> Checkpoint:
        return Checkpoint(
            writer=self.rules.writer, instance=f"run-{self.runs}", cluster="outfitter", scope="host", commit=number,
            token=self.ledger.token, at=self.now,
            input=InputPosition(topic_id="t", partition=0, from_=0, to=self.offset),
            snapshot=self.snapshots.newest(self.next.transaction.piece),
        )  # fmt: skip

    def _write(self, entries: list[Entry]) -> None:
        for entry in entries:
            key = (entry.key or b"").decode()
            if entry.value is None:
                self.topic.pop(key, None)
            else:
                self.topic[key] = entry.value

    def last_checkpoint(self) -> Checkpoint:
        found = decode_ledger(self.topic[f"@checkpoint/{self.rules.writer}"])
        assert isinstance(found, Checkpoint)
        return found

    def _restore(self) -> None:
        self.ledger = Ledger()
        for record in map(decode_ledger, self.topic.values()):
            match record:
                case Allocation():
                    self.ledger.restore(PutAllocation(record.key, record))
                case Host() | Cordon():
                    self.ledger.restore(PutRecord(record))
                case Checkpoint():
                    self.ledger.resume(commit=record.commit, token=record.token)
                case _:
                    raise AssertionError(record)
        self.state_gauges.replay(self.ledger.allocations)
        self.said.clear()
        self.commands = [command for one in self.ledger.allocations.values() if (command := implied(one)) is not None]
        self.waiting = deque([m.Reschedule(host=HOST)])

    # --- what must be so ---

    def replayed(self, *, start: int = 0, last: int | None = None) -> dict[str, bytes] | None:
        """The ledger as history has it after commit `last` (None: the end), read from `start`; None: it is not
        whole there."""
        replay = Replay(commits={} if last is None else {self.rules.writer: last})
        for value in self.log[start:]:
            replay.add(value)
        progress = replay.writers.get(self.rules.writer)
        if progress is None or progress.complete_since is None or (last is not None and progress.commit != last):
            return None
        return {key: kept.wire for key, kept in replay.records.items()}

    def check(self) -> None:
        """What is counted commit by commit is what there is. The end of history is the ledger, from where the
        checkpoint says that a snapshot was begun, and from the beginning."""
        anew = StateGauges(self.rules.specs)
        assert anew.replay(self.ledger.allocations, hosts=self.ledger.hosts) == []
        assert self.state_gauges.state_counts(self.ledger) == anew.state_counts(self.ledger)
        checkpoint = self.last_checkpoint()
        if checkpoint.snapshot is UNSET:
            return
        for start in (0, self.starts[checkpoint.snapshot]):
            told = self.replayed(start=start)
            assert told is not None, f"history is not whole from {start}"
            assert values(self.topic) == values(told)
