"""`--where` and `--same` from outside: a real manager, and what it says of who waits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.managers.process import Manager, add_device, files_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

A100, H100 = {"model": "A100", "memory.total_bytes": str(40 * 1024**3)}, {"model": "NVIDIA H100"}


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    """A host with two A100, two H100 in one group, and another one beside."""
    manager = Manager(tmp_path, files_config(tmp_path / "gpus", gpus=1))
    for number, properties in enumerate(
        [A100, {**H100, "group": "x"}, A100, {**H100, "group": "y"}, {**H100, "group": "y"}]
    ):
        add_device(tmp_path / "gpus", number, **properties)
    manager.start()
    try:
        yield manager
    finally:
        manager.kill9()


def test_run_gives_a_command_the_devices_that_it_takes(manager: Manager) -> None:
    for arguments, devices in (
        (["--resource", "gpu=2", "--where", "gpu:model~H100", "--same", "gpu:group"], "GPU-3,GPU-4"),
        (["--resource", "gpu=1", "--where", "gpu:memory.total_bytes=40Gi.."], "GPU-0"),
        (["--resource", "gpu=1", "--where", "gpu:model!~A100,NVIDIA"], None),
    ):
        done = manager.outfitter("run", *arguments, "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
        assert (done.stdout.strip() or None) == devices, done.stderr
    assert "1 gpu with model is not *A100* or *NVIDIA* requested, 0 of 5 discovered are so" in done.stderr


def test_hold_and_register_take_clauses_and_explain_says_what_each_device_is_instead(manager: Manager) -> None:
    choice = ["--resource", "gpu=3", "--where", "gpu:model~H100"]
    for worker in ("holder", "waiter"):
        manager.outfitter("register", "--worker", worker, "--lease", "none", *choice)
    manager.wait_for_state("waiter", "pending")
    done = manager.outfitter("register", "--worker", "other", "--lease", "none", "--wait", "10", "--resource", "gpu=2")
    assert done.returncode == 0, "others pass"
    said = manager.outfitter("explain", "waiter").stdout
    assert "It wants 3 gpu (model is *H100*); 0 of 3 such are free." in said
    assert said.count("is not such: model is A100.") == 2
    [explained] = json.loads(manager.outfitter("explain", "waiter", "--json").stdout)
    assert explained["choices"] == {"gpu": "model is *H100*"}
    assert set(explained["excluded"]["gpu"].values()) == {"model is A100"}
    done = manager.outfitter("hold", "--no-stdin", "--resource", "gpu=1", "--where", "gpu:model=B200")
    assert done.returncode == 125
    assert json.loads(done.stdout)["reason_code"] == "infeasible"


def test_a_wrong_clause_is_refused_with_what_would_be_valid(manager: Manager) -> None:
    done = manager.outfitter("run", "--resource", "gpu=1", "--where", "gpu:memory", "--", "true")
    assert done.returncode == 125
    assert "the shell takes > and < for itself" in done.stderr
