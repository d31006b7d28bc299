"""`outfitter hold` where the manager cannot see the owner: the manager is in a PID namespace of its own."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from cli.commands.worker.conftest import PATIENCE
from cli.commands.worker.holding import parent_of_hold, read_line
from support.kafka.broker import Broker
from support.managers.process import OUTFITTER, Manager, StartManager, add_device, serving_on
from support.processes.ending import wait_until_ended

pytestmark = pytest.mark.slow

APART = (
    "unshare", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), "--pid", "--fork", "--kill-child",
    "--mount-proc",
)  # fmt: skip
"""What starts a program in a PID namespace of its own."""
NAMED = ("--worker", "w", "--incarnation", "run-1")


@pytest.fixture
def manager_apart(start_manager: StartManager) -> Manager:
    return start_manager(gpus=2, extra='lease = "2s"', program=[*APART, *OUTFITTER])


def see_a_lease_expire(manager: Manager) -> None:
    """Wait until a silent worker has lost its device, which registers only now."""
    assert manager.outfitter("register", "--worker", "silent", "--resource", "gpu=1").returncode == 0
    assert manager.wait_for_state("silent", "ended")["reason_code"] == "lease-expired"


def test_a_parent_that_does_not_read_stops_no_heartbeat(manager_apart: Manager) -> None:
    read, write = os.pipe()
    with manager_apart.popen("hold", *NAMED, stdin=subprocess.PIPE, stdout=write) as process, os.fdopen(read) as pipe:
        os.close(write)
        manager_apart.wait_for_state("w", "allocated")
        for number in range(20):  # together more than a pipe takes
            add_device(manager_apart.folder / "gpus", 0, model=f"{number}", notes=6000 * "x")
            manager_apart.wait_for(lambda number=number: f'"model":"{number}"' in compact(manager_apart, "w"))
        see_a_lease_expire(manager_apart)
        record = manager_apart.record("w")
        assert record is not None
        assert record["state"] == "allocated"
        while f'"model":"{number}"' not in pipe.readline():
            pass
        process.communicate(timeout=PATIENCE)
    assert process.returncode == 0


def compact(manager: Manager, worker: str) -> str:
    return json.dumps(manager.record(worker), separators=(",", ":"))


def test_without_a_watched_owner_the_lease_decides_after_its_own_death(manager_apart: Manager) -> None:
    with manager_apart.popen("hold", *NAMED, stdin=subprocess.PIPE) as process:
        read_line(process)
        process.kill()
        process.communicate(timeout=PATIENCE)
    assert manager_apart.wait_for_state("w", "ended")["reason_code"] == "lease-expired"


def test_an_owner_that_the_manager_cannot_see_is_watched_by_hold_itself(manager_apart: Manager) -> None:
    with parent_of_hold(manager_apart, "--worker", "w", "--lease", "1h") as (parent, pid):
        read_line(parent)
        parent.kill()
        record = manager_apart.wait_for_state("w", "ended")
        wait_until_ended(pid)
    assert record["reason"] == "deregistered: its owner has ended"


def test_an_owner_in_another_namespace_cannot_be_named(shared_manager: Manager) -> None:
    with subprocess.Popen([*APART, "cat"], stdin=subprocess.PIPE) as apart:
        children = Path(f"/proc/{apart.pid}/task/{apart.pid}/children")
        shared_manager.wait_for(children.read_text)
        done = shared_manager.outfitter("hold", "--no-stdin", "--owner-pid", children.read_text().strip())
        apart.communicate(timeout=PATIENCE)
    assert done.returncode == 125
    assert "is in another PID namespace" in json.loads(done.stdout)["reason"]


# --- outages ---------------------------------------------------------------------------------------------


@pytest.fixture
def apart_on_kafka(tmp_path: Path, own_broker: Broker) -> Iterator[Manager]:
    with serving_on(own_broker, tmp_path / "manager", partitions=1, program=[*APART, *OUTFITTER]) as manager:
        yield manager


@pytest.mark.kafka
@pytest.mark.timeout(180)
def test_an_outage_puts_the_lease_at_risk_and_the_record_takes_that_back(
    apart_on_kafka: Manager, own_broker: Broker
) -> None:
    with apart_on_kafka.popen("hold", *NAMED, "--lease", "3s", stdin=subprocess.PIPE) as process:
        before = read_line(process)
        own_broker.kill9()
        warning = read_line(process)
        assert (warning["type"], warning["worker"], warning["incarnation"]) == ("at-risk", "w", "run-1")
        assert "stop using its devices" in warning["reason"]
        anyio.run(own_broker.restarted)
        while (after := read_line(process))["type"] == "at-risk":
            pass
        assert (after["state"], after["token"]) == ("allocated", before["token"])
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    assert apart_on_kafka.wait_for_state("w", "ended")["reason_code"] == "deregistered"
