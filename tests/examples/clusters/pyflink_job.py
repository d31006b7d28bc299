"""The job of examples/pyflink, whose functions say while they use their device: see `support.clusters.uses`.

Both modules are shipped with this one, as `job` and `uses`. `--uses` is the file; a subtask that finds the file
`<uses>.fail` removes it and raises.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import job
import uses

USES = Path(sys.argv[1]) if __name__ == "__main__" else None


class Reporting(job.Score):
    """A `Score` that reports each number."""

    def __init__(self, file: str) -> None:
        self._file = file

    def open(self, runtime_context: Any) -> None:
        super().open(runtime_context)
        (gpu,) = self.devices.get_external_resource_infos("gpu")
        self._use = uses.Use(self._file, gpu["id"], name=uuid.uuid4().hex)

    def process_element(self, value: int, ctx: Any) -> Iterator[str]:
        self._use.beat()
        try:
            Path(f"{self._file}.fail").unlink()
        except FileNotFoundError:
            yield from super().process_element(value, ctx)
        else:
            raise ValueError("as the test wants it")

    def close(self) -> None:
        self._use.end()


if __name__ == "__main__":
    job.Score = lambda: Reporting(str(USES))
    job.run("process", 2, 2**60)
