"""Celery tasks that score numbers: each process of the pool has a device of its own.

celery -A worker worker --concurrency 2
"""

import os

from celery import Celery
from celery.signals import worker_process_init, worker_process_shutdown
from outfitter import RuntimeContext

app = Celery("scores", broker="filesystem://")  # a folder in place of a message broker
app.conf.broker_transport_options = dict.fromkeys(("data_folder_in", "data_folder_out", "control_folder"), "queue")
app.conf.worker_proc_alive_timeout = 120  # seconds for the handler below: 4 by default


@worker_process_init.connect
def take_device(**_: object) -> None:
    try:
        app.devices = RuntimeContext(resources={"gpu": 1}, ends_with=os.getppid(), wait=100).enter_for(app)
    except Exception as error:  # Celery would log it, and go on without a device
        raise SystemExit(f"no device: {error}") from error
    (gpu,) = app.devices.get_external_resource_infos("gpu")
    print(f"process {os.getpid()} has {gpu['id']}", flush=True)


@worker_process_shutdown.connect
def give_back(**_: object) -> None:
    app.devices.leave()


@app.task
def score(number: int) -> None:
    (gpu,) = app.devices.get_external_resource_infos("gpu")
    print(f"scored {number} on {gpu['id']}", flush=True)
