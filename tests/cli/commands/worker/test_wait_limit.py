"""A manager that hangs on the worker's own machine: who said how long to wait waits no longer, and hears of it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import anyio
import pytest
from msgspec import UNSET

from outfitter_proto.bus import connect
from outfitter_proto.names import managers_topic, topics
from outfitter_service.query import ledger_view
from support.kafka.broker import KafkaBroker
from support.managers.process import OUTFITTER, Manager, StartManager, serving_on
from support.processes.freezing import freeze

pytestmark = pytest.mark.slow

OFTEN = {"OUTFITTER_BEAT_INTERVAL": "5s"}
WAIT = "15s"
"""Three signs of life are missed within it."""
ENDS_WITHIN_S = 90.0
CLIENT = """
import logging, outfitter
logging.basicConfig(format="%(message)s")
try:
    outfitter.RuntimeContext({"gpu": 1}, worker="w-client", wait=15).__enter__()
except outfitter.WaitedTooLongError as error:
    print("waited too long:", error, error.code)
"""


@pytest.fixture(params=["embedded", pytest.param("kafka", marks=pytest.mark.kafka)])
def hanging(request: pytest.FixtureRequest, start_manager: StartManager, tmp_path: Path) -> Iterator[Manager]:
    """A manager that was stopped by SIGSTOP between two commits. What it holds, it goes on holding: its machine's lock,
    too. In the middle of one, Kafka would hide the ledger's end from the workers, who then say that instead."""
    with ExitStack() as stack:
        if request.param == "embedded":
            manager = start_manager(gpus=1, variables=OFTEN)
        else:
            broker = request.getfixturevalue("kafka_broker")
            options = {"cluster": KafkaBroker.new_cluster(), "variables": OFTEN}
            manager = stack.enter_context(serving_on(broker, tmp_path / "m", **options))
        manager.wait_for(lambda: promises_signs(manager))
        manager.wait_for(lambda: frozen_between_commits(manager))
        manager.wait_for(lambda: "but was last heard" in manager.outfitter("status").stderr)
        yield manager


def frozen_between_commits(manager: Manager) -> bool:
    """Freeze it. If it was about to commit, let it go on instead."""
    freeze(manager.pid)
    if anyio.run(everything_is_decided, manager):
        return True
    manager.signal(signal.SIGCONT)
    return False


async def everything_is_decided(manager: Manager) -> bool:
    """Whether no transaction is open in what workers read."""
    async with connect(manager.bus_url) as bus:
        for topic in (topics(manager.cluster).allocations, managers_topic(manager.cluster)):
            for partition in range((await bus.topic(topic)).partitions):
                if await bus.open_transaction(topic, partition) is not None:
                    return False
    return True


def promises_signs(manager: Manager) -> bool:
    """Whether the ledger says how often the manager gives a sign of life."""

    async def look() -> bool:
        async with connect(manager.bus_url) as bus:
            ledger = await ledger_view.read(bus, manager.cluster)
        return any(checkpoint.beat_s is not UNSET for checkpoint in ledger.checkpoints.values())

    return anyio.run(look)


def test_run_hold_and_a_context_end_after_their_wait_and_say_what_has_become_of_the_manager(hanging: Manager) -> None:
    options = {"env": hanging.environment, "stdin": subprocess.PIPE, "text": True,
               "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}  # fmt: skip
    commands = {
        "run": [*OUTFITTER, "run", "--worker", "w-run", "--resource", "gpu=1", "--wait", WAIT, "--", "true"],
        "hold": [*OUTFITTER, "hold", "--worker", "w-hold", "--resource", "gpu=1", "--wait", WAIT],
        "client": [sys.executable, "-c", CLIENT],
    }
    with ExitStack() as stack:
        asked = {name: stack.enter_context(subprocess.Popen(command, **options)) for name, command in commands.items()}
        ended = {}
        try:
            for name, process in asked.items():
                process.wait(ENDS_WITHIN_S)
                ended[name] = (process.returncode, *process.communicate())
        finally:
            for process in asked.values():
                process.kill()
    hangs = f"the manager of host '{hanging.host}' lives (process {hanging.pid}), but was last heard "
    assert {name: code for name, (code, _, _) in ended.items()} == {"run": 124, "hold": 124, "client": 0}, ended
    for name, (_, out, err) in ended.items():
        assert f"no verdict on {hanging.host}/w-{name}/" in out + err, name
        assert err.count(f"still no answer: {hangs}") == 1, err
    assert json.loads(ended["hold"][1])["code"] == "waited-too-long"
    assert f"within 15 s: {hangs}" in ended["run"][2]
    assert ended["client"][1].startswith("waited too long: ")
    assert hangs in hanging.outfitter("status").stderr
