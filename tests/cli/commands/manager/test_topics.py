"""`outfitter topics create` and `check`."""

from __future__ import annotations

import json
import sqlite3
import subprocess
from pathlib import Path

import pytest

from outfitter_proto import names
from outfitter_proto import topics as wanted
from outfitter_proto.bus import TopicSpec, connect
from outfitter_proto.partitioning import partition_of
from outfitter_service.cli.commands.manager.topics import make
from outfitter_service.config import BusConnection
from outfitter_service.query.errors import OutfitterCliError
from support.bus.faulty_bus import FaultyBus
from support.bus.remaking import add_partitions, remake
from support.kafka.broker import KafkaBroker
from support.managers.process import OUTFITTER, Manager, ManagerError, environment, files_config, serving_on

pytestmark = pytest.mark.slow


def topics(bus: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*OUTFITTER, "topics", *arguments, "--bus", bus], env=environment(), capture_output=True, text=True, timeout=100
    )


@pytest.fixture
def bus(tmp_path: Path) -> str:
    return f"sqlite://{tmp_path}/bus.db?synchronous=NORMAL"


def test_created_topics_are_as_they_must_be(bus: str) -> None:
    assert topics(bus, "check").returncode == 1
    done = topics(bus, "create", "--partitions", "3", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == {
        "created": [*names.topics(), names.managers_topic("outfitter"), names.control_topic("outfitter")],
        "differences": [],
    }
    done = topics(bus, "check", "--json")
    assert (done.returncode, json.loads(done.stdout)) == (0, {"ok": True, "differences": []})
    assert topics(bus, "create").stdout == ""


def test_missing_topics_are_said_to_be_missing(bus: str) -> None:
    done = topics(bus, "check", "--json", "--cluster", "prod")
    assert done.returncode == 1
    told = json.loads(done.stdout)
    assert not told["ok"]
    optional = [names.managers_topic("prod"), names.control_topic("prod")]
    assert {item["topic"] for item in told["differences"]} == {*names.topics("prod"), *optional}
    assert all(item["found"] == "missing" for item in told["differences"])
    assert [item["topic"] for item in told["differences"] if not item["fatal"]] == optional
    assert "outfitter topics create" in topics(bus, "check").stdout


async def test_new_topics_get_as_many_partitions_as_those_that_are_there(bus: str) -> None:
    async with connect(bus) as opened:
        await opened.create_topics([TopicSpec(names.topics().allocations, 5, {"cleanup.policy": "compact"})])
    done = topics(bus, "create", "--partitions", "4")
    assert (done.returncode, done.stdout) == (1, "")
    assert "has 5 partitions already" in done.stderr
    topics(bus, "create")
    async with connect(bus) as opened:
        assert [(await opened.topic(name)).partitions for name in names.topics()] == [5] * 4


async def test_topics_that_a_manager_makes_meanwhile_with_another_number_of_partitions_are_told(bus: str) -> None:
    where = BusConnection(bus=bus, host="a", cluster=names.DEFAULT_CLUSTER)

    async def overtaken(point: str) -> None:
        if point == "create_topics:before":
            async with connect(bus) as managers:
                await wanted.create(managers, names.DEFAULT_CLUSTER, partitions=1)

    async with FaultyBus(bus, overtaken) as opened:
        with pytest.raises(OutfitterCliError, match="has 1 partitions already"):
            await make(opened, where, 4, None)
        assert await make(opened, where, 1, None) == ([], [])


async def test_a_manager_gives_the_topics_it_makes_as_many_partitions_as_those_that_are_there(
    bus: str, tmp_path: Path
) -> None:
    """History was off when the topics were made; with another number nobody could use the file any more."""
    async with connect(bus) as opened:
        await wanted.create(opened, names.DEFAULT_CLUSTER, partitions=4, history=False)
    manager = Manager(tmp_path, "", bus=bus)
    try:
        manager.start()
    finally:
        manager.kill9()
    async with connect(bus) as opened:
        assert (await opened.topic(names.topics().history)).partitions == 4


async def test_a_ledger_that_would_evaporate_is_told_with_the_reason(bus: str) -> None:
    async with connect(bus) as opened:
        await opened.create_topics([TopicSpec(names.topics().allocations, 1, {"cleanup.policy": "delete"})])
    done = topics(bus, "create")
    assert done.returncode == 1
    assert "every grant would be lost in time" in done.stderr
    done = topics(bus, "check")
    assert done.returncode == 1
    headline, why, remedy = done.stdout.splitlines()
    assert headline == f"{names.topics().allocations}: cleanup.policy is delete, must be compact"
    assert "every grant would be lost in time" in why
    assert "begin with another file" in remedy


async def test_a_warning_says_what_should_be_and_comes_after_what_must_be(bus: str) -> None:
    wanted = names.topics()
    async with connect(bus) as opened:
        await opened.create_topics(
            [
                TopicSpec(wanted.registrations, 1, {"cleanup.policy": "delete", "retention.ms": "1000"}),
                TopicSpec(wanted.allocations, 1, {"cleanup.policy": "compact", "delete.retention.ms": "10"}),
            ]
        )
    topics(bus, "create")
    done = topics(bus, "check")
    assert [line for line in done.stdout.splitlines() if not line.startswith(" ")] == [
        f"{wanted.allocations}: delete.retention.ms is 10, must be at least 86400000",
        f"{wanted.registrations}: retention.ms is 1000, should be at least 604800000",
    ]


@pytest.mark.kafka
def test_on_a_broker_there_are_twelve_partitions_and_the_settings_are_kept(kafka_broker: KafkaBroker) -> None:
    cluster = kafka_broker.new_cluster()
    done = topics(kafka_broker.url, "create", "--cluster", cluster, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["differences"] == []
    done = topics(kafka_broker.url, "create", "--cluster", cluster, "--partitions", "7")
    assert "has 12 partitions already" in done.stderr
    assert topics(kafka_broker.url, "check", "--cluster", cluster).stdout == "ok\n"


def test_the_command_that_added_partitions_says_what_has_taken_its_place(bus: str) -> None:
    for arguments in ([], ["--help"], ["--partitions", "3", "--force"], ["--bus", bus, "--json"]):
        done = topics(bus, "grow", *arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("outfitter: this command is gone: `outfitter backup`, and `outfitter restore`")
        assert done.stderr.endswith('(deploy/README.md, "More partitions")\n')
    assert "grow" not in topics(bus, "--help").stdout


async def test_partitions_that_were_added_without_moving_anything_are_told_by_the_check(
    bus: str, tmp_path: Path
) -> None:
    topics(bus, "create", "--partitions", "2")
    host = next(f"moves-{n}" for n in range(99) if partition_of(f"moves-{n}", 2) != partition_of(f"moves-{n}", 3))
    manager = Manager(tmp_path, files_config(tmp_path / "gpus", gpus=1), bus=bus, host=host)
    manager.start()
    manager.stop()
    async with connect(bus) as opened:
        await add_partitions(opened, "outfitter", 3)
    done = topics(bus, "check")
    assert done.returncode == 1
    assert f"records is those of {host}, must be those of hosts of this one of 3 partitions" in done.stdout
    assert "partitions is 2, must be 3" in done.stdout
    assert "restore the file into a new ledger with 3 partitions" in done.stdout
    with pytest.raises(ManagerError, match="ended with 1"):
        manager.start()
    assert "restore the file into a new ledger with 3 partitions" in manager.log_tail()


@pytest.mark.parametrize(
    ("topic", "told"),
    [
        ("allocations", ("recreated, or restored from a copy: grants may be missing", "--adopt-ledger")),
        ("registrations", ("the registrations topic was recreated: unanswered registrations are lost",)),
    ],
)
def test_a_topic_that_was_made_anew_is_told_by_the_check(
    bus: str, tmp_path: Path, topic: str, told: tuple[str, ...]
) -> None:
    manager = Manager(tmp_path, files_config(tmp_path / "gpus", gpus=1), bus=bus)
    manager.start()
    manager.stop()
    assert topics(bus, "check").stdout == "ok\n"
    with sqlite3.connect(tmp_path / "bus.db") as file:
        file.execute("UPDATE topic SET uuid = 'another' WHERE name = ?", (getattr(names.topics(), topic),))
    done = topics(bus, "check")
    assert done.returncode == 1
    assert all(words in done.stdout for words in told), done.stdout


@pytest.mark.kafka
@pytest.mark.parametrize("remade", ["the ledger", "all"])
async def test_a_ledger_that_was_recreated_while_nobody_served_is_told_by_the_check_as_by_the_start(
    kafka_broker: KafkaBroker, tmp_path: Path, remade: str
) -> None:
    cluster = kafka_broker.new_cluster()
    with serving_on(kafka_broker, tmp_path / "manager", cluster=cluster, partitions=2) as manager:
        manager.stop()
        assert manager.outfitter("topics", "check").stdout == "ok\n"
        all_topics = names.topics(cluster)
        async with connect(kafka_broker.url) as opened:
            await remake(opened, cluster, [all_topics.allocations] if remade == "the ledger" else all_topics)
        done = manager.outfitter("topics", "check")
        assert done.returncode == 1
        assert "the topic was recreated, or restored without its records" in done.stdout
        assert "--adopt-ledger" in done.stdout
        elsewhere = manager.outfitter("topics", "check", env={"OUTFITTER_HOST": "elsewhere"})
        # nothing but the bus's memory of the host's writer is left of all topics, and another host does not ask for it
        assert elsewhere.returncode == (1 if remade == "the ledger" else 0), elsewhere.stdout
        with pytest.raises(ManagerError, match="ended with 1"):
            manager.start()
        assert "the topic was recreated, or restored without" in manager.log_tail()
