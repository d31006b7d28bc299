"""Topics to which version 0.2 has added partitions (record_grown.py): served as they are, or refused where it stopped.

Of both hosts `w1` has the device. `w3` had registered and deregistered, which no manager had read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from support.managers import recorded
from support.managers.process import Manager, ManagerError
from support.managers.recorded import Make

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # each may wait for the others

GROWN = Path(__file__).parent / "grown"
HOSTS = ("h1", "h0")


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes a manager of this version: `make(host, bus)`."""
    with recorded.in_turn(GROWN / "0.2.0-backup.gz"), recorded.managers(tmp_path) as manager:
        yield partial(manager, gpus=1)


def unpacked(name: str, folder: Path) -> Path:
    """The bus of a recorded file."""
    return recorded.unpacked(GROWN / f"0.2.0-{name}.db.gz", folder)


def state(manager: Manager, worker: str) -> str:
    """The state of the host's worker."""
    return next(
        str(each["state"]) for each in manager.records() if (each["host"], each["worker"]) == (manager.host, worker)
    )


def is_served(manager: Manager, *arguments: str) -> None:
    """`w1` still has the device, what was not read is answered, and the next worker gets the device after `w1`."""
    manager.start(*arguments)
    assert state(manager, "w1") == "allocated"
    done = manager.outfitter("deregister", "--worker", "w1")
    assert done.returncode == 0, done.stderr
    done = manager.outfitter("register", "--worker", "next", "--lease", "none", "--wait", "30")
    assert done.returncode == 0, done.stderr
    manager.stop()


def test_topics_that_were_grown_to_the_end_are_served_and_the_checker_says_what_it_did_not_look_at(
    make: Make, tmp_path: Path
) -> None:
    bus = unpacked("grown", tmp_path)
    managers = [make(host, bus) for host in HOSTS]
    for manager in managers:
        is_served(manager)
        assert state(manager, "w3") == "ended"
    assert managers[0].outfitter("topics", "check").returncode == 0
    done = managers[0].outfitter("verify", "--json")
    assert done.returncode == 0, done.stdout
    partial = [each for check in json.loads(done.stdout)["checks"] for each in check["partial"]]
    assert any("not looked at before outfitter.registrations/1/" in str(each) for each in partial), partial


def test_topics_that_were_grown_in_part_are_refused_with_the_command_that_ends_it(make: Make, tmp_path: Path) -> None:
    manager = make(HOSTS[0], unpacked("half-moved", tmp_path))
    for arguments in ([], ["--adopt-ledger"], ["--take-over"]):
        with pytest.raises(ManagerError, match=r"finish it with version 0\.2 \(`outfitter topics grow`"):
            manager.start(*arguments)
    for command in (["backup", "--out", "b.gz"], ["topics", "check"]):
        done = manager.outfitter(*command)
        assert done.returncode == 1
        assert "finish it with version 0.2 (`outfitter topics grow`" in done.stdout + done.stderr


@pytest.mark.parametrize("partitions", [1, 2, 5])
def test_a_backup_of_version_0_2_goes_into_any_number_of_partitions(
    make: Make, tmp_path: Path, partitions: int
) -> None:
    bus = tmp_path / "bus" / "bus.db"
    managers = [make(host, bus) for host in HOSTS]
    assert managers[0].outfitter("topics", "create", "--partitions", str(partitions)).returncode == 0
    done = managers[0].outfitter("restore", str(GROWN / "0.2.0-backup.gz"))
    assert done.returncode == 0, done.stderr
    assert f"in {partitions} partitions; 0 registrations sent again" in done.stdout
    for manager in managers:
        is_served(manager, "--adopt-ledger")
    done = managers[0].outfitter("verify")
    assert done.returncode == 0, done.stdout
