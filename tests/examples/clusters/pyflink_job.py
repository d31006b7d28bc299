"""The job of examples/pyflink, whose functions say while they use their device: see `support.clusters.uses`.

Both modules are shipped with this one, as `job` and `uses`. The argument is the file of uses. A subtask that finds
`<file>.fail` removes it and raises. A use ends with the function, since PyFlink does not always call `close()`.
"""

from __future__ import annotations

import sys
import uuid
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import job
import uses


class Reporting(job.Score):
    """A `Score` that reports each number."""

    def __init__(self, file: str) -> None:
        self._file = file

    def open(self, runtime_context: Any) -> None:
        super().open(runtime_context)
        (gpu,) = self.devices.get_external_resource_infos("gpu")
        self._use = uses.Use(self._file, gpu["id"], name=uuid.uuid4().hex)
        weakref.finalize(self, self._use.end)  # before the context is left: the last finalizer is the first to run

    def process_element(self, value: int, ctx: Any) -> Iterator[str]:
        self._use.beat()
        try:
            Path(f"{self._file}.fail").unlink()
        except FileNotFoundError:
            yield from super().process_element(value, ctx)
        else:
            raise ValueError("as the test wants it")


if __name__ == "__main__":
    job.Score = lambda: Reporting(sys.argv[1])
    job.run("process", 2, 2**60)
