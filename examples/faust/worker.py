"""A Faust application that scores numbers on a device of its own: `faust -A worker worker --without-web`."""

import os

import faust

from outfitter import RuntimeContext


class App(faust.App):
    async def on_start(self) -> None:
        self.devices = await self.add_async_context(RuntimeContext(resources={"gpu": 1}))
        (gpu,) = self.devices.get_external_resource_infos("gpu")
        print(f"process {os.getpid()} has {gpu['id']}", flush=True)
        await super().on_start()


kafka = os.environ.get("KAFKA", "127.0.0.1:9092")
numbers = os.environ.get("NUMBERS", "numbers")
app = App(numbers, broker=f"kafka://{kafka}", topic_disable_leader=True)


@app.agent(app.topic(numbers, value_type=int))
async def score(stream: faust.Stream[int]) -> None:
    (gpu,) = app.devices.get_external_resource_infos("gpu")
    async for number in stream:
        print(f"scored {number} on {gpu['id']}", flush=True)
