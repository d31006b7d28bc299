"""The yardstick: what the brokers' faults cost a bare transactional loop, at the same time, on the same brokers.

One loop for each partition, all in one process (`python -m chaos.bare`), fed at a steady pace by the fleet. Each
answers whatever it reads with a record and a checkpoint, in one transaction, in a topic of its own; on any error or
time-out it begins anew with new clients. It decides nothing and restores nothing, and answers again what it does not
know the outcome of. Time-outs are the managers'.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import anyio
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.errors import IllegalOperation, KafkaError
from aiokafka.producer import sender as aiokafka_sender

from outfitter_proto.bus.kafka.adapter import TAKE_WITHIN, TRANSACTION_TIMEOUT, WATCHDOG
from outfitter_proto.bus.kafka.connecting.cluster import REQUEST_TIMEOUT
from outfitter_proto.bus.kafka.reading.reader import LONG_POLL
from outfitter_proto.bus.kafka.writing.record_batches import BATCH_BYTES
from outfitter_proto.keys import checkpoint_key
from support.managers.process import environment

FAILURES = (KafkaError, IllegalOperation, AssertionError, OSError, TimeoutError)
FIRST_DELAY_S, LONGEST_DELAY_S = 0.1, 5.0
NEXT_TRANSACTION_WAIT, RETRY_BACKOFF_MS = 0.002, 20
STOPPED_WITHIN_S = 20.0


def source(cluster: str) -> str:
    """Where the loops of a cluster read."""
    return f"{cluster}.bare-input"


def goal(cluster: str) -> str:
    """Where the loops of a cluster write."""
    return f"{cluster}.bare"


def writer(partition: int) -> str:
    """By what name a loop's checkpoints are told from others'."""
    return f"bare-{partition}"


class BareLoops:
    """A process of loops, one for each of so many partitions."""

    def __init__(self, bootstrap: str, cluster: str, partitions: int) -> None:
        self.writers = [writer(partition) for partition in range(partitions)]
        self._arguments = [bootstrap, cluster, str(partitions)]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        here = environment(PYTHONPATH=str(Path(__file__).parents[1]))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "chaos.bare", *self._arguments],
            env=here,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def close(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOPPED_WITHIN_S)
        self._process.kill()
        self._process.wait()


class _Loop:
    def __init__(self, bootstrap: str, cluster: str, partition: int) -> None:
        self._bootstrap = bootstrap
        self._identity = f"{cluster}-{writer(partition)}"
        self._source = TopicPartition(source(cluster), partition)
        self._goal = goal(cluster)
        self._key = checkpoint_key(writer(partition)).encode()
        self._position: int | None = None
        self._left: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Answer, with ever new clients, until cancelled."""
        delay = FIRST_DELAY_S
        while True:
            try:
                async with self._clients() as (consumer, producer):
                    while True:
                        await self._answer(consumer, producer)
                        delay = FIRST_DELAY_S
            except FAILURES as error:
                print(f"{self._identity}: {type(error).__name__}: {error}", flush=True)
            await asyncio.sleep(delay)
            delay = min(2 * delay, LONGEST_DELAY_S)

    @contextlib.asynccontextmanager
    async def _clients(self) -> AsyncIterator[tuple[Any, Any]]:
        shared = {"bootstrap_servers": self._bootstrap, "request_timeout_ms": int(REQUEST_TIMEOUT * 1000)}
        producer = AIOKafkaProducer(
            transactional_id=self._identity,
            transaction_timeout_ms=int(TRANSACTION_TIMEOUT * 1000),
            retry_backoff_ms=RETRY_BACKOFF_MS,
            max_batch_size=BATCH_BYTES,
            **shared,
        )
        consumer = AIOKafkaConsumer(
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            fetch_max_wait_ms=int(LONG_POLL * 1000),
            **shared,
        )
        try:
            with anyio.fail_after(TAKE_WITHIN):
                await producer.start()
                await consumer.start()
            consumer.assign([self._source])
            if self._position is not None:
                consumer.seek(self._source, self._position)
            yield consumer, producer
        finally:
            # nobody waits for the old ones: to stop them may take as long as the brokers are away
            for client in (producer, consumer):
                task = asyncio.create_task(_stop(client))
                self._left.add(task)
                task.add_done_callback(self._left.discard)

    async def _answer(self, consumer: Any, producer: Any) -> None:
        found = (await consumer.getmany(self._source, timeout_ms=500, max_records=1000)).get(self._source)
        if not found:
            return
        with anyio.fail_after(WATCHDOG):
            await producer.begin_transaction()
            batch = producer.create_batch()
            for key, value in [*((message.key, message.value) for message in found), (self._key, b"{}")]:
                if batch.append(timestamp=None, key=key, value=value) is None:
                    raise ValueError(f"{len(found)} records do not fit into one batch")
            await (await producer.send_batch(batch, self._goal, partition=self._source.partition))
        with anyio.fail_after(WATCHDOG):
            await producer.commit_transaction()
        self._position = found[-1].offset + 1


async def _stop(client: Any) -> None:
    with contextlib.suppress(*FAILURES), anyio.move_on_after(2 * REQUEST_TIMEOUT):
        await client.stop()


async def _until_told(bootstrap: str, cluster: str, partitions: int) -> None:
    loops = [asyncio.create_task(_Loop(bootstrap, cluster, n).run()) for n in range(partitions)]
    over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
    await asyncio.wait([*loops, asyncio.create_task(over.wait())], return_when=asyncio.FIRST_COMPLETED)
    for task in loops:
        if task.done():
            task.result()  # a loop ends by a defect of its own only
        task.cancel()


def main(arguments: Sequence[str]) -> None:
    """Run until SIGTERM: bootstrap servers, cluster name, number of partitions."""
    bootstrap, cluster, partitions = arguments
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # it logs a hundred errors a second
    aiokafka_sender.BACKOFF_OVERRIDE = NEXT_TRANSACTION_WAIT
    asyncio.run(_until_told(bootstrap, cluster, int(partitions)))


if __name__ == "__main__":
    main(sys.argv[1:])
