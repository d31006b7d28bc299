"""One cell of the crash matrix: workers of one integration, one crash, and a plain worker that waits for a device.

    two workers use a device each, the successor waits ──▶ crash ──▶ the struck worker's device is kept, or moves

The successor takes whatever is freed too early, and the users themselves see the overlap (`support.clusters.uses`). A
device that is kept is freed at the end of the cell by SIGKILL to its user: then it must move. So every cell ends with
the successor's use of a device.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import psutil
from msgspec import Struct

from support.clusters import uses
from support.clusters.programs import Programs
from support.kafka.broker import Broker
from support.managers.process import Manager, files_config
from support.processes.worker_program import WorkerProgram
from wild.report import Row

GPUS = 2
STRUCK = "GPU-0"
"""The device of the worker that the crash strikes."""
PROGRAMS = Path(__file__).parent / "programs"
SUPERVISOR = ("sh", "-c", '"$@"; exit', "sh")
"""The parent of a program that would have none of its own in the matrix: it starts the program and waits."""
PLAIN = (*SUPERVISOR, sys.executable, "program.py")

Outcome = Literal["kept", "moved"]
Note = Callable[[Row], None]


class Scene:
    """The stage of one cell. The manager is on `broker` if `on_broker`, and else on a file. `uses`: the file of uses.
    `started`: the programs, also those of `clusters`, which end with the scene as well. `workers`: what the start of
    the integration has returned."""

    def __init__(self, folder: Path, broker: Broker | None, *, on_broker: bool) -> None:
        self.broker = broker
        options: dict[str, Any] = {"bus": broker.url, "cluster": broker.new_cluster()} if broker and on_broker else {}
        self.manager = Manager(folder / "manager", files_config(folder / "manager" / "gpus", gpus=GPUS), **options)
        self.programs = Programs(folder / "workers")
        self.folder = self.programs.folder
        self.uses = self.folder / "uses"
        self.variables: dict[str, str] = dict(self.manager.environment)
        self.clusters = ExitStack()
        self.started: list[WorkerProgram] = []
        self.workers: Any = None
        for source in (Path(uses.__file__), *PROGRAMS.glob("[a-z]*.py")):
            (self.folder / source.name).write_bytes(source.read_bytes())
        if options:
            created = self.manager.outfitter("topics", "create", "--partitions", "1", "--replication", "1")
            assert created.returncode == 0, created.stderr

    def start(self, command: Sequence[str], **variables: str) -> WorkerProgram:
        """Start a program that finds the manager."""
        self.started.append(self.programs.start(command, {**self.variables, **variables}))
        return self.started[-1]

    def program_of(self, worker: psutil.Process) -> WorkerProgram:
        """The program that has started a worker, however many processes are between them."""
        above = {worker.pid, *(process.pid for process in worker.parents())}
        return next(program for program in self.started if program.pid in above)

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        self.programs.wait_for(condition, what)

    @property
    def victim(self) -> psutil.Process:
        """The worker that the crash strikes: the last one that began with the device."""
        return psutil.Process([span.pid for span in uses.spans(self.uses) if span.device == STRUCK][-1])

    def last_word(self, device: str) -> float:
        """When a user of the device was heard last."""
        return max(span.last for span in uses.spans(self.uses) if span.device == device)

    def devices(self) -> set[str]:
        """The devices that were used so far."""
        return {span.device for span in uses.spans(self.uses)}

    def successor_uses(self) -> bool:
        """Whether the successor has begun, and has looked who was there before."""
        return any(span.name == "successor" and span.last > span.begun for span in uses.spans(self.uses))

    def held(self) -> tuple[str, ...]:
        """Who used what when."""
        spans = uses.spans(self.uses)
        first = min((span.begun for span in spans), default=0.0)
        return tuple(
            f"{span.device}: process {span.pid}{f' ({span.name})' if span.name else ''}, "
            f"{span.begun - first:.2f}-{span.last - first:.2f} s"
            for span in spans
        )


class Integration(Struct, frozen=True, kw_only=True):
    """One way of having devices.

    `start` starts the workers of a scene, so that they use all devices. What it returns is `Scene.workers`. `on_kafka`:
    they know no other bus. `kept`: crashes after which the struck worker still has its device. `left_out`: crashes that
    there are not, and why. `crashes`: what they are here, if not the usual. `speak` writes down the uses of workers
    that cannot do so. `end` ends whoever has the device at the end of a cell.
    """

    name: str
    start: Callable[[Scene], object]
    on_kafka: bool = False
    kept: frozenset[str] = frozenset()
    left_out: Mapping[str, str] = {}
    crashes: Mapping[str, Callable[[Scene], object]] = {}
    speak: Callable[[Scene], object] = lambda _: None
    end: Callable[[Scene], object] = lambda scene: scene.victim.kill()


def exception(scene: Scene) -> None:
    """The worker's code raises."""
    (scene.folder / f"{scene.victim.pid}.fail").touch()


