"""A FastStream application that scores numbers on a device of its own: `faststream run worker:app`."""

import multiprocessing
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from faststream import Context, ContextRepo, FastStream
from faststream.kafka import KafkaBroker

from outfitter import RuntimeContext

broker = KafkaBroker(os.environ.get("KAFKA", "127.0.0.1:9092"))
numbers = os.environ.get("NUMBERS", "numbers")


@asynccontextmanager
async def lifespan(context: ContextRepo) -> AsyncIterator[None]:
    parent = multiprocessing.parent_process()  # None without `--workers`
    async with RuntimeContext(resources={"gpu": 1}, ends_with=parent and parent.pid) as devices:
        context.set_global("devices", devices)
        (gpu,) = devices.get_external_resource_infos("gpu")
        print(f"process {os.getpid()} has {gpu['id']}", flush=True)
        yield
    print(f"process {os.getpid()} has given it back", flush=True)


app = FastStream(broker, lifespan=lifespan)


@broker.subscriber(numbers, group_id=numbers, auto_offset_reset="earliest")
async def score(number: int, devices: Annotated[RuntimeContext, Context()]) -> None:
    (gpu,) = devices.get_external_resource_infos("gpu")
    print(f"scored {number} on {gpu['id']}", flush=True)
