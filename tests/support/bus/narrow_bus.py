"""A bus whose topics take less than it promises, as after an administrator has lowered a limit."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from outfitter_proto.bus import Entry, TooLargeError, Writer
from support.bus.faulty_bus import FaultyBus, WrappedWriter


class NarrowBus(FaultyBus):
    """An embedded bus whose ledger parts hold at most `most` bytes, and no record with `refused` in it. `sizes` are
    the bytes of each batch's records, by topic."""

    most = 10_000
    refused: bytes | None = None
    refusals = 0
    uses_up = False

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.sizes: dict[str, list[list[int]]] = {}

    async def open_writer(self, identity: str, partition: int, *, topics: Collection[str] = ()) -> Writer:
        return _NarrowWriter(self, await super().open_writer(identity, partition, topics=topics))


class _NarrowWriter(WrappedWriter):
    def __init__(self, bus: NarrowBus, inner: Writer) -> None:
        super().__init__(inner)
        self._bus = bus
        self._unusable = False

    async def commit(self, parts: Sequence[tuple[str, Sequence[Entry]]]) -> None:
        assert not self._unusable
        ledger = parts[-1][1]
        for topic, entries in parts:
            self._bus.sizes.setdefault(topic, []).append([_bytes(entry) for entry in entries])
        size = sum(map(_bytes, ledger))
        refused = self._bus.refused
        if size > self._bus.most or (refused and any(refused in (entry.value or b"") for entry in ledger)):
            self._bus.refusals += 1
            self._unusable = self._bus.uses_up
            raise TooLargeError(f"{size} bytes, at most {self._bus.most}", topic=parts[-1][0], size=size)
        await super().commit(parts)

    @property
    def must_reopen(self) -> bool:
        return self._unusable


def _bytes(entry: Entry) -> int:
    return len(entry.key or b"") + len(entry.value or b"")
