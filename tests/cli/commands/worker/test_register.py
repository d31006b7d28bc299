"""`outfitter register` and `outfitter deregister`, from outside."""

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
from support.managers.process import OUTFITTER, Manager, StartManager, environment

pytestmark = pytest.mark.slow


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


def test_without_any_lease_it_holds_for_good(shared_manager: Manager) -> None:
    done = shared_manager.outfitter("register", "--worker", "w-for-good", "--lease", "none", "--json")
    assert json.loads(done.stdout)["holds_until"] is None
    shared_manager.outfitter("deregister", "--worker", "w-for-good")
    shared_manager.wait_for_state("w-for-good", "ended")


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


def test_what_is_refused_is_printed_with_exit_code_1(shared_manager: Manager) -> None:
    done = shared_manager.outfitter("register", "--worker", "w-no", "--resource", "gpu=9", "--wait", "10s", "--json")
    assert done.returncode == 1
    record = json.loads(done.stdout)
    assert (record["state"], record["reason_code"]) == ("failed", "infeasible")


def test_what_is_still_pending_by_then_is_deregistered(shared_manager: Manager) -> None:
    assert (
        shared_manager.outfitter("register", "--worker", "w-has", "--resource", "gpu=2", "--wait", "9").returncode == 0
    )
    done = shared_manager.outfitter("register", "--worker", "w-late", "--wait", "300ms", "--json")
    assert done.returncode == 1
    shared_manager.outfitter("deregister", "--worker", "w-has")
    shared_manager.wait_for_state("w-has", "ended")
    record = shared_manager.record("w-late")
    assert record is not None
    assert record["state"] == "ended"


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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--resource", "gpu=0"], "write a whole number, 1 or more"),
        (["--resource", "gpu=-1"], "write a whole number, 1 or more"),
        (["--resource", "gpu=1", "--resource", "gpu=2"], "is given twice"),
        (["--resource", "=1"], "NAME=AMOUNT"),
        (["--operator", "gpu=1"], "OPERATOR:NAME=AMOUNT"),
        (["--worker", "a/b"], "not a valid name"),
        (["--lease", "soon"], "30s"),
        (["--lease", "0"], "lease_s"),
        (["--label", "x"], "KEY=VALUE"),
    ],
)
def test_a_wrong_option_says_what_would_be_right(shared_manager: Manager, arguments: list[str], words: str) -> None:
    done = shared_manager.outfitter("register", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr


def test_deregister_ends_the_current_incarnation_and_takes_the_name_from_the_environment(
    shared_manager: Manager,
) -> None:
    shared_manager.outfitter("register", "--worker", "w-named", "--wait", "9")
    done = shared_manager.outfitter("deregister", "--json", env={"OUTFITTER_WORKER": "w-named"})
    told = json.loads(done.stdout)
    assert (told["host"], told["worker"], told["state"]) == (shared_manager.host, "w-named", "ended")
    assert told["reason"] == "deregistered: by hand"
    shared_manager.wait_for_state("w-named", "ended")


def test_a_run_is_deregistered_in_the_form_in_which_its_registration_was_printed(shared_manager: Manager) -> None:
    done = shared_manager.outfitter("register", "--worker", "w-printed", "--wait", "9")
    key = done.stdout.split()[0]
    assert key.startswith(f"{shared_manager.host}/w-printed/")
    wrong = shared_manager.outfitter("deregister", "--worker", key, "--incarnation", "another")
    assert wrong.returncode == 2
    assert f"--incarnation is another, but the worker is {key}" in wrong.stderr
    done = shared_manager.outfitter("deregister", "--worker", key, env={"OUTFITTER_HOST": "another"})
    assert (done.returncode, done.stdout.split()[:2]) == (0, [key, "ended"]), done.stderr


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


def test_a_cluster_that_is_not_there_is_said_to_be(tmp_path: Path) -> None:
    def outfitter(*arguments: str) -> subprocess.CompletedProcess[str]:
        bus = f"sqlite://{tmp_path}/bus.db"
        return subprocess.run(
            [*OUTFITTER, *arguments, "--bus", bus], env=environment(), capture_output=True, text=True, timeout=60
        )

    assert outfitter("topics", "create").returncode == 0
    done = outfitter("register", "--cluster", "nowhere")
    assert done.returncode == 1
    assert "nowhere.allocations" in done.stderr
    assert "outfitter topics create" in done.stderr
    assert "outfitter serve" in done.stderr


def test_deregistering_a_worker_that_is_not_there_says_so_with_exit_code_1(shared_manager: Manager) -> None:
    done = shared_manager.outfitter("deregister", "--worker", "typo-17")
    assert (done.returncode, done.stdout) == (1, "")
    assert "typo-17" in done.stderr
    assert "not registered here" in done.stderr


def test_deregistering_a_run_that_is_not_there_says_so_with_exit_code_1(shared_manager: Manager) -> None:
    done = shared_manager.outfitter("deregister", "--worker", "typo-18", "--incarnation", "never")
    assert (done.returncode, done.stdout) == (1, "")
    assert "typo-18/never" in done.stderr


def test_deregistering_a_worker_of_which_only_a_run_that_is_not_there_was_named_is_answered(
    shared_manager: Manager,
) -> None:
    shared_manager.outfitter("deregister", "--worker", "typo-20", "--incarnation", "never")
    done = shared_manager.outfitter("deregister", "--worker", "typo-20", "--wait", "1h")
    assert (done.returncode, done.stdout) == (1, "")
    words = f"deregistration of {shared_manager.host}/typo-20, which is not registered here"
    assert done.stderr == f"outfitter: {words}\n"


def test_deregistering_at_a_host_that_is_not_there_says_so_with_exit_code_1(shared_manager: Manager) -> None:
    done = shared_manager.outfitter("deregister", "--worker", "typo-17", "--host", "gpu-77")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no manager answers for host 'gpu-77'" in done.stderr
    assert shared_manager.outfitter("dead-letters", "--host", "gpu-77", "--json").stdout == "", "nothing was sent"


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


def test_without_waiting_a_deregistration_is_sent(shared_manager: Manager) -> None:
    done = shared_manager.outfitter("deregister", "--worker", "typo-19", "--wait", "0")
    assert (done.returncode, done.stderr) == (0, "")
    assert "sent" in done.stdout


def test_deregistering_what_is_over_already_is_no_mistake(shared_manager: Manager) -> None:
    shared_manager.outfitter("register", "--worker", "w-twice", "--wait", "9")
    assert shared_manager.outfitter("deregister", "--worker", "w-twice").returncode == 0
    done = shared_manager.outfitter("deregister", "--worker", "w-twice")
    assert done.returncode == 0
    assert "had ended already" in done.stderr
    assert "ended" in done.stdout


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


def test_a_registration_that_nobody_was_waited_for_is_called_sent(shared_manager: Manager) -> None:
    done = shared_manager.outfitter("register", "--worker", "w-sent", "--lease", "20")
    assert done.returncode == 0
    assert "sent, with a lease until" in done.stdout
    assert "holds" not in done.stdout
    shared_manager.outfitter("deregister", "--worker", "w-sent")
