"""The integrations of the matrix in other languages: the examples, which speak to Kafka themselves.

They hold a device and compute nothing, so the cell reads their output and speaks for them. No manager watches such a
worker: when it is killed, its lease decides.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable

import psutil

from examples import contract, test_go, test_java, test_javascript, test_shell
from support.clusters import uses
from support.processes.ending import has_ended
from support.processes.worker_program import WorkerProgram
from wild.scene import GPUS, SUPERVISOR, Integration, Scene

LEASE_S = 60.0
"""Longer than a broker's restart on a busy machine."""
LAST_WORDS = ("over", "failed", "lost", "released")
"""What the examples print when they have a device no more."""


class Workers:
    """A copy of an example for each device."""

    def __init__(self, scene: Scene, program: contract.Program) -> None:
        self._scene = scene
        self._uses: dict[WorkerProgram, uses.Use] = {}
        self._pids: dict[WorkerProgram, int] = {}
        bootstrap = scene.manager.bus_url.removeprefix("kafka://")
        for number in range(GPUS):
            arguments = [bootstrap, scene.manager.host, f"worker-{number}", "gpu=1", f"{LEASE_S:g}"]
            command = ["env", f"--chdir={program.folder}", *program.command, *arguments]
            # one after the other: each of the shell's starts two Java machines
            scene.programs.wait_for_output(scene.start([*SUPERVISOR, *command]), "^yours")

    def speak(self) -> None:
        """Write down what the workers have printed since the last time."""
        for program in self._scene.started[:GPUS]:
            if program not in self._uses:
                self._begin(program)
            elif not has_ended(self._pids[program]) and not any(map(program.lines, LAST_WORDS)):
                self._uses[program].beat()

    def _begin(self, program: WorkerProgram) -> None:
        for line in program.lines("yours"):
            (device,) = json.loads(line.removeprefix("yours "))["gpu"]
            (worker,) = psutil.Process(program.pid).children()
            self._pids[program] = worker.pid
            self._uses[program] = uses.Use(self._scene.uses, device["id"], pid=worker.pid)

    def stop(self, number: signal.Signals) -> None:
        """End the struck worker by a signal. It uses its device no more by then: it gives it back before it ends."""
        victim = self._scene.victim
        (program,) = [program for program, pid in self._pids.items() if pid == victim.pid]
        self._uses[program].end()
        victim.send_signal(number)


def language(name: str, build: Callable[[], contract.Program]) -> Integration:
    return Integration(
        name=f"worker in {name}",
        start=lambda scene: Workers(scene, build()),
        on_kafka=True,
        speak=lambda scene: scene.workers.speak(),
        kept=frozenset({"SIGKILL of its parent"}),
        left_out={"exception": "the example computes nothing that could raise one"},
        crashes={
            "cancel": lambda scene: scene.workers.stop(signal.SIGINT),
            "SIGTERM": lambda scene: scene.workers.stop(signal.SIGTERM),
        },
        end=lambda scene: scene.workers.stop(signal.SIGTERM),
    )


LANGUAGES = (
    language("shell", test_shell.build),
    language("Java", test_java.build),
    language("Go", test_go.build),
    language("JavaScript", test_javascript.build),
)
