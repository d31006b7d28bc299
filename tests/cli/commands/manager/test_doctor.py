"""`outfitter doctor`: it finds what is wrong, says the remedy, and no check stops another."""

from __future__ import annotations

import json
import os
import resource
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outfitter_service.cli._lib.diagnosis import checks
from outfitter_service.cli._lib.diagnosis.checks import Finding, Machine, Verdict
from outfitter_service.cli._lib.diagnosis.examination import examine
from support.kafka.broker import KafkaBroker
from support.processes.command_line import outfitter

NOWHERE = Machine(config=None, given={})


def doctor(folder: Path, text: str) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    """The exit code, and the findings by check."""
    (folder / "outfitter.toml").write_text(text)
    done = outfitter("doctor", "--config", "outfitter.toml", "--json", cwd=folder)
    return done.returncode, {item["check"]: item["findings"] for item in json.loads(done.stdout)["checks"]}


def test_all_is_well_on_a_bus_with_topics(tmp_path: Path) -> None:
    bus = f"sqlite:///{tmp_path}/bus/bus.db"
    assert outfitter("topics", "create", "--bus", bus, cwd=tmp_path).returncode == 0
    code, found = doctor(tmp_path, f'bus = "{bus}"\n')
    assert (code, found["configuration"], found["topics"], found["pidfd"]) == (0, [], [], [])


def test_a_bus_that_is_not_there_is_not_checked_and_not_made(tmp_path: Path) -> None:
    code, found = doctor(tmp_path, f'bus = "sqlite:///{tmp_path}/bus/bus.db"\n')
    assert (code, found["topics"][0]["verdict"]) == (0, "not checked")
    assert not (tmp_path / "bus").exists()


def test_a_broker_that_refuses_is_a_problem(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        code, found = doctor(tmp_path, f'bus = "kafka://127.0.0.1:{taken.getsockname()[1]}"\n')
    assert (code, found["topics"][0]["verdict"], found["pidfd"]) == (1, "problem", [])


def test_a_wrong_setting_is_a_problem_with_its_key(tmp_path: Path) -> None:
    code, found = doctor(tmp_path, f'bus = "sqlite:///{tmp_path}/bus/bus.db"\nhtpp = "x"\n')
    assert found["configuration"][0]["seen"].startswith("htpp"), (code, found)


def test_a_check_that_fails_or_never_ends_stops_no_other() -> None:
    def never(_machine: Machine) -> Iterator[Finding]:
        threading.Event().wait()
        yield Finding(Verdict.OK, "", "")

    def fails(_machine: Machine) -> Iterator[Finding]:
        raise OSError("no such thing")
        yield

    def well(_machine: Machine) -> Iterator[Finding]:
        return
        yield

    found = examine([never, fails, well], NOWHERE, within=1.0)
    assert [item.verdict for item in found["never"]] == [Verdict.PROBLEM]
    assert found["fails"][0].seen == "no such thing"
    assert found["well"] == []


@pytest.mark.parametrize(
    ("limit", "verdicts"), [(64, [Verdict.PROBLEM]), (1_024, [Verdict.WARNING]), (4_096, []), (-1, [])]
)
def test_a_low_limit_of_open_files_is_found(
    monkeypatch: pytest.MonkeyPatch, limit: int, verdicts: list[Verdict]
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (limit, limit))
    assert [item.verdict for item in checks.descriptors(NOWHERE)] == verdicts


def test_a_kernel_without_pidfd_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_pid: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    assert list(checks.pidfd(NOWHERE)) == []
    monkeypatch.setattr(os, "pidfd_open", refuse)
    assert [item.verdict for item in checks.pidfd(NOWHERE)] == [Verdict.WARNING]


def test_a_proc_that_hides_others_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(checks.processes(NOWHERE)) == []
    monkeypatch.setattr("outfitter_service.runtime.liveness.process_table.start_seen", lambda _pid: None)
    assert [item.verdict for item in checks.processes(NOWHERE)] == [Verdict.WARNING]


@pytest.mark.kafka
def test_missing_topics_on_a_broker_are_problems_until_they_are_made(kafka_broker: KafkaBroker, tmp_path: Path) -> None:
    cluster = kafka_broker.new_cluster()
    text = f'bus = "{kafka_broker.url}"\ncluster = "{cluster}"\n'
    code, found = doctor(tmp_path, text)
    assert (code, {item["verdict"] for item in found["topics"]}) == (1, {"problem"})
    done = outfitter("topics", "create", "--bus", kafka_broker.url, "--cluster", cluster, cwd=tmp_path)
    assert done.returncode == 0
    assert not [item for item in doctor(tmp_path, text)[1]["topics"] if item["verdict"] == "problem"]