def cancel(scene: Scene) -> None:
    """Ctrl-C for the worker."""
    scene.victim.send_signal(signal.SIGINT)


def kill_manager(scene: Scene) -> None:
    scene.manager.kill9()
    scene.manager.start()


def kill_broker(scene: Scene) -> None:
    assert scene.broker is not None
    scene.broker.kill9()
    scene.broker.start()


CRASHES: Mapping[str, Callable[[Scene], object]] = {
    "exception": exception,
    "cancel": cancel,
    "SIGTERM": lambda scene: scene.victim.terminate(),
    "SIGKILL": lambda scene: scene.victim.kill(),
    "SIGKILL of its parent": lambda scene: os.kill(scene.victim.ppid(), signal.SIGKILL),
    "SIGKILL of the manager": kill_manager,
    "SIGKILL of the broker": kill_broker,
}
HARMLESS = frozenset({"SIGKILL of the manager", "SIGKILL of the broker"})
"""No integration loses a device by these."""


def play(integration: Integration, crash: str, folder: Path, note: Note, broker: Broker | None = None) -> None:
    """Play one cell and note its row.

    Raises:
        AssertionError: two living processes used one device, or the committed records break a promise.
        ProgramError: what had to come did not.
    """
    if (reason := integration.left_out.get(crash)) is not None:
        note(Row(integration=integration.name, crash=crash, outcome="none", reason=reason))
        return
    scene = Scene(folder, broker, on_broker=integration.on_kafka or crash == "SIGKILL of the broker")
    outcome = "?"
    try:
        with _serving(scene):
            _wait_in_line(scene, integration)
            outcome, away_s = _strike(scene, integration, crash)
            verdict = scene.manager.outfitter("verify")
    finally:
        found = tuple(uses.overlaps(scene.uses))
        away = away_s if outcome != "?" else 0.0
        note(
            Row(
                integration=integration.name, crash=crash, outcome=outcome, away_s=away, overlaps=found,
                held=scene.held(),
            )
        )  # fmt: skip
        assert not found, (found, scene.held())
    assert verdict.returncode == 0, verdict.stdout


@contextmanager
def _serving(scene: Scene) -> Iterator[None]:
    try:
        scene.manager.start()
        with scene.programs, scene.clusters:
            yield
    finally:
        scene.manager.kill9()
        print(f"--- {scene.manager.log}\n{scene.manager.log_tail()}")


def _wait_in_line(scene: Scene, integration: Integration) -> None:
    """Have all devices used, and the successor wait."""
    scene.workers = integration.start(scene)

    def are_used() -> bool:
        integration.speak(scene)
        return len(scene.devices()) == GPUS

    scene.wait_for(are_used, "users of all devices")
    scene.start([*PLAIN, "context"], OUTFITTER_WORKER="successor")
    scene.manager.wait_for_state("successor", "pending")


def _strike(scene: Scene, integration: Integration, crash: str) -> tuple[Outcome, float]:
    """Let the crash happen; return what became of the device, and how long it was away from everybody."""
    integration.speak(scene)
    integration.crashes.get(crash, CRASHES[crash])(scene)
    outcome: Outcome = "kept" if crash in integration.kept | HARMLESS else "moved"
    if outcome == "kept":
        _check_kept(scene, integration)
        away_s = uses.longest_away(scene.uses)
        integration.end(scene)
    scene.wait_for(scene.successor_uses, "the successor's use of a device")
    return outcome, away_s if outcome == "kept" else uses.longest_away(scene.uses)


def _check_kept(scene: Scene, integration: Integration) -> None:
    """Block until the manager has decided something that was said after the crash, and a worker goes on with the device
    of the struck one: itself, or one that its framework has started in its place."""
    late = ("run", "--resource", "gpu=1", "--worker", "late", "--wait", "50ms", "--wait-for-manager", "--", "true")
    scene.wait_for(lambda: scene.manager.outfitter(*late).returncode == 124, "the manager's answer to somebody else")
    heard = scene.last_word(STRUCK)

    def goes_on() -> bool:
        integration.speak(scene)
        return scene.last_word(STRUCK) > heard

    scene.wait_for(goes_on, "the next word of the device's user")
    successor = scene.manager.record("successor")
    assert successor is not None
    assert successor["state"] == "pending", scene.held()
