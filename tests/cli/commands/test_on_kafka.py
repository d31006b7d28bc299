"""The commands against a manager on a real broker: what differs from the embedded bus is nobody's to notice."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.commands.worker.holding import read_line
from support.kafka.broker import KafkaBroker
from support.managers.process import Manager, serving_on

pytestmark = pytest.mark.kafka


@pytest.fixture
def on_kafka(tmp_path: Path, kafka_broker: KafkaBroker) -> Iterator[Manager]:
    with serving_on(kafka_broker, tmp_path / "manager", cluster=kafka_broker.new_cluster()) as manager:
        yield manager


def test_a_killed_run_makes_way_for_the_next(on_kafka: Manager) -> None:
    with on_kafka.popen("run", "--worker", "first", "--", "sh", "-c", "echo ready; exec sleep 1000") as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "ready\n"
        with on_kafka.popen("run", "--worker", "second", "--", "printenv", "CUDA_VISIBLE_DEVICES") as second:
            on_kafka.wait_for_state("second", "pending")
            first.kill()
            out, err = second.communicate(timeout=60)
        first.communicate(timeout=60)
    assert (second.returncode, out) == (0, "GPU-0\n"), err


def test_a_killed_hold_goes_on_with_the_same_devices_and_its_input_gives_them_back(on_kafka: Manager) -> None:
    arguments = ["hold", "--worker", "w", "--incarnation", "run-1"]
    with on_kafka.popen(*arguments, stdin=subprocess.PIPE) as first:
        before = read_line(first)
        first.kill()
        first.communicate(timeout=60)
    with on_kafka.popen(*arguments, stdin=subprocess.PIPE) as second:
        assert read_line(second)["token"] == before["token"]
        _, err = second.communicate(timeout=60)
    assert second.returncode == 0, err
    assert on_kafka.wait_for_state("w", "ended")["reason_code"] == "deregistered"


def test_register_prints_the_record_and_the_others_see_it(on_kafka: Manager) -> None:
    done = on_kafka.outfitter("register", "--worker", "w", "--lease", "none", "--wait", "20", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == on_kafka.record("w")
    (device,) = json.loads(on_kafka.outfitter("devices", "--json").stdout)
    assert [holder["worker"] for holder in device["holders"]] == ["w"]
    assert on_kafka.outfitter("deregister", "--worker", "w").returncode == 0
    on_kafka.wait_for_state("w", "ended")


def test_a_broker_that_is_not_there_is_named(on_kafka: Manager) -> None:
    done = on_kafka.outfitter("status", "--bus", "kafka://127.0.0.1:1", timeout=100)
    assert (done.returncode, done.stdout) == (1, "")
    assert "127.0.0.1:1" in done.stderr
