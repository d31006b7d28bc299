"""The same consume-decide-produce job in FastStream, the way its users write it: a subscriber that publishes what it
decided, record by record, without transactions. For comparison only: `pip install 'faststream[kafka]'`, the extra
`bench`.

It takes a device from a list of free ones and answers with the same bytes as the bare loop, in a process of its own.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import msgspec
from faststream.kafka import KafkaBroker

from bench import loads
from bench.baselines.bare import Asked, Job, answers, main


async def serve(job: Job) -> None:
    """Consume, decide and produce until cancelled. Prints `ready` when it begins."""
    broker = KafkaBroker(job.bootstrap, logger=None)
    decode = msgspec.json.Decoder(Asked).decode
    ledger = answers(job.ledger, job)
    history = answers(job.history or b"", job)
    free = [str(number) for number in range(loads.DEVICES)]
    held: dict[str, str] = {}

    @broker.subscriber(job.source, group_id=job.identity, auto_offset_reset="earliest", decoder=_body)
    async def answer(body: bytes) -> None:
        asked = decode(body)
        key = f"{asked.host}/{asked.worker}/{asked.incarnation}"
        if key in held or not free:
            return
        held[key] = free.pop()
        names = asked.worker.encode(), asked.incarnation.encode()
        await broker.publish(history(*names), job.history_topic, key=key.encode(), partition=0)
        await broker.publish(ledger(*names), job.ledger_topic, key=key.encode(), partition=0)

    await broker.start()
    print("ready", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        await broker.stop()


async def _body(message: Any) -> bytes:
    """What FastStream hands to the subscriber: bytes, so that its own decoding is not measured."""
    body: bytes = message.body
    return body


if __name__ == "__main__":
    main(sys.argv[1], serve)
