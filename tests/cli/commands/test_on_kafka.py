"""The commands against a manager on a real broker: what differs from the embedded bus is nobody's to notice."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from cli.commands.worker.holding import read_line
from outfitter_proto import topics
from outfitter_proto.bus import TopicSpec, connect
from support.kafka.broker import KafkaBroker
from support.managers.process import Manager, files_config, serving_on

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


def test_two_people_take_a_device_out_and_it_is_lent_when_both_have_ended_that(on_kafka: Manager) -> None:
    words = ("--device", "GPU-0", "--reason", "XID 79", "--author")
    first = on_kafka.outfitter("cordon", on_kafka.host, *words, "ada@ops-1")
    second = on_kafka.outfitter("cordon", on_kafka.host, *words, "bob@ops-2")
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert on_kafka.outfitter("register", "--worker", "w", "--lease", "none").returncode == 0
    on_kafka.wait_for_state("w", "pending")
    ended = on_kafka.outfitter("uncordon", on_kafka.host, "--device", "GPU-0", "--author", "ada@ops-1")
    assert (ended.returncode, ended.stdout) == (0, f"{first.stdout.strip()}  ended\n")
    assert f"still out, by {second.stdout.strip()} (GPU-0) by bob@ops-2: XID 79" in ended.stderr
    [line] = json.loads(on_kafka.outfitter("orders", "--json").stdout)
    assert (line["id"], line["state"]) == (second.stdout.strip(), "in-effect")
    assert on_kafka.outfitter("uncordon", on_kafka.host, "--order", line["id"]).returncode == 0
    on_kafka.wait_for_state("w", "allocated")


def test_a_cluster_without_the_topic_of_orders_is_served_and_takes_none(
    tmp_path: Path, kafka_broker: KafkaBroker
) -> None:
    cluster = kafka_broker.new_cluster()

    async def prepare() -> None:
        async with connect(kafka_broker.url) as bus:
            of = topics.required(cluster)
            await bus.create_topics([TopicSpec(name, 1, {s.name: s.value for s in of[name]}) for name in of])

    anyio.run(prepare)
    manager = Manager(tmp_path, files_config(tmp_path / "gpus"), bus=kafka_broker.url, cluster=cluster)
    manager.start()
    try:
        done = manager.outfitter("cordon", manager.host, "--reason", "XID 79")
        assert (done.returncode, done.stdout) == (1, "")
        assert f"there is no topic '{cluster}.control'; make it with `outfitter topics create`" in done.stderr
        assert manager.outfitter("topics", "create").returncode == 0
        assert manager.outfitter("cordon", manager.host, "--reason", "XID 79").returncode == 0
    finally:
        manager.kill9()
