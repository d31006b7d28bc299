"""The four topics as they must be: what `outfitter topics create` makes and `check` compares.

Each setting has the reason it is there; `check` prints that reason beside the difference.
"""

from __future__ import annotations

from typing import NamedTuple

from outfitter_proto import names
from outfitter_proto.bus.port import Bus, TopicInfo, TopicSpec, UnknownTopicError

DAY_MS = 86_400_000


class Setting(NamedTuple):
    """A topic setting by Kafka's name, the value we make it with, and why it matters."""

    name: str
    value: str
    why: str


class Difference(NamedTuple):
    """A topic that is not as it must be. `fatal`: a manager must not start on it."""

    topic: str
    setting: str
    found: str
    wanted: str
    why: str
    fatal: bool


_KEEP_CODEC = Setting(
    "compression.type",
    "producer",
    "re-compressing on the broker turns a small compressed bomb into the broker's own memory",
)
REGISTRATIONS = (
    Setting("cleanup.policy", "delete", "registrations are events: compaction would drop all but a host's last"),
    Setting(
        "retention.ms",
        str(7 * DAY_MS),
        "a manager that was away longer than this loses the registrations in between",
    ),
    Setting("max.message.bytes", "65536", "no registration is larger; a larger limit only helps floods"),
    Setting("message.timestamp.type", "LogAppendTime", "a sender's clock must not decide what retention deletes"),
    _KEEP_CODEC,
)
ALLOCATIONS = (
    Setting(
        "cleanup.policy",
        "compact",
        "this topic is the ledger: with deletion every grant would evaporate in time",
    ),
    Setting("min.cleanable.dirty.ratio", "0.1", "a manager that starts reads the whole ledger: keep it compact"),
    Setting("segment.ms", str(3_600_000), "the newest segment is never compacted"),
    _KEEP_CODEC,
)
HISTORY = (
    Setting("cleanup.policy", "delete", "history is a log of transitions: compaction would make holes in it"),
    Setting("retention.ms", str(30 * DAY_MS), "how far back `outfitter history` can look"),
    _KEEP_CODEC,
)
DEAD_LETTERS = (
    Setting("cleanup.policy", "compact,delete", "the same bad message reported twice collapses, and goes in time"),
    Setting("retention.ms", str(30 * DAY_MS), "how long a bad message can be looked at"),
    _KEEP_CODEC,
)


def wanted(cluster: str) -> dict[str, tuple[Setting, ...]]:
    """The settings of each of `cluster`'s topics, by topic name."""
    topics = names.topics(cluster)
    return dict(zip(topics, (REGISTRATIONS, ALLOCATIONS, HISTORY, DEAD_LETTERS), strict=True))


async def create(bus: Bus, cluster: str, *, partitions: int, replication: int | None = None) -> list[str]:
    """Make the topics that do not exist; return the names of those made."""
    return await bus.create_topics(
        [
            TopicSpec(name, partitions, {s.name: s.value for s in settings}, replication)
            for name, settings in wanted(cluster).items()
        ]
    )


async def check(bus: Bus, cluster: str) -> list[Difference]:
    """Compare the topics with what they must be. An empty list: all is well."""
    differences: list[Difference] = []
    found: dict[str, TopicInfo] = {}
    for name, settings in wanted(cluster).items():
        try:
            found[name] = info = await bus.topic(name)
        except UnknownTopicError:
            differences.append(
                Difference(name, "(topic)", "missing", "present", "make it with `outfitter topics create`", True)
            )
            continue
        if not info.config:
            why = "whether this topic keeps what it must keep cannot be told: grant DescribeConfigs on it"
            differences.append(Difference(name, "(settings)", "not shown to this principal", "shown", why, False))
            continue
        differences += [
            Difference(name, s.name, have, s.value, s.why, _fatal(name, cluster, s, have))
            for s in settings
            if (have := info.config.get(s.name, s.value)) != s.value
        ]
    counts = {info.partitions for info in found.values()}
    if len(counts) > 1:
        shown = ", ".join(f"{name}: {info.partitions}" for name, info in found.items())
        differences.append(
            Difference(
                "(all)", "partitions", shown, "one count for all four",
                "a host's registrations, grants and history live in the partition of one number", True,
            )
        )  # fmt: skip
    return differences


def _fatal(topic: str, cluster: str, setting: Setting, have: str) -> bool:
    """A ledger that is not purely compacted evaporates; registrations that are compacted vanish unread."""
    if setting.name != "cleanup.policy":
        return False
    topics = names.topics(cluster)
    if topic == topics.allocations:
        return have != "compact"
    return topic == topics.registrations and "compact" in have
