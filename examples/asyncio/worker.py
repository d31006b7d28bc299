"""A consumer in plain asyncio that scores numbers on a device of its own."""

import asyncio
import os
import signal

from aiokafka import AIOKafkaConsumer

from outfitter import RuntimeContext

KAFKA = os.environ.get("KAFKA", "127.0.0.1:9092")
NUMBERS = os.environ.get("NUMBERS", "numbers")


async def main() -> None:
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asyncio.current_task().cancel)
    consumer = AIOKafkaConsumer(NUMBERS, bootstrap_servers=KAFKA, group_id=NUMBERS, auto_offset_reset="earliest")
    async with RuntimeContext(resources={"gpu": 1}) as devices, consumer:
        (gpu,) = devices.get_external_resource_infos("gpu")
        print(f"process {os.getpid()} has {gpu['id']}", flush=True)
        async for message in consumer:
            print(f"scored {int(message.value)} on {gpu['id']}", flush=True)


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except (asyncio.CancelledError, KeyboardInterrupt):
        print(f"process {os.getpid()} has given it back")
