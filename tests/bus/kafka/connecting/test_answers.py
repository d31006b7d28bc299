"""What a broker may answer: a scripted one says odd things, and nothing worse than BusUnavailableError comes of it."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from aiokafka.protocol.admin import DescribeConfigsResponse_v2
from aiokafka.protocol.fetch import FetchResponse_v11
from aiokafka.protocol.offset import OffsetResponse_v3
from aiokafka.protocol.produce import ProduceResponse_v7

from outfitter_proto.bus import BusUnavailableError, Entry, Reader, connect, patience
from outfitter_proto.bus.kafka.connecting import cluster, connection
from outfitter_proto.bus.kafka.connecting.protocol import MetadataResponse

PRODUCE, FETCH, OFFSETS, METADATA, VERSIONS, DESCRIBE = 0, 1, 2, 3, 18, 32
SPOKEN = {PRODUCE: 7, FETCH: 11, OFFSETS: 3, METADATA: 10, VERSIONS: 2, DESCRIBE: 2}
GOOD_FETCH = FetchResponse_v11(0, 0, 0, [("t", [(0, 0, 0, 0, 0, [], -1, b"")])])
THROTTLED_MS = 400

Script = Callable[[], Any]


def metadata(port: int, **changed: Any) -> MetadataResponse:
    partition = (0, 0, 1, 0, [1], [1], [], {})
    fields = {
        "throttle_time_ms": 0, "brokers": [(1, "127.0.0.1", port, None, {})], "cluster_id": "c", "controller_id": 1,
        "topics": [(0, "t", bytes(16), False, [partition], 0, {})], "cluster_authorized_operations": 0, "tags": {},
    } | changed  # fmt: skip
    return MetadataResponse(*fields.values())


class ScriptedBroker:
    """A broker with topic `t`. `script` has the next answers to a kind of request: an answer, or bytes as they are.

    `times`: when each request of a kind arrived.
    """

    def __init__(self) -> None:
        self.port = 0
        self.script: dict[int, list[Any]] = {}
        self.times: dict[int, list[float]] = {}
        self._writers: set[asyncio.StreamWriter] = set()

    def hang_up(self) -> None:
        for writer in self._writers:
            writer.close()

    def _usual(self, key: int) -> Any:
        if key == VERSIONS:
            return struct.pack(">hi", 0, len(SPOKEN)) + b"".join(
                struct.pack(">hhh", key, version, version) for key, version in SPOKEN.items()
            ) + bytes(4)  # fmt: skip
        return {
            METADATA: lambda: metadata(self.port),
            FETCH: lambda: GOOD_FETCH,
            OFFSETS: lambda: OffsetResponse_v3(0, [("t", [(0, 0, -1, 7)])]),
            PRODUCE: lambda: ProduceResponse_v7([("t", [(0, 0, 5, -1, 0)])], 0),
            DESCRIBE: lambda: DescribeConfigsResponse_v2(0, [(0, None, 2, "t", [])]),
        }[key]()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                (size,) = struct.unpack(">i", await reader.readexactly(4))
                request = await reader.readexactly(size)
                key, version, number = struct.unpack_from(">hhi", request)
                assert key != METADATA or version == SPOKEN[METADATA]
                self.times.setdefault(key, []).append(asyncio.get_running_loop().time())
                asks_for_nothing = key == METADATA and request[-4:] != b"\x00\x00\x00\x00" and b"\x02t" not in request
                script = [] if asks_for_nothing else self.script.get(key, [])
                answer = script.pop(0) if script else self._usual(key)
                if asks_for_nothing or (key == METADATA and b"\x02t" not in request):
                    answer = metadata(self.port, topics=[])
                body = answer if isinstance(answer, bytes) else answer.encode()
                head = struct.pack(">i", number) + (b"\x00" if key == METADATA else b"")
                writer.write(struct.pack(">i", len(head + body)) + head + body)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


@asynccontextmanager
async def scripted() -> AsyncIterator[ScriptedBroker]:
    broker = ScriptedBroker()
    server = await asyncio.start_server(broker.serve, "127.0.0.1", 0)
    broker.port = server.sockets[0].getsockname()[1]
    try:
        yield broker
    finally:
        server.close()


@asynccontextmanager
async def reading(broker: ScriptedBroker) -> AsyncIterator[Reader]:
    bus = connect(f"kafka://127.0.0.1:{broker.port}")
    async with bus, await bus.open_reader("t", 0, start=0, committed=True) as reader:
        yield reader


def row(*row: Any) -> list[Any]:
    return [("t", [row])]


GOOD_ROW = (0, 0, 0, 0, 0, [], -1, b"")
ODD_FETCHES = {
    "nothing": FetchResponse_v11(0, 0, 0, []),
    "an error for the whole": FetchResponse_v11(0, 6, 0, []),
    "another topic": FetchResponse_v11(0, 0, 0, [("u", [GOOD_ROW])]),
    "one topic more": FetchResponse_v11(0, 0, 0, [("t", [GOOD_ROW]), ("u", [GOOD_ROW])]),
    "no partition": FetchResponse_v11(0, 0, 0, [("t", [])]),
    "another partition": FetchResponse_v11(0, 0, 0, row(1, *GOOD_ROW[1:])),
    "the partition twice": FetchResponse_v11(0, 0, 0, [("t", [GOOD_ROW, GOOD_ROW])]),
    "the topic twice": FetchResponse_v11(0, 0, 0, [("t", [GOOD_ROW]), ("t", [GOOD_ROW])]),
    "an empty topic first": FetchResponse_v11(0, 0, 0, [("u", []), ("t", [])]),
    "no list": FetchResponse_v11(0, 0, 0, None),
    "no list of partitions": FetchResponse_v11(0, 0, 0, [("t", None)]),
    "no bytes": b"",
    "cut off": GOOD_FETCH.encode()[:-9],
    "no text": b"\xff" * 40,
}
ODD_METADATA = {
    "no topic": {"topics": []},
    "another topic": {"topics": [(0, "u", bytes(16), False, [], 0, {})]},
    "no brokers' list": {"brokers": None},
    "no address": {"brokers": [(1, "", -1, None, {})]},
    "one number twice": {"brokers": [(1, "127.0.0.1", 1, None, {}), (1, "127.0.0.1", 2, None, {})]},
    "no replicas": {"topics": [(0, "t", bytes(16), False, [(0, 0, 1, 0, None, [1], [], {})], 0, {})]},
}


@pytest.mark.parametrize("odd", ODD_FETCHES.values(), ids=ODD_FETCHES)
async def test_an_odd_answer_to_a_fetch_is_none_and_the_reader_asks_again(odd: Any) -> None:
    async with scripted() as broker, reading(broker) as reader:
        broker.script[FETCH] = [odd, odd]
        with anyio.fail_after(60):
            while len(broker.times.get(FETCH, ())) < 4:
                assert await reader.fetch(timeout=0.05) == []


@pytest.mark.parametrize("odd", ODD_FETCHES.values(), ids=ODD_FETCHES)
async def test_a_broker_that_only_says_odd_things_is_said_to_be_unusable(
    odd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "ANSWER_WITHIN", 0.1)
    async with scripted() as broker, connect(f"kafka://127.0.0.1:{broker.port}") as bus:
        broker.script[FETCH] = [odd] * 1000
        async with await bus.open_reader("t", 0, start=0, committed=True) as reader:
            with pytest.raises(BusUnavailableError, match="its answer to Fetch"):
                await reader.fetch(timeout=60)


@pytest.mark.parametrize("changed", ODD_METADATA.values(), ids=ODD_METADATA)
async def test_odd_metadata_are_no_reason_to_believe_that_a_topic_is_gone(changed: dict[str, Any]) -> None:
    async with scripted() as broker, connect(f"kafka://127.0.0.1:{broker.port}") as bus:
        broker.script[METADATA] = [metadata(broker.port, **changed)]
        with pytest.raises(BusUnavailableError, match="its answer to Metadata"):
            await bus.topic("t")
        assert (await bus.topic("t")).partitions == 1


@pytest.mark.parametrize(
    ("key", "odd"),
    [
        (OFFSETS, OffsetResponse_v3(0, [])),
        (OFFSETS, OffsetResponse_v3(0, row(1, 0, -1, 7))),
        (PRODUCE, ProduceResponse_v7([], 0)),
        (PRODUCE, ProduceResponse_v7([("t", [(0, 0, 5, -1, 0)] * 2)], 0)),
        (DESCRIBE, DescribeConfigsResponse_v2(0, [])),
        (DESCRIBE, DescribeConfigsResponse_v2(0, [(0, None, 2, "u", [])])),
    ],
)
async def test_every_request_has_its_answer_checked(key: int, odd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "ANSWER_WITHIN", 0.1)
    async with scripted() as broker, connect(f"kafka://127.0.0.1:{broker.port}") as bus:
        broker.script[key] = [odd] * 1000
        ask = {
            OFFSETS: lambda: bus.offsets("t", 0),
            PRODUCE: lambda: bus.publish("t", 0, Entry(b"k", b"v")),
            DESCRIBE: lambda: bus.topic("t"),
        }[key]
        with pytest.raises(BusUnavailableError, match="its answer to"):
            await ask()


async def test_a_throttled_fetch_is_asked_again_once_the_broker_reads_again() -> None:
    async with scripted() as broker, reading(broker) as reader:
        broker.script[FETCH] = [FetchResponse_v11(THROTTLED_MS, 0, 0, [])] * 2
        with anyio.fail_after(60):
            while len(broker.times.get(FETCH, ())) < 3:
                assert await reader.fetch(timeout=0.05) == []
        first, second, third = broker.times[FETCH][:3]
        assert min(second - first, third - second) >= THROTTLED_MS / 1000 * 0.99


async def test_throttled_time_counts_in_no_time_limit_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of a request is much shorter than the time for which the broker holds the connection back."""
    monkeypatch.setattr(cluster, "REQUEST_TIMEOUT", 0.2)
    async with scripted() as broker, connect(f"kafka://127.0.0.1:{broker.port}") as bus:
        broker.script[OFFSETS] = [OffsetResponse_v3(THROTTLED_MS * 3, row(0, 0, -1, 7))] * 2
        await bus.topic("t")
        assert await bus._cluster.offset("t", 0, cluster.LATEST) == 7  # type: ignore[attr-defined]
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(bus._cluster.offset, "t", 0, cluster.LATEST)  # type: ignore[attr-defined]
        assert len(broker.times[OFFSETS]) == 4
        assert not bus._connector.directory.doubtful(connection.Node("127.0.0.1", broker.port))  # type: ignore[attr-defined]


