"""The embedded bus's cursor over one partition. If there is nothing to read, it waits for a wake-up and reads again."""

from __future__ import annotations

from functools import partial

import anyio

from outfitter_proto.bus.embedded import log
from outfitter_proto.bus.embedded.connecting.database import Database
from outfitter_proto.bus.embedded.connecting.notify import POLL_INTERVAL_S, Listener
from outfitter_proto.bus.port import BusUnavailableError, Message, Reader


class EmbeddedReader(Reader):
    """Reads slices of records. All records in the file are committed, so both isolation levels are equal."""

    def __init__(
        self, database: Database, topic: log.StoredTopic, partition: int, position: int, listener: Listener
    ) -> None:
        self.position = position
        self._database = database
        self._topic = topic
        self._partition = partition
        self._listener: Listener | None = listener

    async def fetch(self, *, max_records: int = 1000, timeout: float = 1.0) -> list[Message]:
        deadline = anyio.current_time() + timeout
        while True:
            if self._listener is None:
                raise BusUnavailableError(f"this reader of {self._topic.name!r} is closed: open another")
            self._listener.drain()
            fetch = partial(
                log.fetch, topic=self._topic, partition=self._partition, position=self.position, max_records=max_records
            )
            messages, position = await self._database.read(fetch)
            self.position = position  # last: a cancelled call must read nothing
            left = deadline - anyio.current_time()
            if messages or left <= 0:
                return messages
            with anyio.move_on_after(min(left, POLL_INTERVAL_S)):
                await self._listener.wait()

    async def seek(self, offset: int) -> None:
        self.position = offset

    async def aclose(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
