"""Workers with a device each, one for each way of having it: `python program.py command|hold|lease|context|careless`.

A worker uses its device until it is ended. If the file `PID.fail` appears in its working directory, it raises.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from uses import BEAT_S, Use

OUTFITTER = [sys.executable, "-m", "outfitter_service.cli"]


def use(device: str, is_ours: Callable[[], object] = lambda: True) -> None:
    """Use the device as long as it `is_ours`."""
    said = Use("uses", device)
    try:
        while is_ours():
            said.beat()
            pause()
    finally:
        said.end()


def pause() -> None:
    """Wait until the next beat, or raise if the cell wants that."""
    time.sleep(BEAT_S)
    if Path(f"{os.getpid()}.fail").exists():
        raise ValueError("as the cell wants it")


def command() -> None:
    """Under `outfitter run`."""
    use(os.environ["CUDA_VISIBLE_DEVICES"])


def hold() -> None:
    """The parent of `outfitter hold`, as a program in another language is: it reads lines and knows no more."""
    command = [*OUTFITTER, "hold", "--resource", "gpu=1"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    into, out = child.stdin, child.stdout
    assert into is not None
    assert out is not None
    said = [json.loads(out.readline())]
    threading.Thread(target=lambda: said.extend(map(json.loads, out)), daemon=True).start()
    try:
        use(said[0]["resources"]["gpu"][0]["id"], lambda: said[-1].get("state") == "allocated")
    finally:
        into.close()  # gives the device back
        child.wait()


def lease() -> None:
    """The caller of `outfitter-lease`, as Flink's task manager is."""
    script = Path(sys.executable).with_name("outfitter-lease")
    found = subprocess.run([script, "1", "--property", "id"], stdout=subprocess.PIPE, text=True, check=True)
    use(found.stdout.strip())


def context() -> None:
    """A plain `with RuntimeContext`, which also waits while manager or broker are away."""
    from reporting import RuntimeContext

    with RuntimeContext(resources={"gpu": 1}, wait_for_manager=True):
        while True:
            pause()


def careless() -> None:
    """A worker with a bug: it gives its device back and goes on using it."""
    from outfitter import RuntimeContext

    with suppress(ValueError), RuntimeContext(resources={"gpu": 1}) as devices:
        (info,) = devices.get_external_resource_infos("gpu")
        said = Use("uses", info["id"])
        while True:
            said.beat()
            pause()
    while True:
        said.beat()
        time.sleep(BEAT_S)


if __name__ == "__main__":
    {each.__name__: each for each in (command, hold, lease, context, careless)}[sys.argv[1]]()