async def test_throttled_time_counts_not_among_the_time_for_which_a_request_is_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster, "ANSWER_WITHIN", 0.5)
    moved = 6
    async with scripted() as broker, connect(f"kafka://127.0.0.1:{broker.port}") as bus:
        broker.script[OFFSETS] = [OffsetResponse_v3(THROTTLED_MS * 3, row(0, moved, -1, 7))] * 2
        assert await bus._cluster.offset("t", 0, cluster.LATEST) == 7  # type: ignore[attr-defined]
        assert len(broker.times[OFFSETS]) == 3


async def test_a_throttled_connection_that_ends_is_replaced_at_once() -> None:
    """A broker that was restarted has forgotten how much it had sent."""
    async with scripted() as broker, reading(broker) as reader:
        broker.script[FETCH] = [FetchResponse_v11(2**31 - 1, 0, 0, []), FetchResponse_v11(-5, 0, 0, [])]
        with anyio.fail_after(60):
            while len(broker.times.get(FETCH, ())) < 1 or not reader._cluster.patience.is_held_back:  # type: ignore[attr-defined]
                assert await reader.fetch(timeout=0.05) == []
            broker.hang_up()
            while len(broker.times.get(FETCH, ())) < 3:
                assert await reader.fetch(timeout=0.05) == []


async def test_whoever_is_held_back_does_not_say_that_nothing_has_come() -> None:
    async with scripted() as broker, reading(broker) as reader:
        with anyio.fail_after(60):
            while not reader.has_answered:
                await reader.fetch(timeout=0.05)
            broker.script[FETCH] = [FetchResponse_v11(2**31 - 1, 0, 0, [])]
            while reader.has_answered:
                await reader.fetch(timeout=0.05)


async def test_a_long_throttling_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async with scripted() as broker, connect(f"kafka://127.0.0.1:{broker.port}") as bus:
        offset = OffsetResponse_v3(int(patience.SAID_AFTER_S * 2000), row(0, 0, -1, 7))
        broker.script[OFFSETS] = [offset]
        await bus.topic("t")
        assert (caplog.messages, bus.patience.sentence) == ([], None)
        await bus._cluster.offset("t", 0, cluster.LATEST)  # type: ignore[attr-defined]
        [line] = caplog.messages
        assert "the broker holds this client back" in line
        assert "the broker holds this client back" in str(bus.patience.sentence)
        bus.patience.throttle(patience.SAID_AFTER_S)
        assert len(caplog.messages) == 1
