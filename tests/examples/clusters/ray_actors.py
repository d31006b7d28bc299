"""Two actors like those of examples/ray, which say while they use their device: see `support.clusters.uses`.

The arguments are the folder of `uses.py`, and the file of uses. With the word `daemon` as a third one, a daemon of the
actor is the user. Ray ends an actor's other children with it, even if nothing has told the actor to end.
"""

from __future__ import annotations

import os
import subprocess
import sys

import ray


@ray.remote(num_gpus=1, max_restarts=-1, max_task_retries=-1)
class Reporting:
    def __init__(self, modules: str, file: str, user: str = "actor") -> None:
        sys.path.append(modules)
        import uses

        pid = _daemon() if user == "daemon" else os.getpid()
        self._use = uses.Use(file, os.environ["CUDA_VISIBLE_DEVICES"], pid=pid)

    def score(self) -> None:
        self._use.beat()


def _daemon() -> int:
    """Start a process in a session of its own, whose parent is gone."""
    return int(subprocess.check_output(["sh", "-c", "setsid sleep 3600 >/dev/null 2>&1 & echo $!"]))


if __name__ == "__main__":
    ray.init(address="auto", log_to_driver=False)
    at_work = {actor.score.remote(): actor for actor in (Reporting.remote(*sys.argv[1:]) for _ in range(2))}
    while True:
        (done,), _ = ray.wait(list(at_work))
        ray.get(done)
        actor = at_work.pop(done)
        at_work[actor.score.remote()] = actor
