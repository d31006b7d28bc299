"""The real broker that the other tests stand on."""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from support.kafka.broker import LAUNCHER, Broker, BrokerError, KafkaBroker, answers, shared_broker

CACHE = LAUNCHER.parents[2] / ".cache" / "kafka"


def test_the_shared_broker_answers(kafka_broker: KafkaBroker) -> None:
    assert answers(kafka_broker.bootstrap)


def test_a_broker_starts_with_its_classes_from_an_archive(own_broker: Broker) -> None:
    """Without it a start takes the processor twice as long, and the tests start some dozens of brokers."""
    mapped = {line.split(maxsplit=5)[-1] for line in Path(f"/proc/{own_broker.pid}/maps").read_text().splitlines()}
    assert any(name.endswith(".jsa") and CACHE in Path(name).parents for name in mapped)


def test_a_broker_that_never_answers_ends_the_launcher_which_names_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = {
        "mvn": "exit 0",
        "java": f'case "$*" in *StorageTool*) exit 0;; esac\necho stuck; echo $$ > {tmp_path}/pid; exec sleep 1000',
    }
    for name, script in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    spec = importlib.util.spec_from_file_location("local_kafka", LAUNCHER)
    assert spec is not None
    assert spec.loader is not None
    launcher = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(launcher)
    monkeypatch.setattr(launcher, "CACHE", tmp_path)
    pid = tmp_path / "pid"
    first = iter([0.0])

    def now() -> float:
        """Time passes once the deadline is set and the broker runs."""
        return next(first, 1e9 if pid.exists() and pid.read_text() else 0.0)

    monkeypatch.setattr(launcher, "time", SimpleNamespace(monotonic=now, sleep=time.sleep))
    with pytest.raises(
        SystemExit, match=r"not answered for 120 s .*Its log is (\S+): .* run the same command again"
    ) as end:
        launcher.archive()
    [log] = tmp_path.glob("lib-*.log")
    assert str(log) in str(end.value)
    assert str(end.value).endswith("stuck\n")
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


async def test_a_killed_broker_comes_back_at_the_same_address(own_broker: Broker) -> None:
    own_broker.kill9()
    assert not answers(own_broker.bootstrap)
    await own_broker.restarted()
    assert answers(own_broker.bootstrap)


def test_a_broker_that_cannot_start_fails_with_the_tail_of_its_log(tmp_path: Path) -> None:
    broker = Broker(tmp_path, {"log.retention.ms": "not-a-number"})
    with pytest.raises(BrokerError, match=r"log\.retention\.ms"):
        broker.start()


def test_a_second_user_gets_the_running_broker_and_the_last_one_ends_it(tmp_path: Path) -> None:
    with shared_broker(tmp_path) as first:
        assert isinstance(first, Broker)
        with shared_broker(tmp_path) as second:
            assert second.bootstrap == first.bootstrap
        pid = first.pid
    assert not answers(first.bootstrap)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
