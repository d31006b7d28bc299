"""What commands that look on say of what operators have taken out: cordoned.txt, from records alone."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest
from msgspec import structs

from outfitter_proto import topics
from outfitter_proto.bus import Entry, connect
from outfitter_proto.codec import encode
from outfitter_proto.names import topics as names_of
from outfitter_proto.records import InventoryDevice, Note
from support.api import allocation, checkpoint, cordon, host_record, resource_of
from support.managers.process import environment
from support.transcripts import Scene, scenes

NOW = datetime.now(UTC).replace(microsecond=0)
UNREAD = "topic 'outfitter.control' is not on the bus"


def records() -> list[Any]:
    """The ledger of the two hosts."""
    gpus = [
        InventoryDevice(id="GPU-0", properties={"index": "0"}, cordon="a1b2-02"),
        InventoryDevice(id="GPU-1", properties={"index": "1"}, health="unhealthy", reason="XID 79", cordon="c3d4-03"),
        InventoryDevice(id="GPU-2", properties={"index": "2"}),
    ]
    of_a = structs.replace(resource_of(gpus), cordoned=2)
    of_b = structs.replace(resource_of([InventoryDevice(id="GPU-9", cordon="k3v9-01")]), cordoned=1)
    b = host_record("b", stopped=True, resources={"gpu": of_b})
    waiting = "waits for 2 gpu: 1 of 3 free, 2 cordoned: XID 79 (ada@ops-1, order c3d4-03)"
    waiter = allocation("a", "waiter", "pending", queue_position=1, reason=waiting, reason_code="cordoned", offset=2)
    return [
        host_record("a", resources={"gpu": of_a}),
        cordon("a", "a1b2-02", author="bob@ops-2", reason="fan is loud", device="GPU-0", since=NOW),
        cordon("a", "c3d4-03", reason="XID 79", device="GPU-1", since=NOW - timedelta(hours=2.5)),
        cordon("a", "e5f6-04", reason="firmware", device="GPU-1", until=NOW + timedelta(days=9), since=NOW),
        allocation("a", "holder", devices=["GPU-0"], token=1),
        structs.replace(waiter, request=structs.replace(waiter.request, amounts={"gpu": 2})),
        structs.replace(b, manager=structs.replace(b.manager, stopped_at=NOW - timedelta(hours=5.5))),
        cordon("b", since=NOW - timedelta(hours=9.5)),
        allocation("b", "late", "pending", queue_position=1, reason="waits for 1 gpu", reason_code="cordoned"),
        host_record("c"),
        *(structs.replace(checkpoint(f"host/{host}"), orders_unread=UNREAD) for host in "abc"),
    ]


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    """The environment of commands that look at a bus with these records."""
    url = f"sqlite://{tmp_path}/bus.db?synchronous=NORMAL"
    of = names_of("outfitter")
    note = Note(
        at=NOW, writer="host/b", event="cordoned",
        explanation="order k3v9-01 by ada@ops-1 takes host b out: rebooted tonight",
    )  # fmt: skip
    of_a = Note(
        at=NOW, writer="partition/0", event="cordoned", host="a", device="GPU-1",
        explanation="order c3d4-03 by ada@ops-1 takes device GPU-1 of host a out: XID 79",
    )  # fmt: skip

    async def write() -> None:
        async with connect(url) as bus:
            await topics.create(bus, "outfitter", partitions=1)
            for record in records():
                await bus.publish(of.allocations, 0, Entry(record.key.encode(), encode(record)))
            await bus.publish(of.history, 0, Entry(b"host/b", encode(note)))
            await bus.publish(of.history, 0, Entry(b"partition/0", encode(of_a)))

    anyio.run(write)
    return environment(OUTFITTER_BUS=url, COLUMNS="160")


@pytest.mark.parametrize("scene", scenes(Path(__file__).with_name("cordoned.txt")), ids=str)
def test_what_operators_have_taken_out_is_said_with_author_and_reason(
    variables: dict[str, str], scene: Scene, tmp_path: Path
) -> None:
    scene.play(tmp_path, variables)
