"""The only broker's disk, restored from yesterday, by the commands of service/recover.md."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from recover.test_on_kafka import held, refused, register
from support.kafka.broker import Broker
from support.managers.process import Manager, serving_on
from support.recipes import commands, run

pytestmark = pytest.mark.recover

SECTION = "A disk from yesterday"


@pytest.fixture
def manager(own_broker: Broker, tmp_path: Path) -> Iterator[Manager]:
    with serving_on(own_broker, tmp_path / "manager", gpus=3) as manager:
        yield manager


def restore_yesterday(broker: Broker) -> None:
    """Put the copy of the disk in the place of the disk."""
    shutil.rmtree(broker.folder / "data")
    shutil.copytree(broker.folder / "yesterday", broker.folder / "data")


def copy_disk(broker: Broker) -> None:
    broker.stop()
    shutil.copytree(broker.folder / "data", broker.folder / "yesterday")
    broker.start()


def test_a_manager_that_served_through_it_ends_and_says_so(own_broker: Broker, manager: Manager) -> None:
    register(manager, "w1")
    copy_disk(own_broker)
    for worker in ("w2", "w3"):
        register(manager, worker)
    own_broker.kill9()
    restore_yesterday(own_broker)
    own_broker.start()
    manager.wait(120)
    assert "has gone back from commit " in manager.log_tail()


def test_its_ledger_is_taken_into_new_topics(own_broker: Broker, manager: Manager) -> None:
    register(manager, "w1")
    copy_disk(own_broker)
    token = register(manager, "w2")["token"]
    with manager.popen("run", "--worker", "late", "--", "sleep", "600", start_new_session=True) as late:
        try:
            manager.wait_for_state("late", "allocated")
            stop, *between, last = commands(SECTION)
            run(manager, stop)
            own_broker.kill9()
            restore_yesterday(own_broker)
            own_broker.start()
            for command in between:
                run(manager, command, **{"12": "3"})
            assert "was restored from a backup" in refused(manager)
            assert f"it does not have: {manager.host}/late/" in refused(manager, "--adopt-ledger")
        finally:
            late.kill()
    end_workers(manager)
    run(manager, last)
    assert held(manager) == {"w1": ["GPU-0"]}
    assert register(manager, "w4")["token"] > token
    manager.stop()
    verdict = manager.outfitter("verify")
    assert verdict.returncode == 0, verdict.stdout


def end_workers(manager: Manager) -> None:
    """Kill the processes that have this host's variables."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"OUTFITTER_HOST={manager.host}\0OUTFITTER_".encode() in path.read_bytes():
                os.kill(int(path.parent.name), signal.SIGKILL)
        except OSError:
            continue
