"""Real processes with children, none of which descends from the test's own process."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from support.processes.ending import wait_until_ended

_PARENT = 'sh -c "sleep 1000 & echo $$ $!; exec sleep 1000" &'


class Family:
    """A process and its child."""

    def __init__(self, env: Mapping[str, str]) -> None:
        script = _PARENT.replace("$$", r"\$\$").replace("$!", r"\$!")
        with subprocess.Popen(
            ["/bin/sh", "-c", script],
            stdout=subprocess.PIPE,
            env={**os.environ, **env},
            text=True,
            start_new_session=True,
        ) as shell:
            assert shell.stdout is not None
            self.parent, self.child = map(int, shell.stdout.readline().split())

    def end(self, *pids: int) -> None:
        """Kill these, or all of it, and wait until they are gone."""
        for pid in pids or (self.parent, self.child):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            wait_until_ended(pid)


@contextmanager
def families(count: int, **env: str) -> Iterator[list[Family]]:
    """So many families, with these variables."""
    found: list[Family] = []
    try:
        found += [Family(env) for _ in range(count)]
        yield found
    finally:
        for family in found:
            family.end()
