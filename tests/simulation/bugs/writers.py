"""Bugs of a writer that keeps the rules of transactions wrongly."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import patch

from outfitter_proto.bus import (
    BusError,
    CommitUnknownError,
    Entry,
    FencedError,
)
from simulation.bugs.bug import Bug
from simulation.model.broker import Producer
from simulation.model.client import ModelBus, ModelWriter
from simulation.model.errors import FENCED, RefusedError
from simulation.model.log import Log
from simulation.world import settings


class _LateFence(ModelWriter):
    async def take(self) -> None:
        """Later."""

    async def commit(self, parts: Sequence[tuple[str, Sequence[Entry]]]) -> None:
        if self._producer is None:
            await super().take()
        await super().commit(parts)


class _Forgetful(ModelWriter):
    async def _produce(self, producer: Producer, log: Log, entries: Sequence[Entry]) -> None:
        try:
            await super()._produce(producer, log, entries)
        except RefusedError as error:
            if error.code in FENCED:
                raise


class _Stubborn(ModelWriter):
    """Commits once more after an error that ends a writer."""

    after: type[BusError] = CommitUnknownError

    async def commit(self, parts: Sequence[tuple[str, Sequence[Entry]]]) -> None:
        try:
            await super().commit(parts)
        except self.after:
            self._unusable = self._begun = self._ending = False
            self._sequences.clear()
            await self.take()
            await super().commit(parts)


class _Zombie(_Stubborn):
    after = FencedError


class _NeverReopened(ModelWriter):
    @property
    def must_reopen(self) -> bool:
        return self._unusable


class _TwoSteps(ModelWriter):
    async def commit(self, parts: Sequence[tuple[str, Sequence[Entry]]]) -> None:
        *before, (topic, entries) = parts
        await super().commit([*before, (topic, entries[:-1])])
        await super().commit([(topic, entries[-1:])])


class _TakesFirst(ModelWriter):
    async def commit(self, parts: Sequence[tuple[str, Sequence[Entry]]]) -> None:
        *before, (topic, entries) = parts
        await super().commit([*before, (topic, [*reversed(entries[:-1]), entries[-1]])])


def _writing(kind: type[ModelWriter]) -> type[ModelBus]:
    class Buggy(ModelBus):
        writer = kind

    return Buggy


BUGS: tuple[Bug, ...] = (
    Bug(
        name="fence-after-restore",
        what="the ledger is read first, and the predecessor is fenced by the first commit",
        within=40,
        bus=_writing(_LateFence),
    ),
    Bug(
        name="forgotten-future",
        what="a produce that failed is not noticed, and the transaction is committed without it",
        within=120,
        bus=_writing(_Forgetful),
    ),
    Bug(
        name="unknown-commit-retried",
        what="a commit whose outcome is unknown is made once more",
        within=150,
        bus=_writing(_Stubborn),
    ),
    Bug(
        name="no-reopening",
        what="a producer whose request was repeated is kept: a late EndTxn ends a later transaction",
        within=400,
        bus=_writing(_NeverReopened),
        # looked for where the network troubles the requests in question
        patches=lambda: patch.object(settings, "STORMS", (("EndTxn",),)),
    ),
    Bug(
        name="zombie-goes-on",
        what="a fenced writer takes its identity again and goes on with what it has in mind",
        within=40,
        bus=_writing(_Zombie),
    ),
    Bug(
        name="checkpoint-apart",
        what="the checkpoint is committed after the records that it is about",
        within=40,
        bus=_writing(_TwoSteps),
    ),
    Bug(
        name="grants-before-releases",
        what="within a commit, what takes devices stands before what releases them",
        within=40,
        bus=_writing(_TakesFirst),
    ),
)
