"""Bugs of a processor: what it reads, decides ahead, commits and does in the wrong order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from outfitter_proto.bus import (
    BusError,
    Message,
    OffsetOutOfRangeError,
)
from outfitter_service.core.state.ledger import Ledger
from outfitter_service.runtime.input.lookahead import LookAheadBuffer
from outfitter_service.runtime.processor.commit.commit import Commit
from outfitter_service.runtime.processor.commit_loop import CommitLoop
from outfitter_service.runtime.processor.equipment import Equipment
from outfitter_service.runtime.processor.event_queue import EventQueue
from outfitter_service.runtime.processor.takeover import Takeover
from simulation.bugs.bug import Bug, nothing


@contextmanager
def _acting_early() -> Iterator[None]:
    commit = CommitLoop._commit

    async def act_and_commit(self: CommitLoop, work: Commit, checkpoint: Any) -> None:
        for command in work.effects.commands:
            record, _ = work.transaction.values.get(command.allocation, (None, None))
            self._drivers.perform(command, record)  # type: ignore[arg-type]
        await commit(self, work, checkpoint)

    with patch.object(CommitLoop, "_commit", act_and_commit):
        yield


@contextmanager
def _taken_again() -> Iterator[None]:
    keeps = LookAheadBuffer._accepts

    def keeps_the_next(self: LookAheadBuffer, message: Message) -> bool:
        kept = keeps(self, message)
        if self._left.pop(message.key or b"", None) is not None:
            self._kept[message.key or b""] = 0
        return kept

    with patch.object(LookAheadBuffer, "_accepts", keeps_the_next):
        yield


@contextmanager
def _on_from_the_end() -> Iterator[None]:
    begin_again = CommitLoop._begin_again

    async def begin_at_the_end(self: CommitLoop, lost: OffsetOutOfRangeError) -> BusError | None:
        return await begin_again(self, OffsetOutOfRangeError(str(lost), start=lost.end, end=lost.end))

    with patch.object(CommitLoop, "_begin_again", begin_at_the_end):
        yield


class _Everything:
    def __contains__(self, _: object) -> bool:
        return True


def _regardless(self: CommitLoop) -> LookAheadBuffer | None:
    lookahead_buffer = self._lookahead.lookahead_buffer
    return lookahead_buffer if lookahead_buffer and lookahead_buffer.messages else None


BUGS: tuple[Bug, ...] = (
    Bug(
        name="acting-before-the-commit",
        what="drivers are called before the commit that says so has returned",
        within=300,
        patches=_acting_early,
    ),
    Bug(
        name="rollback-forgotten",
        what="what a failed commit decided stays in mind",
        within=80,
        patches=lambda: patch.object(Ledger, "rollback", lambda self: (self.end_commit(), self.discard_undo())),
    ),
    Bug(
        name="commands-not-issued-again",
        what="what an unfinished record of the ledger implies is not done after a restore",
        within=40,
        patches=lambda: patch.object(EventQueue, "answered", lambda _: _Everything()),
    ),
    Bug(
        name="foreign-instance-fenced-back",
        what="a fenced manager takes the partition again without looking who has it",
        within=40,
        patches=lambda: patch.object(Takeover, "_refuse_successor", nothing),
    ),
    Bug(
        name="left-and-taken-again",
        what="a host that had a message left to its turn has the next one decided before it",
        within=100,
        patches=_taken_again,
    ),
    Bug(
        name="ahead-of-the-window",
        what="a message is decided before its turn while the host's earlier ones still wait for theirs",
        within=100,
        patches=lambda: patch.object(CommitLoop, "_lookahead_buffer", _regardless),
    ),
    Bug(
        name="lost-input-from-the-end",
        what="where the position in the input is out of range, it goes on at the input's end",
        within=60,
        patches=_on_from_the_end,
    ),
    Bug(
        name="lost-input-in-silence",
        what="registrations that were lost are passed over without a word",
        within=60,
        patches=lambda: patch.object(Equipment, "lose_input", lambda self, _: self.liveness.renew_all()),
    ),
    Bug(
        name="no-room",
        what="an event is decided for a commit whose earlier events leave no room for it",
        within=60,
        patches=lambda: patch.object(Commit, "has_room", lambda *_: True),
    ),
)
