"""What a manager's log says of a bus that is away: a line when it begins, one a minute, one when it is over. And at
first contact nothing that looks like trouble."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.kafka.broker import Broker
from support.managers.process import Manager, StartManager

pytestmark = pytest.mark.slow

TRIES = 12
"""How often some activity has failed before the broker comes back: each time would be a line, or several."""


def lines(manager: Manager, *levels: str) -> list[dict[str, Any]]:
    said = [line for line in manager.log.read_text().splitlines() if line.startswith("{")]
    return [line for line in map(json.loads, said) if line["level"] in levels]


def loud(manager: Manager) -> list[dict[str, Any]]:
    return lines(manager, "info", "warning", "error", "critical")


@pytest.fixture
def manager(own_broker: Broker, start_manager: StartManager, tmp_path: Path) -> Manager:
    """Its first contact with a broker, by the commands of the README."""
    before = Manager(tmp_path / "before", "", bus=own_broker.url)
    assert before.outfitter("topics", "create", "--partitions", "12").returncode == 0
    return start_manager(bus=own_broker.url, arguments=["--log-format", "json", "--log-level", "debug"])


def test_an_outage_is_one_line_when_it_begins_and_one_when_it_ends(manager: Manager, own_broker: Broker) -> None:
    manager.wait_for(lambda: manager.metric("outfitter_swept_partitions") == 12, timeout=60)
    before = len(loud(manager))
    quiet = len(lines(manager, "debug"))
    own_broker.kill9()

    def tries() -> int:
        return sum(line["event"] == "the bus is still away" for line in lines(manager, "debug")[quiet:])

    manager.wait_for(lambda: tries() >= TRIES, timeout=120)
    manager.wait_for(lambda: not manager._is_ready(), timeout=120)
    own_broker.start()
    manager.wait_for(manager._is_ready, timeout=120)
    manager.wait_for(lambda: manager.metric("outfitter_swept_partitions") == 12, timeout=120)
    manager.wait_for(lambda: any(line["event"] == "the bus works again" for line in loud(manager)), timeout=120)
    said = [line["event"] for line in loud(manager)[before:]]
    # one a minute, should this machine be so slow
    assert [event for event in said if event != "the bus is away for longer"] == [
        "the bus is away, trying until it works",
        "the bus works again",
    ]
    [begun] = [line for line in loud(manager)[before:] if line["event"].startswith("the bus is away, trying")]
    assert begun["error"]
    [ended] = [line for line in loud(manager)[before:] if line["event"] == "the bus works again"]
    assert ended["after_s"] > 0


def test_first_contact_shows_no_library_and_no_line_for_each_partition(manager: Manager) -> None:
    manager.wait_for(lambda: manager.metric("outfitter_swept_partitions") == 12, timeout=60)
    said = loud(manager)
    assert [line for line in said if line["logger"].startswith(("aiokafka", "asyncio", "kafka"))] == []
    assert [line for line in said if line["level"] in ("error", "critical")] == []
    assert sum("partition" in line for line in said) <= 2
    assert len(said) <= 8, said
