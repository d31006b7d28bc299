"""What a check of the topics says where settings are hidden or brokers several; the rest is in tests/bus."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from outfitter_proto import topics
from outfitter_proto.bus import TopicInfo, TopicSpec
from outfitter_proto.names import topics as topic_names
from support.bus.faulty_bus import FaultyBus


class Secretive(FaultyBus):
    """A bus whose topics' settings this principal may not see."""

    async def topic(self, name: str) -> TopicInfo:
        return (await super().topic(name))._replace(config={})


async def test_settings_that_cannot_be_seen_are_named_and_not_taken_for_right(tmp_path: Path) -> None:
    async with Secretive(f"sqlite://{tmp_path}/bus.db?synchronous=NORMAL") as bus:
        names = await topics.create(bus, "outfitter", partitions=1)
        found = await topics.check(bus, "outfitter")
    assert [(difference.topic, difference.setting, difference.fatal) for difference in found] == [
        (name, "(settings)", False) for name in names
    ]
    assert all("DescribeConfigs" in difference.remedy for difference in found)


class Brokers(FaultyBus):
    """A bus that says it has `count` brokers, and keeps copies as it was told when a topic was made."""

    def __init__(self, url: str, count: int) -> None:
        super().__init__(url)
        self.count = count
        self.copies: dict[str, int] = {}

    async def brokers(self) -> int:
        return self.count

    async def create_topics(self, specs: Sequence[TopicSpec]) -> list[str]:
        made = await super().create_topics(specs)
        self.copies |= {spec.name: spec.replication or 0 for spec in specs if spec.name in made}
        return made

    async def topic(self, name: str) -> TopicInfo:
        return (await super().topic(name))._replace(replication=self.copies[name])


@pytest.mark.parametrize(("brokers", "copies", "acknowledged"), [(1, 1, "1"), (2, 2, "1"), (3, 3, "2"), (7, 3, "2")])
async def test_as_many_copies_are_made_as_there_are_brokers_up_to_three_and_two_of_three_acknowledge(
    tmp_path: Path, brokers: int, copies: int, acknowledged: str
) -> None:
    async with Brokers(f"sqlite://{tmp_path}/bus.db?synchronous=NORMAL", brokers) as bus:
        names = await topics.create(bus, "outfitter", partitions=1)
        described = [await bus.topic(name) for name in names]
        found = await topics.check(bus, "outfitter")
    assert {(info.replication, info.config["min.insync.replicas"]) for info in described} == {(copies, acknowledged)}
    assert found == []


async def test_too_few_copies_are_a_warning_and_an_unclean_election_of_a_ledger_with_copies_is_fatal(
    tmp_path: Path,
) -> None:
    async with Brokers(f"sqlite://{tmp_path}/bus.db?synchronous=NORMAL", 3) as bus:
        ledger = topic_names("outfitter").allocations
        config = {s.name: s.value for s in topics.ALLOCATIONS} | {"unclean.leader.election.enable": "true"}
        await bus.create_topics([TopicSpec(ledger, 1, config, 2)])
        await topics.create(bus, "outfitter", partitions=1)
        found = await topics.check(bus, "outfitter")
    assert [(d.topic, d.setting, d.found, d.fatal) for d in found] == [
        (ledger, "replication factor", "2", False),
        (ledger, "unclean.leader.election.enable", "true", True),
    ]
    assert "kafka-reassign-partitions" in found[0].remedy


@pytest.mark.parametrize(
    ("copies", "acknowledging", "wanted", "fatal"),
    [(3, "1", "2", False), (3, "3", "2", False), (5, "1", "2 to 4", False), (3, "4", "2", True), (1, "2", "1", True)],
)
async def test_acknowledgements_must_survive_a_broker_and_be_possible(
    tmp_path: Path, copies: int, acknowledging: str, wanted: str, fatal: bool
) -> None:
    """With as many as there are copies, one outage stops all; with more, nothing can ever be written."""
    async with Brokers(f"sqlite://{tmp_path}/bus.db?synchronous=NORMAL", copies) as bus:
        ledger = topic_names("outfitter").allocations
        config = {s.name: s.value for s in topics.ALLOCATIONS} | {"min.insync.replicas": acknowledging}
        await bus.create_topics([TopicSpec(ledger, 1, config, copies)])
        await topics.create(bus, "outfitter", partitions=1)
        found = await topics.check(bus, "outfitter")
    assert [(d.topic, d.setting, d.found, d.wanted, d.fatal) for d in found] == [
        (ledger, "min.insync.replicas", acknowledging, wanted, fatal)
    ]
