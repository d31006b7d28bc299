"""What a worker without an answer is told about managers."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from outfitter.session.manager_lookup import ManagerLookup
from outfitter_proto import codec, keys
from outfitter_proto.bus import Entry, TopicSpec, connect
from outfitter_proto.records import Checkpoint, InputPosition


@pytest.mark.parametrize(("scope", "start"), [("host", "--host h9"), ("cluster", "--scope cluster")])
async def test_the_advice_is_to_start_a_manager_of_the_scope_of_the_topics(url: str, scope: str, start: str) -> None:
    writer = keys.partition_writer(0) if scope == "cluster" else keys.host_writer("h9")
    checkpoint = Checkpoint(
        writer=writer, commit=1, instance="i", cluster="c", scope=scope, at=datetime.now(UTC), token=0,
        input=InputPosition(topic_id="t", partition=0, from_=0, to=0),
    )  # fmt: skip
    async with connect(url) as bus:
        await bus.create_topics([TopicSpec("c.allocations", 1, {})])
        entry = Entry(keys.checkpoint_key(writer).encode(), codec.encode(checkpoint))
        await bus.publish("c.allocations", 0, entry)
        lookup = ManagerLookup(bus, "c", "h9")
        await lookup.run(1)
        assert f"start one with `outfitter serve {start}`" in str(lookup.error())


async def test_a_worker_that_could_not_read_the_ledger_is_not_told_that_there_is_no_manager(url: str) -> None:
    async with connect(url) as bus:  # it has no such topic
        lookup = ManagerLookup(bus, "c", "h9")
        await lookup.run(1)
        said = str(lookup.error())
    assert "the ledger could not be read, so it is not known whether there is one" in said
    assert "(not all partitions were read)" in said
