"""Bugs of a bus that reads from a wrong position, reads too much, or confuses topics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import msgspec
from msgspec import structs

from outfitter_proto.bus import (
    Entry,
    Message,
    Reader,
    TopicInfo,
)
from simulation.bugs.bug import Bug
from simulation.model.client import ModelBus, ModelReader, ModelWriter
from simulation.world import remaking

CHECKPOINT = b"@checkpoint/"


def _groups(bus: ModelBus) -> dict[bytes | None, int]:
    found: dict[bytes | None, int] = bus._broker.__dict__.setdefault("group_offsets", {})
    return found


class _GroupWriter(ModelWriter):
    async def commit(self, parts: Sequence[tuple[str, Sequence[Entry]]]) -> None:
        await super().commit(parts)
        last = parts[-1][1][-1]
        if (last.key or b"").startswith(CHECKPOINT):
            position = msgspec.json.decode(last.value or b"")["input"]["to"]
            await self._bus._ask("OffsetCommit", lambda: _groups(self._bus).update({last.key: position}))


class _Rewriting(ModelReader):
    """Reads checkpoints with something of them replaced."""

    change: Callable[[bytes | None, dict[str, Any]], None]

    async def fetch(self, *, max_records: int = 1000, timeout: float = 1.0) -> list[Message]:
        found = await super().fetch(max_records=max_records, timeout=timeout)
        return [self._changed(message) for message in found]

    def _changed(self, message: Message) -> Message:
        if message.value is None or not (message.key or b"").startswith(CHECKPOINT):
            return message
        body = msgspec.json.decode(message.value)
        self.change(message.key, body)
        return structs.replace(message, value=msgspec.json.encode(body))


class _RewritingBus(ModelBus):
    async def open_reader(
        self, topic: str, partition: int, *, start: int | None, committed: bool, lenient: bool = False
    ) -> Reader:
        reader = await super().open_reader(topic, partition, start=start, committed=committed, lenient=lenient)
        assert isinstance(reader, ModelReader)
        rewriting = _Rewriting(self, reader._log, reader.position, committed=committed)
        rewriting.change = self.change
        return rewriting

    def change(self, key: bytes | None, body: dict[str, Any]) -> None:
        """Replace something in a checkpoint."""
        raise NotImplementedError


class _GroupBus(_RewritingBus):
    writer = _GroupWriter

    def change(self, key: bytes | None, body: dict[str, Any]) -> None:
        body["input"]["to"] = _groups(self).get(key, body["input"]["to"])


class _Tokenless(_RewritingBus):
    def change(self, key: bytes | None, body: dict[str, Any]) -> None:
        body["token"] = 0


class _Level(_RewritingBus):
    def change(self, key: bytes | None, body: dict[str, Any]) -> None:
        body["input"].pop("ahead", None)


class _Uncommitted(ModelBus):
    async def open_reader(
        self, topic: str, partition: int, *, start: int | None, committed: bool, lenient: bool = False
    ) -> Reader:
        return await super().open_reader(topic, partition, start=start, committed=False)

    async def stable_end(self, topic: str, partition: int, *, taking: str | None = None) -> int:
        del taking
        return (await self.offsets(topic, partition))[1]


class _Hasty(ModelBus):
    async def stable_end(self, topic: str, partition: int, *, taking: str | None = None) -> int:
        del taking
        log = self.log(topic, partition)
        _, end = await self._ask("ListOffsets", lambda: self._broker.offset(log, committed=True))
        found: int = end
        return found


class _Nameless(ModelBus):
    """Tells topics apart by their names alone."""

    topics: tuple[str, ...] = ()

    async def topic(self, name: str) -> TopicInfo:
        found = await super().topic(name)
        return found._replace(id="the same") if name.endswith(self.topics) else found

    async def has_committed(self, identity: str) -> bool:
        return "allocations" not in self.topics and await super().has_committed(identity)


class _AnyLedger(_Nameless):
    topics = ("allocations",)


class _AnyInput(_Nameless):
    topics = ("registrations",)


BUGS: tuple[Bug, ...] = (
    Bug(
        name="position-from-the-group",
        what="the input goes on at the consumer group's offset, which is committed after the records",
        within=40,
        bus=_GroupBus,
    ),
    Bug(
        name="token-restarted",
        what="fencing tokens begin anew after a restart",
        within=40,
        bus=_Tokenless,
    ),
    Bug(
        name="uncommitted-ledger",
        what="the ledger is restored with what no transaction has committed",
        within=40,
        bus=_Uncommitted,
    ),
    Bug(
        name="restore-to-the-stable-offset",
        what="the ledger is read up to the last stable offset, which another writer's open transaction holds back",
        within=250,
        bus=_Hasty,
    ),
    Bug(
        name="ahead-forgotten",
        what="after a restore, what was decided before its turn is decided again",
        within=100,
        bus=_Level,
    ),
    Bug(
        name="any-ledger",
        what="a ledger that was deleted and made anew is taken for the one of before",
        within=100,
        bus=_AnyLedger,
        patches=lambda: patch.object(remaking, "SHARE", 1.0),
    ),
    Bug(
        name="any-input",
        what="registrations that were made anew are read on from where the others ended",
        within=100,
        bus=_AnyInput,
        patches=lambda: patch.object(remaking, "SHARE", 1.0),
    ),
)
