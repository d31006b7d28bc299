"""What only Kafka shows of the operators' side."""

from __future__ import annotations

from datetime import UTC, datetime

import anyio
import pytest

from bus.kafka.reading.test_compaction import AGED_WITHIN, QUICK_CLEANING, leave_a_transaction_open, plain_consumer_dies
from operators.conftest import HOST
from outfitter import RuntimeContext
from outfitter_proto import codec, keys, names, topics
from outfitter_proto.bus import Entry, TopicSpec, Writer, connect
from outfitter_proto.records import Allocation, ResolvedRequest, Source
from support.kafka.broker import KafkaBroker

pytestmark = pytest.mark.kafka


def record(commit: int, index: str) -> Allocation:
    return Allocation(
        host=HOST,
        worker="w",
        incarnation="i",
        state="allocated",
        request=ResolvedRequest(amounts={"gpu": 1}),
        since=datetime.now(UTC),
        writer=keys.host_writer(HOST),
        commit=commit,
        source=Source(partition=0, offset=0),
        resources={"gpu": [{"id": f"gpu:{index}", "index": index, "local_index": "0"}]},
    )


async def test_an_operator_reads_past_an_emptied_control_batch_where_a_plain_consumer_dies(
    kafka_broker: KafkaBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = kafka_broker.new_cluster()
    ledger = names.topics(cluster).allocations

    async def put(writer: Writer, commit: int, index: str) -> None:
        allocation = record(commit, index)
        await writer.commit([(ledger, [Entry(allocation.key.encode(), codec.encode(allocation))])])

    async with connect(kafka_broker.url) as bus:
        await bus.create_topics([TopicSpec(ledger, 1, QUICK_CLEANING)])
        await topics.create(bus, cluster, partitions=1)
        await leave_a_transaction_open(kafka_broker, ledger)
        async with await bus.open_writer(names.transactional_id(cluster, keys.host_writer(HOST)), 0) as writer:
            with anyio.fail_after(AGED_WITHIN):
                commit = 0
                while not await plain_consumer_dies(kafka_broker, ledger):
                    await put(writer, commit := commit + 1, "0")
                    await anyio.sleep(1)
            attach = {"BUS": kafka_broker.url, "CLUSTER": cluster, "HOST": HOST, "WORKER": "w", "INCARNATION": "i"}
            for name, value in attach.items():
                monkeypatch.setenv(f"OUTFITTER_{name}", value)
            async with RuntimeContext() as context:
                changes = context.changes("gpu")
                assert (await anext(changes))[0]["index"] == "0"
                await put(writer, commit + 1, "1")
                assert (await anext(changes))[0]["index"] == "1"
            assert await plain_consumer_dies(kafka_broker, ledger), "it was there all the time"
