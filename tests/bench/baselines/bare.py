"""The yardstick: a bare transactional aiokafka consume-and-produce loop, in a process of its own.

It decodes each registration and answers it with the same records as a manager does - the same number, bytes and
topics, one checkpoint a transaction - but decides nothing and keeps no state: the answers are a manager's own
records with the names put in. Batching, client settings and event loop are the service's; its memory is looked after
by Python and libc as they come, the service's as `outfitter_service.memory` says. What it reaches is what aiokafka and
the broker can bear; the distance to it is what Outfitter costs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.producer import sender as aiokafka_sender

from outfitter_proto.bus.kafka.connecting.cluster import REQUEST_TIMEOUT
from outfitter_proto.bus.kafka.reading.reader import FETCH_BYTES, LONG_POLL
from outfitter_proto.bus.kafka.writing.record_batches import BATCH_BYTES

NEXT_TRANSACTION_WAIT, RETRY_BACKOFF_MS = 0.002, 20
"""With aiokafka's wait of 20 ms between transactions, one partition reaches 63 transactions a second, with 2 ms 221."""
MOST_RECORDS = 1000
"""Records a transaction at most, as the service's `Limits.events_per_commit`."""
ROOM = 4096
"""Bytes of a batch that are left to the checkpoint and the records' headers."""


class Job(msgspec.Struct, kw_only=True):
    """What one bare loop does. `ledger` and `history` (None: no such record) are sample records whose worker and
    incarnation are `worker` and `incarnation`; `checkpoint` is written last of each transaction."""

    bootstrap: str
    identity: str
    source: str
    ledger_topic: str
    history_topic: str
    worker: str
    incarnation: str
    ledger: bytes
    history: bytes | None
    checkpoint: bytes | None
    uvloop: bool


Loop = Callable[[Job], Coroutine[Any, Any, None]]


class Asked(msgspec.Struct):
    """The part of a registration that an answer needs."""

    host: str
    worker: str
    incarnation: str


def main(path: str, loop: Loop) -> None:
    """Run `loop` with the job in the file `path` until SIGTERM."""
    job = msgspec.json.decode(Path(path).read_bytes(), type=Job)
    factory = None
    if job.uvloop:
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(_until_told(loop(job)))


async def _until_told(loop: Coroutine[Any, Any, None]) -> None:
    task = asyncio.create_task(loop)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def serve(job: Job) -> None:
    """Consume, answer in transactions, for ever. Prints `ready` when it begins."""
    aiokafka_sender.BACKOFF_OVERRIDE = NEXT_TRANSACTION_WAIT
    source = TopicPartition(job.source, 0)
    consumer = AIOKafkaConsumer(
        bootstrap_servers=job.bootstrap,
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        isolation_level="read_uncommitted",
        fetch_max_wait_ms=int(LONG_POLL * 1000),
        max_partition_fetch_bytes=FETCH_BYTES,
        request_timeout_ms=int(REQUEST_TIMEOUT * 1000),
    )
    producer = AIOKafkaProducer(
        bootstrap_servers=job.bootstrap,
        transactional_id=job.identity,
        max_batch_size=BATCH_BYTES,
        retry_backoff_ms=RETRY_BACKOFF_MS,
        request_timeout_ms=int(REQUEST_TIMEOUT * 1000),
    )
    await producer.start()
    await consumer.start()
    consumer.assign([source])
    decode = msgspec.json.Decoder(Asked).decode
    ledger = answers(job.ledger, job)
    history = answers(job.history, job) if job.history is not None else None
    most = min(MOST_RECORDS, (BATCH_BYTES - ROOM) // (max(len(job.ledger), len(job.history or b"")) + 128))
    print("ready", flush=True)
    try:
        while True:
            messages = (await consumer.getmany(source, timeout_ms=1000, max_records=most)).get(source)
            if not messages:
                continue
            await producer.begin_transaction()
            records = producer.create_batch()
            steps = producer.create_batch()
            for message in messages:
                asked = decode(message.value)
                key = f"{asked.host}/{asked.worker}/{asked.incarnation}".encode()
                worker, incarnation = asked.worker.encode(), asked.incarnation.encode()
                records.append(timestamp=None, key=key, value=ledger(worker, incarnation))
                if history is not None:
                    steps.append(timestamp=None, key=key, value=history(worker, incarnation))
            if job.checkpoint is not None:
                records.append(timestamp=None, key=b"@checkpoint/bare", value=job.checkpoint)
            sent: list[tuple[str, Any]] = [(job.ledger_topic, records)]
            if history is not None:
                sent.insert(0, (job.history_topic, steps))
            futures = [await producer.send_batch(batch, topic, partition=0) for topic, batch in sent]
            for future in futures:
                await future
            await producer.commit_transaction()
    finally:
        await consumer.stop()
        await producer.stop()


def answers(sample: bytes, job: Job) -> Callable[[bytes, bytes], bytes]:
    """A function that puts a worker's name and incarnation where the sample has its own: no encoding at all."""
    pattern = sample.replace(b"%", b"%%")
    pattern = pattern.replace(job.incarnation.encode(), b"%(i)b").replace(job.worker.encode(), b"%(w)b")
    return lambda worker, incarnation: pattern % {b"w": worker, b"i": incarnation}


if __name__ == "__main__":
    os.environ.pop("PYTHONASYNCIODEBUG", None)
    main(sys.argv[1], serve)
