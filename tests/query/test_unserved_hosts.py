"""What the newest dead letters tell of hosts without a manager, as `outfitter status` warns of them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from outfitter_proto import topics as all_topics
from outfitter_proto.bus import Entry, connect
from outfitter_proto.codec import encode
from outfitter_proto.names import topics
from outfitter_proto.records import DeadLetter, MessageSource, NobodysCode
from outfitter_service.query import unserved_hosts
from outfitter_service.query.unserved_hosts import UnansweredHost

NOW = datetime.now(UTC)
CLUSTER = "outfitter"


def letter(offset: int, host: str, code: str = NobodysCode.NO_MANAGER, *, ago_s: float, count: int = 1) -> DeadLetter:
    several = {"count": count, "until": offset + count} if count > 1 else {}
    return DeadLetter(
        at=NOW - timedelta(seconds=ago_s), source=MessageSource(topic="t", partition=0, offset=offset), code=code,
        message_key=host, reason="", body=b"", length=0, sha256="", writer="sweeper/0", **several,
    )  # fmt: skip


async def found(folder: Path, *letters: DeadLetter) -> unserved_hosts.LostMessages:
    """What of these is told within the last minute, while `served` has a manager."""
    async with connect(f"sqlite://{folder}/bus.db?synchronous=NORMAL") as bus:
        await all_topics.create(bus, CLUSTER, partitions=1)
        for each in letters:
            await bus.publish(topics(CLUSTER).dead_letters, 0, Entry(each.key.encode(), encode(each)))
        return await unserved_hosts.find(bus, CLUSTER, served=["served"], since=NOW - timedelta(seconds=60))


async def test_only_what_is_newer_is_told_of_hosts_without_a_manager(tmp_path: Path) -> None:
    lost = await found(
        tmp_path,
        letter(0, "gone", ago_s=61),
        letter(1, "gone", NobodysCode.WRONG_PARTITION, ago_s=61),
        letter(2, "here", ago_s=60),
        letter(3, "here", ago_s=10),
        letter(4, "served", ago_s=10),
        letter(5, "here", NobodysCode.WRONG_PARTITION, ago_s=59),
    )
    assert lost.hosts == [UnansweredHost("here", 2, NOW - timedelta(seconds=10))]
    assert lost.misdirected == {NobodysCode.WRONG_PARTITION: 1}


async def test_a_letter_that_stands_for_several_messages_counts_as_many(tmp_path: Path) -> None:
    lost = await found(
        tmp_path,
        letter(0, "here", ago_s=10),
        letter(1, "here", ago_s=9, count=12),
        letter(20, "here", NobodysCode.WRONG_PARTITION, ago_s=5, count=3),
    )
    assert [(one.host, one.messages) for one in lost.hosts] == [("here", 13)]
    assert lost.misdirected == {NobodysCode.WRONG_PARTITION: 3}
