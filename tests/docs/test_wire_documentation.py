"""What proto/README.md says for clients in any language, tried."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from aiokafka.partitioner import murmur2 as another_murmur2
from msgspec import structs

from outfitter_proto import schema
from outfitter_proto.bus import Entry, TopicSpec, connect
from outfitter_proto.partitioning import murmur2, partition_of
from outfitter_proto.records import Deregister, Heartbeat, Owner, Register
from support.documents import ROOT, blocks
from support.kafka.broker import KafkaBroker

PAGE = ROOT / "proto" / "README.md"
TEXT = PAGE.read_text()
VECTORS = re.findall(r"^\| `([^`]+)` \| (\d+) \| (\d+) \|$", TEXT, re.MULTILINE)


def test_the_test_vectors_are_right() -> None:
    assert len(VECTORS) >= 5
    assert {len(host) % 4 for host, _, _ in VECTORS} == {0, 1, 2, 3}  # every kind of remainder
    for host, hashed, partition in VECTORS:
        assert murmur2(host.encode()) == int(hashed)
        assert another_murmur2(host.encode()) & 0xFFFFFFFF == int(hashed)
        assert partition_of(host, 12) == int(partition)
    assert any(int(hashed) >= 2**31 for _, hashed, _ in VECTORS)  # toPositive matters
    assert any(int(hashed) < 2**31 for _, hashed, _ in VECTORS)


def test_the_definitions_to_validate_against_are_there() -> None:
    named = re.findall(r"`(?:#/\$defs/)?(Register|Heartbeat|Deregister|Allocation)`", TEXT)
    assert {*named} == {"Register", "Heartbeat", "Deregister", "Allocation"}
    assert {*named} <= schema.json_schema()["$defs"].keys()


def test_the_page_names_each_field_that_workers_write() -> None:
    written = {field.encode_name for kind in (Register, Heartbeat, Deregister, Owner) for field in structs.fields(kind)}
    assert {name for name in written if not re.search(rf'[`"]{name}[`".]', TEXT)} == set()


@pytest.mark.kafka
async def test_the_reader_with_faststream_reads_records_and_passes_over_tombstones(kafka_broker: KafkaBroker) -> None:
    topic = f"{kafka_broker.new_cluster()}.allocations"
    (snippet,) = [block.text for block in blocks(PAGE) if "from faststream" in block.text]
    for written, here in {
        "127.0.0.1:9092": kafka_broker.bootstrap,
        "outfitter.allocations": topic,
        "record = json.loads(message.body)": "json.loads(seen(message.body))",
    }.items():
        assert written in snippet
        snippet = snippet.replace(written, here)
    seen: list[bytes | None] = []
    over = anyio.Event()

    def see(body: bytes | None) -> bytes | None:  # before it is decoded: FastStream logs an error, and goes on
        seen.append(body)
        if body == last:
            over.set()
        return body

    first, last = b'{"type":"allocation"}', b'{"type":"allocation","last":true}'
    async with connect(kafka_broker.url) as bus:
        await bus.create_topics([TopicSpec(topic, 1, {"cleanup.policy": "compact"})])
        for value in (first, None, last):
            await bus.publish(topic, 0, Entry(b"h/w/1", value))
    names: dict[str, Any] = {"seen": see}
    code = compile(snippet, str(PAGE), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    run: Callable[[], Any] = eval(code, names)  # noqa: S307 - our own documentation
    try:
        await run  # type: ignore[misc]
        with anyio.fail_after(60):
            await over.wait()
    finally:
        await names["broker"].stop()
    assert seen == [first, last]
