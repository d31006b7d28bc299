"""Dask workers that score numbers: each worker process has a device of its own."""

import itertools
import os
import signal

from distributed import Client, LocalCluster, Worker, WorkerPlugin, get_worker

from outfitter import RuntimeContext


class Devices(WorkerPlugin):
    name = "devices"

    def setup(self, worker: Worker) -> None:
        worker.devices = RuntimeContext(resources={"gpu": 1}).enter_for(worker)
        (gpu,) = worker.devices.get_external_resource_infos("gpu")
        print(f"process {os.getpid()} has {gpu['id']}", flush=True)

    def teardown(self, worker: Worker) -> None:
        worker.devices.leave()


def score(number: int) -> str:
    (gpu,) = get_worker().devices.get_external_resource_infos("gpu")
    return f"scored {number} on {gpu['id']}"


def main() -> None:
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster, Client(cluster) as client:
        client.register_plugin(Devices())
        for first in itertools.count(step=4):
            for line in client.gather(client.map(score, range(first, first + 4))):
                print(line, flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        main()
    except KeyboardInterrupt:
        print("all workers have ended")
