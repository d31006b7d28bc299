"""Lost topics and added partitions on a real broker, by the commands of service/recover.md."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from outfitter_proto.bus import connect
from outfitter_proto.names import topics
from support.bus.remaking import add_partitions, remake
from support.checker.verdict import verified_with_replay
from support.kafka.broker import KafkaBroker
from support.managers.process import Manager, ManagerError, serving_on
from support.recipes import commands, run

pytestmark = [pytest.mark.kafka, pytest.mark.slow]


@pytest.fixture
def manager(kafka_broker: KafkaBroker, tmp_path: Path) -> Iterator[Manager]:
    """A manager of a host with three devices, on four topics of its own."""
    with serving_on(kafka_broker, tmp_path / "manager", gpus=3, cluster=KafkaBroker.new_cluster()) as manager:
        yield manager


def register(manager: Manager, worker: str) -> dict[str, Any]:
    """A worker without a lease that has its device."""
    done = manager.outfitter("register", "--worker", worker, "--lease", "none", "--wait", "30", "--json")
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def refused_of_nobody(manager: Manager, worker: str) -> list[str]:
    """Register at a host without a manager, and wait for the dead letter. The workers of all letters."""
    manager.outfitter("register", "--host", "nobody", "--worker", worker, "--lease", "none")

    def workers() -> list[str]:
        letters = manager.outfitter("dead-letters", "--json").stdout.splitlines()
        return [json.loads(json.loads(letter)["text"])["worker"] for letter in letters]

    manager.wait_for(lambda: worker in workers())
    return workers()


def held(manager: Manager) -> dict[str, list[str]]:
    return {
        record["worker"]: [info["id"] for info in record["resources"]["gpu"]]
        for record in manager.records()
        if record["state"] == "allocated"
    }


def refused(manager: Manager, *arguments: str) -> str:
    """What a manager says that does not start."""
    with pytest.raises(ManagerError, match="ended with 1 before it was ready") as error:
        manager.start(*arguments)
    return str(error.value)


async def _remake(manager: Manager, *names: str) -> None:
    async with connect(manager.bus_url) as bus:
        await remake(bus, manager.cluster, names)


def test_a_ledger_that_was_lost_is_restored_and_what_was_asked_since_is_answered(manager: Manager) -> None:
    register(manager, "w1")
    assert refused_of_nobody(manager, "x1") == ["x1"]
    run(manager, commands("Back up")[0])
    token = register(manager, "today")["token"]
    manager.stop()
    anyio.run(_remake, manager, topics(manager.cluster).allocations)
    assert "holds nothing of it: the topic was recreated, or restored without it" in refused(manager)
    *before, last = commands("The ledger is lost")
    for command in before:
        run(manager, command)
    assert "was restored from a backup of 20" in refused(manager)
    run(manager, last)
    # the registrations' topic is still there, and is read on where the backup ends
    record = manager.wait_for_state("today", "allocated")
    assert record["token"] > 2**32 > token
    assert held(manager) == {"w1": ["GPU-0"], "today": ["GPU-1"]}
    assert refused_of_nobody(manager, "x2") == ["x1", "x2"]
    manager.stop()
    verdict = manager.outfitter("verify")
    assert verdict.returncode == 0, verdict.stdout


def test_a_ledger_that_was_lost_without_a_backup_begins_anew(manager: Manager) -> None:
    register(manager, "w1")
    manager.outfitter("deregister", "--worker", "w1")
    manager.wait_for_state("w1", "ended")
    for command in commands("The ledger is lost"):
        if command[:2] != ["outfitter", "restore"]:
            run(manager, command)
    assert register(manager, "w2")["token"] > 0
    verified_with_replay(manager)


def test_history_that_was_lost_while_nobody_served_begins_with_a_snapshot(manager: Manager) -> None:
    register(manager, "w1")
    history = topics(manager.cluster).history
    manager.stop()
    anyio.run(_delete, manager, history)
    [create] = commands("History is lost")
    assert f"{history}: (topic) is missing" in refused(manager)
    assert history in run(manager, create)
    manager.start()
    register(manager, "w2")
    verified_with_replay(manager)


async def _delete(manager: Manager, name: str) -> None:
    from aiokafka.admin import AIOKafkaAdminClient

    admin = AIOKafkaAdminClient(bootstrap_servers=manager.bus_url.removeprefix("kafka://"))
    await admin.start()
    await admin.delete_topics([name])
    await admin.close()
    async with connect(manager.bus_url) as bus:
        with anyio.fail_after(20):
            while await bus.layouts([name]):  # noqa: ASYNC110 - it tells nobody
                await anyio.sleep(0.05)


def test_added_partitions_are_mended_and_workers_go_on(manager: Manager) -> None:
    runner = manager.popen("run", "--worker", "w1", "--", "sleep", "600", start_new_session=True)
    try:
        before = [info["id"] for info in manager.wait_for_state("w1", "allocated")["resources"]["gpu"]]

        async def add() -> None:
            async with connect(manager.bus_url) as bus:
                await add_partitions(bus, manager.cluster, 24)

        manager.stop()
        anyio.run(add)
        assert "into a new ledger with 24 partitions" in refused(manager)
        assert "--adopt-ledger" not in manager.outfitter("topics", "check").stdout
        copy = KafkaBroker.new_cluster()
        for words in commands("A wrong number of partitions"):
            if words[0] == "outfitter":  # and not `systemctl stop outfitter`
                words[1:] = [manager.cluster if word == "outfitter" else word for word in words[1:]]
            run(manager, words, **{"outfitter-copy": copy})
        assert held(manager) == {"w1": before}
        assert "must be" not in manager.outfitter("topics", "check").stdout
    finally:
        os.killpg(runner.pid, signal.SIGKILL)
        runner.communicate()
    manager.wait_for_state("w1", "ended")
