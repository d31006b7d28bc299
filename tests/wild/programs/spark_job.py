"""The job of examples/spark, whose tasks say while they use their device: see `support.clusters.uses`.

Both modules are shipped with this one, as `job` and `uses`. The third argument is the file of uses. A task that finds
`PID.fail` beside that file removes it and raises.
"""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import job
import uses
from pyspark import TaskContext


class Reporting:
    """Takes the place of `use_device`."""

    def __init__(self, file: str) -> None:
        self._file = Path(file)

    def __call__(self, task: int, seconds: Iterator[float]) -> Iterator[str]:
        (gpu,) = TaskContext.get().resources()["gpu"].addresses
        use = uses.Use(self._file, gpu, name=uuid.uuid4().hex[:8])
        fail = self._file.with_name(f"{os.getpid()}.fail")
        until = time.monotonic() + sum(seconds)
        try:
            while time.monotonic() < until:
                use.beat()
                time.sleep(uses.BEAT_S)
                if fail.exists():
                    fail.unlink()
                    raise ValueError("as the cell wants it")
        finally:
            use.end()
        yield f"task {task} had {gpu}"


if __name__ == "__main__":
    job.use_device = Reporting(sys.argv[3])
    job.main(int(sys.argv[1]), float(sys.argv[2]))
