"""What one sees of a manager from outside: metrics from zero, probes, and a log that programs can read."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from outfitter_proto.records import AllocationState, ReasonCode
from outfitter_service.metrics import Metrics
from runtime.conftest import Serve
from support.managers.in_process import deregister, heartbeat, register, static
from support.managers.process import StartManager, add_device

ZERO = {
    "outfitter_devices": [
        {"resource": "gpu", "state": state}
        for state in ("free", "held", "cordoned", "unhealthy", "unknown", "held-back")
    ],
    "outfitter_healthy_devices": [{"resource": "gpu"}],
    "outfitter_blocked_devices": [
        {"resource": "gpu", "state": state}
        for state in ("cordoned", "unhealthy", "unknown", "held-back", "used-by-stranger")
    ],
    "outfitter_allocations": [{"resource": "gpu", "state": str(state)} for state in AllocationState],
    "outfitter_pending": [
        {"resource": "gpu", "reason": reason}
        for reason in (
            "busy",
            "cordoned",
            "used-by-stranger",
            "infeasible",
            "placement-not-found",
            "not-reported",
            "driver-failed",
        )
    ],
    "outfitter_allocation_seconds_count": [{"resource": "gpu"}],
    "outfitter_driver_runs_total": [{"resource": "gpu", "call": call} for call in ("inventory", "retrieve", "prepare")],
    "outfitter_driver_failures_total": [{"resource": "gpu", "call": call} for call in ("inventory", "unprepare")],
    "outfitter_driver_seconds_count": [{"resource": "gpu", "call": "inventory"}],
    "outfitter_releases_total": [{"reason": reason} for reason in ("deregistered", "lease-expired", "owner-died")],
    "outfitter_failures_total": [{"reason": str(reason)} for reason in ReasonCode],
    "outfitter_events_total": [
        {"kind": kind} for kind in ("register", "heartbeat", "deregister", "dead-letter", "release-delayed")
    ],
    "outfitter_dead_letters_total": [{}],
    "outfitter_ledger_restore_seconds": [{}],
    "outfitter_ledger_restored_records": [{}],
    "outfitter_ledger_records": [{}],
    "outfitter_input_lag_records": [{}],
    "outfitter_oldest_unanswered_seconds": [{}],
    "outfitter_input_lost_total": [{}],
    "outfitter_signs_of_life_total": [{"outcome": outcome} for outcome in ("ok", "lost")],
    "outfitter_commits_total": [{"outcome": outcome} for outcome in ("ok", "fenced", "unknown", "unavailable")],
    "outfitter_commit_seconds_count": [{}],
    "outfitter_lease_expiries_total": [{}],
    "outfitter_exclusivity_violations_total": [{}],
    "outfitter_ready": [{}],
    "outfitter_descriptors_exhausted": [{}],
    "outfitter_log_lines_dropped_total": [{}],
}
"""Every metric that operators are promised, and some of its labels."""


@pytest.mark.parametrize("name", ZERO)
def test_every_metric_is_there_from_the_start_at_zero(name: str) -> None:
    metrics = Metrics(["gpu"])
    metrics.show(lambda: None)
    for labels in ZERO[name]:
        assert metrics.registry.get_sample_value(name, labels) == 0, f"{name}{labels}"


async def test_metrics_move_with_what_happens(serve: Serve) -> None:
    async with serve(static(2)) as in_process:
        await in_process.say(
            register("a", gpu=1),
            register("b", gpu=1),
            register("c", gpu=1),
            register("d", fpga=1),
            heartbeat("a"),
            heartbeat("nobody"),
            deregister("a"),
            deregister("c"),
            register("e", gpu=1, lease_s=0.1),
        )
        await in_process.state("e", "ended")
        await in_process.reported()
        for name, labels, value in [
            ("outfitter_events_total", {"kind": "register"}, 5),
            ("outfitter_events_total", {"kind": "heartbeat"}, 2),
            ("outfitter_events_total", {"kind": "deregister"}, 2),
            ("outfitter_dead_letters_total", {}, 1),
            ("outfitter_grants_total", {"resource": "gpu"}, 4),
            ("outfitter_allocation_seconds_count", {"resource": "gpu"}, 4),
            ("outfitter_failures_total", {"reason": "unknown-resource"}, 1),
            ("outfitter_releases_total", {"reason": "deregistered"}, 2),
            ("outfitter_releases_total", {"reason": "lease-expired"}, 1),
            ("outfitter_lease_expiries_total", {}, 1),
            ("outfitter_driver_runs_total", {"resource": "gpu", "call": "inventory"}, 1),
            ("outfitter_driver_seconds_count", {"resource": "gpu", "call": "inventory"}, 1),
            ("outfitter_exclusivity_violations_total", {}, 0),
            ("outfitter_partition_ready", {"partition": "0"}, 1),
            ("outfitter_signs_of_life_total", {"outcome": "lost"}, 0),
        ]:
            assert in_process.metric(name, **labels) == value, f"{name}{labels}"
        assert in_process.metric("outfitter_commits_total", outcome="ok") >= 2
        assert in_process.metric("outfitter_commit_seconds_count") >= 2
        assert in_process.metric("outfitter_allocation_seconds_sum", resource="gpu") < 20


def test_probes_and_metrics_over_http(start_manager: StartManager) -> None:
    manager = start_manager(gpus=2)
    add_device(manager.folder / "gpus", 1, model="A100")
    assert manager._get("/livez") == (200, "ok\n")
    assert manager._get("/readyz") == (200, "ok\n")
    assert manager._get("/nothing")[0] == 404
    manager.wait_for(lambda: manager.metric("outfitter_devices", resource="gpu", state="free") == 2)
    assert manager.outfitter("register", "--worker", "w", "--resource", "gpu=1", "--wait", "20").returncode == 0
    manager.wait_for(lambda: manager.metric("outfitter_devices", resource="gpu", state="held") == 1)
    manager.wait_for(lambda: 'model="A100"' in manager.metrics())
    assert manager.metric("outfitter_healthy_devices", resource="gpu") == 2
    add_device(manager.folder / "gpus", 0, health="unhealthy")
    add_device(manager.folder / "gpus", 1, model="A100", health="unhealthy")
    manager.wait_for(lambda: manager.metric("outfitter_blocked_devices", resource="gpu", state="unhealthy") == 2)
    assert manager.metric("outfitter_devices", resource="gpu", state="unhealthy") == 1
    add_device(manager.folder / "gpus", 0)
    add_device(manager.folder / "gpus", 1, model="A100")
    manager.wait_for(lambda: manager.metric("outfitter_healthy_devices", resource="gpu") == 2)
    assert manager.metric("outfitter_devices_of_model", resource="gpu", model="A100", state="free") == 1
    assert manager.metric("outfitter_allocations", resource="gpu", state="allocated") == 1
    assert manager.metric("outfitter_allocations", resource="gpu", state="pending") == 0
    assert manager.outfitter("register", "--worker", "x", "--resource", "gpu=2").returncode == 0
    manager.wait_for(lambda: manager.metric("outfitter_pending", reason="busy") == 1)
    body = manager.metrics()
    assert re.search(r"^# HELP outfitter_devices ", body, re.MULTILINE)


def test_a_manager_that_waits_for_its_bus_is_alive_and_not_ready_and_says_why(start_manager: StartManager) -> None:
    manager = start_manager(bus="kafka://127.0.0.1:1", ready=False)
    manager.wait_for(manager.listens)
    assert manager._get("/livez")[0] == 200
    status, body = manager._get("/readyz")
    assert status == 503
    assert "reaching the bus" in body
    assert manager.metric("outfitter_ready") == 0


def lines(manager: Any) -> list[dict[str, Any]]:
    found = [line for line in manager.log.read_text().splitlines() if not line.startswith("outfitter: ")]
    return [json.loads(line) for line in found]


def test_the_log_is_json_and_each_line_about_a_worker_says_which(start_manager: StartManager) -> None:
    manager = start_manager(arguments=["--log-format", "auto"])
    assert manager.outfitter("register", "--worker", "w", "--resource", "gpu=1", "--wait", "20").returncode == 0
    assert manager.outfitter("register", "--worker", "x", "--resource", "gpu=9", "--wait", "20").returncode == 1
    assert manager.outfitter("deregister", "--worker", "w").returncode == 0
    assert manager.outfitter("deregister", "--worker", "w", "--incarnation", "nobody").returncode in {0, 1}
    manager.wait_for(lambda: manager.metric("outfitter_releases_total", reason="deregistered") == 1)
    assert manager.stop() == 0
    said = lines(manager)
    for line in said:
        assert {"event", "level", "timestamp", "logger"} <= line.keys()
        if line["event"] in {"allocated", "failed", "ended", "pending"} or "worker" in line:
            assert line["host"] == manager.host
            assert line["worker"] in {"w", "x"}
            assert line["incarnation"]
    assert {"allocated", "failed", "ended"} <= {line["event"] for line in said}


async def test_a_dead_letter_about_a_worker_says_which_in_the_log(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serve(static()) as in_process:
        await in_process.say(heartbeat("ghost", "i-7"))
        await in_process.dead_letters(1)
        await in_process.say(register("next", gpu=1))
        await in_process.state("next", "allocated")
    [line] = [line for line in capsys.readouterr().out.splitlines() if "dead letter" in line]
    for words in ("worker=ghost", "incarnation=i-7", "host=h", "not registered"):
        assert words in line
