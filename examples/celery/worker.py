"""Celery tasks that score numbers: each process of the pool has a device of its own.

celery -A worker worker --concurrency 2
"""

import os
import time

from celery import Celery
from celery.signals import worker_process_init, worker_process_shutdown

from outfitter import RuntimeContext

app = Celery("scores", broker=os.environ.get("BROKER", "redis://127.0.0.1"))
PARENT = os.getpid()  # the pool forks after this; os.getppid() would be wrong once the parent has died
app.conf.worker_proc_alive_timeout = 120  # seconds for the handler below: 4 by default


@worker_process_init.connect
def take_device(**_: object) -> None:
    try:
        app.devices = RuntimeContext(resources={"gpu": 1}, ends_with=PARENT, wait=100).enter_for(app)
    except Exception as error:  # Celery would log it, and go on without a device
        raise SystemExit(f"no device: {error}") from error
    (gpu,) = app.devices.get_external_resource_infos("gpu")
    print(f"process {os.getpid()} has {gpu['id']}", flush=True)


@worker_process_shutdown.connect
def give_back(**_: object) -> None:
    app.devices.leave()


@app.task
def score(number: int) -> None:
    time.sleep(0.1)  # the model
    (gpu,) = app.devices.get_external_resource_infos("gpu")
    print(f"scored {number} on {gpu['id']}", flush=True)
