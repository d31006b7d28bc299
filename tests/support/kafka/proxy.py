"""TCP proxies in front of brokers that understand Kafka's framing, so that chosen requests and answers come to harm.

    with KafkaProxy() as proxy:
        cluster = KafkaCluster(folder, proxy=proxy.listen)
        fault = proxy.harm(END_TXN, Harm.LATE_REQUEST, client="outfitter-host-gpu-3")
        fault.struck.wait(10)

A request is a length, an API key, a version, a correlation id and the client's id; an answer is a length and a
correlation id, and comes in the order of the requests (Kafka's protocol guide). What a network does to one frame of a
TCP connection it does to all that follow: after a lost answer nothing more comes on that connection. It runs in a
thread with an event loop of its own, so tests of any kind may use it.
"""

from __future__ import annotations

import asyncio
import enum
import struct
import threading
from collections import deque
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from io import BytesIO
from typing import Any, Self

from aiokafka.protocol import coordination, produce, transaction
from aiokafka.protocol.api import RequestStruct
from aiokafka.protocol.types import Array, Schema, TaggedFields

from outfitter_proto.bus.kafka.connecting import protocol
from support.kafka.broker import free_port

PRODUCE, FETCH, METADATA, FIND_COORDINATOR = 0, 1, 3, 10
INIT_PRODUCER_ID, ADD_PARTITIONS_TO_TXN, END_TXN, DESCRIBE_TRANSACTIONS = 22, 24, 26, 65
NAMES = {
    PRODUCE: "Produce", FETCH: "Fetch", METADATA: "Metadata", FIND_COORDINATOR: "FindCoordinator",
    INIT_PRODUCER_ID: "InitProducerId", ADD_PARTITIONS_TO_TXN: "AddPartitionsToTxn", END_TXN: "EndTxn",
}  # fmt: skip

_LENGTH = struct.Struct(">i")
_REQUEST = struct.Struct(">hhih")  # API key, version, correlation id, length of the client's id
LATE_ANSWER_S = 3.0
LATE_REQUEST_S = 1.5


class Harm(enum.Enum):
    """What may be done to a request."""

    LOST_ANSWER = "lost answer"
    """It is done, and the client never hears of it: the connection stays, in silence."""
    CONNECTION_LOST = "connection lost"
    """It is done; instead of the answer comes the connection's end."""
    NEVER_SENT = "never sent"
    """It never arrives: the connection stays, in silence."""
    LATE_ANSWER = "answer late"
    """The answer takes `LATE_ANSWER_S` longer, and so does what follows on the connection."""
    ERROR = "answered with an error"
    """It is done, and the answer bears an error code all the same."""
    LATE_REQUEST = "delivered late"
    """The connection ends, and the request arrives all the same: after `LATE_REQUEST_S`, or when it is released."""


class Fault:
    """One thing that shall happen `times` times. `struck` is set when it first did; `delivered` when a late request
    has arrived and was answered, with the answer's bytes in `answers`."""

    def __init__(self, key: int, harm: Harm, client: str | None, times: int, *, hold: bool, code: int) -> None:
        self.key = key
        self.harm = harm
        self.client = client
        self.left = times
        self.hold = hold
        self.struck = threading.Event()
        self.delivered = threading.Event()
        self.answers: list[bytes] = []
        self.code = code
        self.version = 0
        self.release: asyncio.Event | None = None


