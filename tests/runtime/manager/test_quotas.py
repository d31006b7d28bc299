"""Managers, workers, API and commands on a broker whose quotas hold them back: late, and nothing worse.

A throttled broker answers a fetch at once, without the topics, and then reads nothing from that connection (KIP-219).
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path

import anyio
import pytest

from outfitter_proto import keys, names
from outfitter_proto.bus import Entry, connect
from support.kafka.broker import Broker
from support.kafka.quotas import OF_ALL_CLIENTS, OF_ALL_USERS, set_quotas
from support.managers.api import running
from support.managers.fleet import CONFIG
from support.managers.process import Manager, serving_on

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(600)]

LOOKS = "status", "devices", "history", "dead-letters"
RUNS = 5
LATE_S = 180.0
LEDGER_BYTES, RECORD_BYTES = 3_000_000, 5_000
HELD_BACK = "the broker holds this client back"


@pytest.mark.parametrize(
    ("entity", "quotas"),
    [
        (OF_ALL_CLIENTS, {"request_percentage": 10, "producer_byte_rate": 100_000}),
        (OF_ALL_CLIENTS, {"consumer_byte_rate": 5_000}),
        (OF_ALL_USERS, {"request_percentage": 2}),
        (OF_ALL_CLIENTS, {"producer_byte_rate": 2_000}),
    ],
    ids=["some", "reading", "time", "writing"],
)
def test_quotas_that_hold_everybody_back_end_nobody(
    own_broker: Broker, tmp_path: Path, entity: tuple[str, str | None], quotas: Mapping[str, float]
) -> None:
    with serving_on(own_broker, tmp_path / "manager", gpus=2) as manager, running(tmp_path, own_broker.url) as api:
        manager.wait_for(lambda: api.is_ready)
        set_quotas(own_broker, entity, **quotas)
        for _ in range(RUNS):
            _run(manager)
        for command in LOOKS:
            done = manager.outfitter(command, "--json", timeout=LATE_S)
            assert done.returncode == 0, done.stderr
        verified = manager.outfitter("verify", timeout=LATE_S)
        assert verified.returncode == 0, verified.stdout + verified.stderr
        set_quotas(own_broker, entity, **dict.fromkeys(quotas))
        _run(manager)
        manager.wait_for(lambda: len(api.get("/api/v1/history")[1]["items"]) > RUNS)
        assert manager.stop() == 0
        assert "internal error" not in manager.log_tail()
        assert api.stop() == 0


def test_a_manager_with_a_long_ledger_starts_slowly_under_a_quota_and_says_why(
    own_broker: Broker, tmp_path: Path
) -> None:
    with serving_on(own_broker, tmp_path / "manager", partitions=1) as manager:
        manager.stop()
        anyio.run(_lengthen, own_broker.url, names.topics(manager.cluster).allocations, LEDGER_BYTES)
        set_quotas(own_broker, consumer_byte_rate=100_000)
        manager.start(ready=False)
        manager.wait_for(lambda: HELD_BACK in manager.log_tail(), timeout=LATE_S)
        assert HELD_BACK in manager.readiness()
        manager.wait_for(lambda: manager.readiness() == "ok\n", timeout=LATE_S)
        _run(manager)
        assert manager.log.read_text().count(HELD_BACK) == 1


def test_a_command_waits_as_long_as_a_quota_says_and_says_so_once(own_broker: Broker, tmp_path: Path) -> None:
    with serving_on(own_broker, tmp_path / "manager", partitions=1) as manager:
        _run(manager)
        anyio.run(_lengthen, own_broker.url, names.topics(manager.cluster).allocations, 40_000)
        set_quotas(own_broker, consumer_byte_rate=2_000)
        done = manager.outfitter("status", "--json", timeout=LATE_S)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count(HELD_BACK) == 1


def test_cluster_scope_serves_under_a_quota_and_joins_again(own_broker: Broker, tmp_path: Path) -> None:
    scope = "--scope", "cluster", "--replica", "one"
    with serving_on(own_broker, tmp_path / "manager", config=CONFIG, arguments=scope) as manager:
        set_quotas(own_broker, OF_ALL_USERS, request_percentage=1)
        _run(manager)
        manager.restart(within=LATE_S)
        _run(manager)
        set_quotas(own_broker, OF_ALL_USERS, request_percentage=None)
        assert manager.stop() == 0
        assert "internal error" not in manager.log_tail()


def _run(manager: Manager) -> None:
    done = manager.outfitter("run", "--wait", "3m", "--wait-for-manager", "--", "true", timeout=LATE_S)
    assert done.returncode == 0, done.stderr


async def _lengthen(url: str, topic: str, by_bytes: int) -> None:
    """Records of another host, the last of which is deleted."""
    key = keys.allocation_key("elsewhere", "w", "i").encode()
    async with connect(url) as bus:
        for _ in range(by_bytes // RECORD_BYTES):
            await bus.publish(topic, 0, Entry(key, secrets.token_bytes(RECORD_BYTES)))
        await bus.publish(topic, 0, Entry(key, None))
