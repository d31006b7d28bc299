"""`outfitter register` and `outfitter deregister`, from outside; register.txt has what they print."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from outfitter_proto import codec
from outfitter_proto.records import Allocation
from support.managers.process import OUTFITTER, Manager, StartManager
from support.transcripts import Scene, scenes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("scene", scenes(Path(__file__).with_name("register.txt")), ids=str)
def test_register(shared_manager: Manager, scene: Scene, tmp_path: Path) -> None:
    scene.play(tmp_path, shared_manager.environment, HOST=shared_manager.host)


def test_it_says_until_when_it_holds(shared_manager: Manager) -> None:
    before = datetime.now(UTC)
    done = shared_manager.outfitter("register", "--worker", "w-json", "--resource", "gpu=1", "--lease", "20", "--json")
    after = datetime.now(UTC)
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert told.keys() == {"host", "worker", "incarnation", "holds_until"}
    assert (told["host"], told["worker"]) == (shared_manager.host, "w-json")
    held = datetime.fromisoformat(told["holds_until"])
    assert 20 <= (held - before).total_seconds() <= 20 + (after - before).total_seconds()
    record = shared_manager.wait_for_state("w-json", "allocated")
    assert record["incarnation"] == told["incarnation"]
    assert record["request"]["owner"] is None
    shared_manager.outfitter("deregister", "--worker", "w-json")


def test_without_a_lease_of_its_own_the_managers_default_counts(shared_manager: Manager) -> None:
    before = datetime.now(UTC)
    patient = (
        "from outfitter_service.cli import main; from outfitter_service.cli.commands.worker import register;"
        "register.LEASE_KNOWN_WITHIN = 60.0; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", patient, "register", "--worker", "w-default", "--json"],
        env=shared_manager.environment, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    told = json.loads(done.stdout)
    assert (datetime.fromisoformat(told["holds_until"]) - before).total_seconds() >= 30
    assert shared_manager.outfitter("deregister", "--worker", "w-default").returncode == 0


def test_with_wait_it_prints_the_record_as_it_stands_on_the_wire(shared_manager: Manager) -> None:
    arguments = [
        "--worker",
        "w-wait",
        "--resource",
        "gpu=2",
        "--operator",
        "infer:gpu=1",
        "--lease",
        "60",
        "--wait",
        "10",
    ]
    done = shared_manager.outfitter("register", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    record = codec.decode_ledger(done.stdout.strip().encode())
    assert isinstance(record, Allocation)
    assert record.state == "allocated"
    assert record.operators["infer"].resources == {"gpu": ["GPU-0"]}
    assert json.loads(done.stdout) == shared_manager.record("w-wait")
    shared_manager.outfitter("deregister", "--worker", "w-wait")
    shared_manager.wait_for_state("w-wait", "ended")


def test_ctrl_c_while_it_waits_withdraws(start_manager: StartManager) -> None:
    manager = start_manager(gpus=1)
    assert manager.outfitter("register", "--worker", "w-has", "--lease", "none", "--wait", "9").returncode == 0
    arguments = [*OUTFITTER, "register", "--worker", "w-stopped", "--lease", "none", "--wait", "60"]
    process = subprocess.Popen(
        arguments, env=manager.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # noqa: PLW1509 - no threads
    )  # fmt: skip
    manager.wait_for_state("w-stopped", "pending")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "")
    manager.wait_for_state("w-stopped", "ended")


def test_what_is_not_heard_from_again_ends_with_its_lease(start_manager: StartManager) -> None:
    manager = start_manager(extra='lease-grace = "100ms"')
    assert manager.outfitter("register", "--worker", "w-short", "--lease", "300ms").returncode == 0
    assert manager.wait_for_state("w-short", "ended")["reason_code"] == "lease-expired"


def test_waiting_for_an_answer_that_nobody_gives_ends_in_words(shared_manager: Manager) -> None:
    done = shared_manager.outfitter("register", "--host", "unserved", "--wait", "200ms", "--json")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no manager" in done.stderr  # the sweeper's words where they came in time, else those of who asked
    assert "host 'unserved'" in done.stderr
    assert shared_manager.host in done.stderr


def test_two_clusters_live_side_by_side_on_one_bus(start_manager: StartManager) -> None:
    prod = start_manager(gpus=1, cluster="prod")
    staging = start_manager(gpus=1, cluster="staging", bus=prod.bus_url)
    for manager in (prod, staging):
        assert manager.outfitter("register", "--worker", "same", "--lease", "none", "--wait", "10").returncode == 0
    prod.outfitter("deregister", "--worker", "same")
    prod.wait_for_state("same", "ended")
    record = staging.record("same")
    assert record is not None
    assert record["state"] == "allocated"
    assert [record["host"] for record in prod.records()] == [prod.host]


def test_deregistering_without_any_answer_ends_in_words(start_manager: StartManager) -> None:
    manager = start_manager()
    assert manager.outfitter("register", "--worker", "w", "--lease", "none", "--wait", "10").returncode == 0
    manager.stop()
    done = manager.outfitter("deregister", "--worker", "w", "--wait", "200ms")
    assert (done.returncode, done.stdout) == (1, "")
    assert "was stopped" in done.stderr
    assert "takes effect when" in done.stderr
    manager.start()
    manager.wait_for_state("w", "ended")


def test_an_older_run_that_still_holds_its_devices_is_named_when_the_current_one_is_deregistered(
    start_manager: StartManager,
) -> None:
    manager = start_manager(gpus=1)
    for _ in range(2):
        assert manager.outfitter("register", "--worker", "w", "--lease", "none").returncode == 0
    manager.wait_for(lambda: sorted(record["state"] for record in manager.records()) == ["allocated", "pending"])
    (older,) = [record for record in manager.records() if record["state"] == "allocated"]
    done = manager.outfitter("deregister", "--worker", "w")
    assert done.returncode == 0
    ending = f"outfitter deregister --worker w --incarnation {older['incarnation']}"
    hint = f"`{ending}` ends it, too; first make sure that nothing uses its devices"
    assert f"an older run of w is still allocated: {hint}" in done.stderr
    assert manager.outfitter(*ending.split()[1:]).returncode == 0
    assert {record["state"] for record in manager.records()} == {"ended"}