class KafkaProxy:
    """Any number of listening ports, each in front of one port of a broker on this machine."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kafka-proxy", daemon=True)
        self._thread.start()
        self._servers: list[asyncio.Server] = []
        self._faults: list[Fault] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._cut = False
        self.requests: dict[int, int] = {}
        """How many requests of each API key came by."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._do(self._close()).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def listen(self, node: int, port: int) -> int:
        """Offer a broker's `port` under another one, which is returned."""
        offered = free_port()
        self._do(self._listen(offered, port)).result(10)
        return offered

    def harm(
        self, key: int, harm: Harm, *, client: str | None = None, times: int = 1, hold: bool = False, code: int = -1
    ) -> Fault:
        """Do `harm` to the next `times` requests of this API key (of `client`, by its id). `hold`: a late request
        waits for `release` instead of `LATE_REQUEST_S`. `code`: the error's, -1 is Kafka's "unknown"."""
        fault = Fault(key, harm, client, times, hold=hold, code=code)
        self._do(self._add(fault)).result(10)  # the next request may come at once
        return fault

    def release(self, fault: Fault) -> None:
        """Deliver what `fault` holds back now."""
        assert fault.release is not None, "it has not struck yet"
        self._loop.call_soon_threadsafe(fault.release.set)

    def heal(self) -> None:
        """No harm any more, beyond what has begun."""
        self._do(self._heal()).result(10)

    def cut(self) -> None:
        """End all connections and accept none: the network is gone."""
        self._cut = True
        self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in self._tasks])

    def mend(self) -> None:
        self._cut = False

    # --- in the thread -----------------------------------------------------------------------------------------

    def _do(self, work: Coroutine[Any, Any, None]) -> Future[None]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _heal(self) -> None:
        self._faults.clear()

    async def _add(self, fault: Fault) -> None:
        self._faults.append(fault)

    async def _listen(self, offered: int, port: int) -> None:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            with suppress(asyncio.CancelledError):
                await self._serve(reader, writer, port)

        self._servers.append(await asyncio.start_server(accept, "127.0.0.1", offered))

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.sleep(0)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
        try:
            if self._cut:
                return
            from_broker, to_broker = await asyncio.open_connection("127.0.0.1", port)
            try:
                under_way: deque[Fault | None] = deque()
                pumps = {
                    asyncio.ensure_future(self._ask(reader, to_broker, under_way, port)),
                    asyncio.ensure_future(self._answer(from_broker, writer, under_way)),
                }
                try:
                    await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for pump in pumps:
                        pump.cancel()
                    await asyncio.gather(*pumps, return_exceptions=True)
            finally:
                to_broker.close()
        except OSError:
            pass  # the broker is away: so is this connection
        finally:
            writer.close()

    async def _ask(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, under_way: deque[Fault | None], port: int
    ) -> None:
        while (data := await _frame(reader)) is not None:
            key, version, _, length = _REQUEST.unpack_from(data, _LENGTH.size)
            begin = _LENGTH.size + _REQUEST.size
            client = data[begin : begin + max(length, 0)].decode()
            self.requests[key] = self.requests.get(key, 0) + 1
            fault = self._strike(key, client)
            harm = fault.harm if fault else None
            if fault is not None:
                fault.version = version
            if fault is not None and harm is Harm.LATE_REQUEST:
                fault.release = asyncio.Event()
                late = asyncio.ensure_future(self._deliver_late(fault, data, port))
                self._tasks.add(late)
                late.add_done_callback(self._tasks.discard)
                fault.struck.set()
                return
            if fault is not None and harm is Harm.NEVER_SENT:
                fault.struck.set()
                while await _frame(reader) is not None:
                    pass
                return
            under_way.append(fault)
            writer.write(data)
            await writer.drain()

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, under_way: deque[Fault | None]
    ) -> None:
        while (data := await _frame(reader)) is not None:
            fault = under_way.popleft()
            if fault is not None:
                fault.struck.set()
                match fault.harm:
                    case Harm.CONNECTION_LOST:
                        return
                    case Harm.LOST_ANSWER:
                        while await _frame(reader) is not None:
                            pass
                        return
                    case Harm.ERROR:
                        data = _spoiled(data, fault)
                    case _:
                        await asyncio.sleep(LATE_ANSWER_S)
            writer.write(data)
            await writer.drain()

    def _strike(self, key: int, client: str) -> Fault | None:
        for fault in self._faults:
            if fault.key == key and fault.client in (None, client):
                fault.left -= 1
                if fault.left <= 0:
                    self._faults.remove(fault)
                return fault
        return None

    async def _deliver_late(self, fault: Fault, data: bytes, port: int) -> None:
        assert fault.release is not None
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(fault.release.wait(), None if fault.hold else LATE_REQUEST_S)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(data)
            answer = await _frame(reader)
            if answer is not None:
                fault.answers.append(answer)
                fault.delivered.set()
        finally:
            writer.close()


def _spoiled(data: bytes, fault: Fault) -> bytes:
    """An answer with every error code in it replaced."""
    [(schema, is_flexible)] = {
        (asked.RESPONSE_TYPE.SCHEMA, asked.FLEXIBLE_VERSION)
        for module in (coordination, produce, transaction, protocol)
        for asked in vars(module).values()
        if isinstance(asked, type) and issubclass(asked, RequestStruct) and asked is not RequestStruct
        if (fault.key, fault.version) == (asked.API_KEY, asked.API_VERSION)
    }
    begin = _LENGTH.size + (5 if is_flexible else 4)  # after the correlation id, and no tags
    head = data[_LENGTH.size : begin]
    body = schema.encode(_with_error(schema, schema.decode(BytesIO(data[begin:])), fault.code))
    return _LENGTH.pack(len(head + body)) + head + body


def _with_error(schema: Any, value: Any, code: int) -> Any:
    if isinstance(schema, Schema):
        fields = zip(schema.names, schema.fields, value, strict=True)
        return tuple(code if name == "error_code" else _with_error(kind, part, code) for name, kind, part in fields)
    if isinstance(schema, Array):
        return [_with_error(schema.array_of, part, code) for part in value or ()]
    return {} if schema is TaggedFields else value  # aiokafka encodes none


async def _frame(reader: asyncio.StreamReader) -> bytes | None:
    """The next frame with its length, None at the connection's end."""
    try:
        head = await reader.readexactly(_LENGTH.size)
        return head + await reader.readexactly(_LENGTH.unpack(head)[0])
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
