"""The integrations of the matrix that need no cluster: how their workers start, and what a crash is to them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping

from examples.frameworks import environment_of, numbers_topic, publish
from examples.test_celery import redis_command
from support.documents import ROOT
from support.kafka.broker import free_port
from support.managers.process import OUTFITTER
from support.processes.tools import run_tool
from wild.scene import GPUS, PLAIN, SUPERVISOR, Integration, Scene

LIVES_ON = frozenset({"SIGKILL of its parent"})
"""A worker whose own process is the owner goes on without its parent."""


def programs(*command: str) -> Callable[[Scene], None]:
    """Start one program for each device."""

    def start(scene: Scene) -> None:
        for _ in range(GPUS):
            scene.start(command)

    return start


RUN = Integration(
    name="`outfitter run`",
    start=programs(*OUTFITTER, "run", "--resource", "gpu=1", "--", sys.executable, "program.py", "command"),
)
HOLD = Integration(name="`outfitter hold`", start=programs(*PLAIN, "hold"), kept=LIVES_ON)
LEASE = Integration(name="`outfitter-lease`", start=programs(*PLAIN, "lease"), kept=LIVES_ON)
CONTEXT = Integration(name="`RuntimeContext`", start=programs(*PLAIN, "context"), kept=LIVES_ON)


# --- frameworks --------------------------------------------------------------------------------------------


def framework(name: str, *command: str, count: int, replaced: Mapping[str, str] = {}) -> Callable[[Scene], None]:
    """Start a copy of an example's worker, `count` times. In it `replaced` stands for what it has there."""

    def start(scene: Scene) -> None:
        text = (ROOT / "examples" / name / "worker.py").read_text()
        for old, new in {"from outfitter import": "from reporting import", **replaced}.items():
            assert old in text, f"examples/{name} has no {old!r}"
            text = text.replace(old, new.format(**scene.variables))
        (scene.folder / "worker.py").write_text(text)
        installed = environment_of(name) / "bin"
        scene.variables["PATH"] = f"{installed}{os.pathsep}{os.environ['PATH']}"
        for _ in range(count):
            scene.start([*SUPERVISOR, str(installed / command[0]), *command[1:]])

    return start


def consumers(name: str, *command: str) -> Callable[[Scene], None]:
    """Start two consumers of a topic with a partition for each."""

    def start(scene: Scene) -> None:
        assert scene.broker is not None
        scene.variables.update(numbers_topic(scene.broker))
        framework(name, *command, count=GPUS)(scene)

    return start


def send_no_numbers(scene: Scene) -> None:
    """Send what no worker can take, until the struck one has said so."""
    struck = scene.program_of(scene.victim)

    def has_raised() -> bool:
        publish(scene.variables, ["nonsense"] * GPUS)
        # Faust does not repeat what it cannot decode
        return any(text in struck.output() for text in ("nonsense", "Expecting value"))

    scene.wait_for(has_raised, "an exception in the struck worker")


ASYNCIO = Integration(
    name="asyncio",
    start=consumers("asyncio", "python", "worker.py"),
    kept=LIVES_ON,
    crashes={"exception": send_no_numbers},
)
FASTSTREAM = Integration(
    name="FastStream",
    start=consumers("faststream", "faststream", "run", "worker:app"),
    kept=LIVES_ON | {"exception"},
    crashes={"exception": send_no_numbers},
)
FAUST = Integration(
    name="Faust",
    start=consumers("faust", "faust", "-A", "worker", "worker", "--without-web"),
    kept=LIVES_ON | {"exception"},
    crashes={"exception": send_no_numbers},
)


def start_celery(scene: Scene) -> None:
    port = free_port()
    redis = scene.start(redis_command(port))
    redis.wait_for_text("Ready to accept connections")
    scene.variables["BROKER"] = f"redis://127.0.0.1:{port}"
    framework("celery", "celery", "-A", "worker", "worker", "--concurrency", str(GPUS), count=1)(scene)


def python(scene: Scene, script: str) -> None:
    """Run a script in the environment of the scene's framework."""
    variables = [f"{name}={value}" for name, value in scene.variables.items()]
    run_tool(["env", *variables, "python", "-c", script], scene.folder)


def raise_in_celery(scene: Scene) -> None:
    """Send tasks that lack their argument, until one has raised in the struck process of the pool."""
    celery = scene.program_of(scene.victim)
    name = re.search(rf"/(ForkPoolWorker-\d+)\] process {scene.victim.pid} has", celery.output())
    assert name, celery.output()

    def has_raised() -> bool:
        python(scene, "import worker\nfor _ in range(20): worker.app.send_task('worker.score')")
        return f"ERROR/{name[1]}] Task worker.score" in celery.output()

    scene.wait_for(has_raised, "an exception in the struck process")


REVOKE = """
import worker
tasks = [worker.score.delay(number) for number in range(200)]
while not any((worker.app.control.inspect().active() or {}).values()):
    pass
worker.app.control.revoke([task.id for task in tasks], terminate=True)
"""

CELERY = Integration(
    name="Celery",
    start=start_celery,
    kept=frozenset({"exception"}),
    crashes={
        "exception": raise_in_celery,
        "cancel": lambda scene: python(scene, REVOKE),
    },
)


def start_dask(scene: Scene) -> None:
    scene.variables["SCHEDULER"] = str(free_port())
    port = {"dashboard_address=None": "dashboard_address=None, scheduler_port={SCHEDULER}"}
    framework("dask", "python", "worker.py", count=1, replaced=port)(scene)


def on_dask(scene: Scene, script: str) -> None:
    connect = f"from distributed import Client; client = Client('127.0.0.1:{scene.variables['SCHEDULER']}')"
    python(scene, f"import time; {connect}; {script}")


SUBMIT_AND_CANCEL = """
tasks = client.map(time.sleep, [5, 5], pure=False)
while not {task.key for task in tasks} & {key for keys in client.processing().values() for key in keys}:
    pass
client.cancel(tasks, force=True)
"""

DASK = Integration(
    name="Dask",
    start=start_dask,
    kept=frozenset({"exception", "cancel"}),
    crashes={
        "exception": lambda scene: on_dask(scene, "client.submit(int, 'nonsense').exception()"),
        "cancel": lambda scene: on_dask(scene, SUBMIT_AND_CANCEL),
    },
)
