"""Transactions of a writer that do not end as they should. Reaches into the adapter, because no product needs it."""

from __future__ import annotations

from outfitter_proto.bus import Entry, Writer
from outfitter_proto.bus.kafka.writing.record_batches import split
from outfitter_proto.bus.kafka.writing.steps import Known, Step
from outfitter_proto.bus.kafka.writing.transactions import TransactionalId
from outfitter_proto.bus.kafka.writing.writer import KafkaWriter


def held_by(writer: Writer) -> TransactionalId:
    """The transactional id of a writer on Kafka."""
    assert isinstance(writer, KafkaWriter)
    return writer._held


async def leave_open(writer: Writer, *topics: str, value: bytes, told: bool = True) -> None:
    """Write a record to each topic in a transaction that the writer does not end, not even when it is closed. `told`:
    whether its coordinator hears of it."""
    held = held_by(writer)
    version = held.version
    if not told:
        held.version = 1  # without adding the partitions
    elif version == 1:
        await held._add(topics)
    try:
        await held._write(
            [batch for topic in topics for batch in split(topic, [Entry(b"k", value)], transactional=True)]
        )
    finally:
        held.version = version


async def end(writer: Writer, *, commit: bool) -> Known:
    """End the open transaction of a writer, with one request. Returns what is known then."""
    held = held_by(writer)
    reply = await held._attempt(Step.END, held._ending(commit=commit))
    held._become(reply)
    return reply.known
