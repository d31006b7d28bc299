"""Which managers take part in sweeping, and what they make of those that are silent."""

from __future__ import annotations

import itertools
import random
from datetime import UTC, datetime, timedelta
from pathlib import Path

import anyio
import pytest
import structlog
from msgspec import UNSET, structs

from outfitter_proto.bus import Entry
from outfitter_proto.codec import encode
from outfitter_proto.keys import host_key, host_writer
from outfitter_proto.partitioning import murmur2
from outfitter_service.config import load
from outfitter_service.metrics import Metrics
from outfitter_service.runtime.identity import host_identity
from outfitter_service.runtime.instruments import Instruments
from outfitter_service.runtime.manager.service import Service
from outfitter_service.runtime.sweeper import group_member as sweeper_module
from outfitter_service.runtime.sweeper.group_member import CANDIDATES, SweeperMember, at_work, is_candidate
from runtime.sweeper.conftest import WITHIN_S, say
from support.bus.faulty_bus import FaultyBus
from support.managers.in_process import (
    CLUSTER,
    TOPICS,
    register,
    static,
)
from support.wire_samples import SAMPLES

NOW = SAMPLES["checkpoint"].at


def neighbours(*hosts: str, stopped: bool = False, at: datetime = NOW) -> dict[bytes, bytes]:
    """The ledger's records of `hosts`, whose managers committed last `at` that time."""
    record, last = SAMPLES["host"], SAMPLES["checkpoint"]
    manager = type(record.manager)(
        instance="i", version="0", since=record.since, stopped_at=record.since if stopped else None, pid_ns=UNSET
    )
    found: dict[bytes, bytes] = {}
    for host in hosts:
        found[host_key(host).encode()] = encode(type(record)(host=host, manager=manager, since=record.since))
        checkpoint = structs.replace(last, writer=host_writer(host), at=at)
        found[checkpoint.key.encode()] = encode(checkpoint)
    return found


def test_all_managers_of_a_small_cluster_and_some_of_a_large_one_take_part_in_sweeping() -> None:
    few = [f"h{n}" for n in range(CANDIDATES)]
    assert all(is_candidate(host, [other for other in few if other != host]) for host in few)
    many = [f"h{n}" for n in range(100)]
    chosen = {host for host in many if is_candidate(host, [other for other in many if other != host])}
    assert chosen == set(sorted(many, key=lambda host: murmur2(host.encode()))[:CANDIDATES])


def test_managers_that_stopped_or_are_silent_are_not_counted_on_for_the_sweeping() -> None:
    before = NOW - timedelta(hours=1)
    known = {
        **neighbours("works"),
        **neighbours("stopped", stopped=True),
        **neighbours("silent", at=before),
        host_key("damaged").encode(): b"{",
        host_key("arriving").encode(): neighbours("arriving")[host_key("arriving").encode()],
        b"@checkpoint/sweeper/0": b"{}",
    }
    assert at_work(known, since=before) == ["works"]


async def test_those_who_need_not_sweep_do_it_by_turns_for_the_others_may_have_died(
    made: FaultyBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = sorted((f"h{n}" for n in range(100)), key=lambda host: murmur2(host.encode()))
    host = others.pop()
    drawn: list[float] = []
    lots = itertools.cycle([0.99, 0.5, 0.0])

    def draw() -> float:
        drawn.append(next(lots))
        return drawn[-1]

    monkeypatch.setattr(random, "random", draw)
    monkeypatch.setattr(sweeper_module, "TURN_S", 0.5)
    metrics = Metrics()
    sweeper = SweeperMember(
        made, partitions=1, identity=host_identity(CLUSTER, host), instruments=Instruments.of(metrics),
        grace_s=0.0, session_s=2.0, heartbeat_s=0.1,
    )  # fmt: skip
    await say(made, register("w"), None)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sweeper.run_by_turns, others)
        with anyio.fail_after(WITHIN_S):
            while not metrics.registry.get_sample_value("outfitter_swept_partitions"):  # noqa: ASYNC110  (told by nobody)
                await anyio.sleep(0.02)
            assert drawn[:3] == [0.99, 0.5, 0.0]
            while metrics.registry.get_sample_value("outfitter_swept_partitions"):  # noqa: ASYNC110
                await anyio.sleep(0.02)
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("silent", [False, True])
async def test_a_manager_leaves_the_sweeping_to_others_only_while_they_are_heard_of(
    made: FaultyBus, url: str, tmp_path: Path, silent: bool
) -> None:
    host, *others = sorted((f"h{n}" for n in range(20)), key=lambda host: murmur2(host.encode()), reverse=True)
    path = tmp_path / "outfitter.toml"
    path.write_text(f'bus = "{url}"\ncluster = "{CLUSTER}"\nhost = "{host}"\nhttp = "127.0.0.1:0"\n{static(1)}')
    manager = Service(load(path, environment={}))
    interval = timedelta(seconds=manager.settings.checkpoint_interval)
    now = datetime.now(UTC)
    for key, value in neighbours(*others, at=now - 3 * interval if silent else now + interval).items():
        await made.publish(TOPICS.allocations, 0, Entry(key, value))
    with structlog.testing.capture_logs() as lines:

        def leaves_it() -> bool:
            return any(line["event"].startswith("other managers sweep") for line in lines)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(manager.run)
            with anyio.fail_after(WITHIN_S):
                while not leaves_it() and not manager.metrics.registry.get_sample_value("outfitter_swept_partitions"):  # noqa: ASYNC110
                    await anyio.sleep(0.02)
            manager.stop()
        assert leaves_it() != silent
