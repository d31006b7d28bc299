"""What a check of the topics says where the broker shows them only in part; the rest is in tests/bus."""

from __future__ import annotations

from pathlib import Path

from outfitter_proto import topics
from outfitter_proto.bus import TopicInfo
from support.faulty_bus import FaultyBus


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
    assert all("DescribeConfigs" in difference.why for difference in found)
