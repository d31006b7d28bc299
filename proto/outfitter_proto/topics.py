"""The topics: the settings that `outfitter topics create` gives them, and why a different setting is wrong.

Sources: Kafka's documentation, "Topic Configs" (TopicConfig.java has the same texts), and "Replication" and "Log
Compaction" in its design chapter. The numbers of brokers and copies come from the metadata. Nothing here changes an
existing topic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from outfitter_proto import names
from outfitter_proto.bus import addresses
from outfitter_proto.bus.port import Bus, BusAuthorizationError, TooLargeError, TopicInfo, TopicSpec, UnknownTopicError

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
COPIES = 3
"""Copies of each partition, if there are enough brokers: one broker may be away while another one loses its disk."""
LEAST_BATCH_BYTES = 1024 * 1024
"""What a topic with managers' commits must take at least. Kafka's default is 12 bytes more."""
SHORTEST_TOMBSTONE_MS = 60_000
"""Reading the whole ledger must take less than this, else tombstones may be removed before they are read."""


class Setting(NamedTuple):
    """A topic setting."""

    name: str
    """Kafka's."""
    value: str
    """Ours."""
    why: str
    """Why it matters."""
    bound: Literal["exactly", "at least", "at most"] = "exactly"
    """Which other values are acceptable; -1 is Kafka's "no limit"."""
    fatal: Callable[[str, TopicInfo], bool] = lambda _have, _info: False
    """Whether a manager must not start with this unacceptable value."""

    def accepts(self, have: str) -> bool:
        if self.bound == "exactly":
            return _normal(have) == _normal(self.value)
        number, bound = _number(have), _number(self.value)
        return number >= bound if self.bound == "at least" else number <= bound

    @property
    def valid(self) -> str:
        """The valid values, in words."""
        return self.value if self.bound == "exactly" else f"{self.bound} {self.value}"


class TopicDifference(NamedTuple):
    """A wrong setting of a topic."""

    topic: str
    setting: str
    found: str
    """Its value."""
    wanted: str
    """The valid ones."""
    why: str
    """Why it matters."""
    remedy: str
    """A command, or words."""
    fatal: bool
    """A manager must not start, or (`waits`) is not ready before it is corrected."""

    def in_words(self) -> str:
        """What is wrong, and what would be right."""
        must = "must" if self.fatal else "should"
        return f"{self.topic}: {self.setting} is {self.found}, {must} be {self.wanted}"

    @property
    def waits(self) -> bool:
        return self.setting == _WHOLE_BATCHES.name


_KEEP_CODEC = Setting(
    "compression.type",
    "producer",
    "a broker that compresses again unpacks a compression bomb in its own memory, and a codec other than gzip excludes "
    "readers that have only a standard library",
)
_CLEAN_ELECTION = Setting(
    "unclean.leader.election.enable",
    "false",
    "a copy that is behind may become the leader, and acknowledged records are lost silently",
)
_WHOLE_BATCHES = Setting(
    "max.message.bytes",
    "1048588",
    "a commit's record batch has up to a mebibyte, so a manager is not ready before the topic takes that",
    "at least",
    fatal=lambda have, _: _number(have) < LEAST_BATCH_BYTES,
)
REGISTRATIONS = (
    Setting(
        "cleanup.policy",
        "delete",
        "registrations are events: compaction would delete all but the last of each host",
        fatal=lambda have, _: "compact" in have,
    ),
    Setting(
        "retention.ms",
        str(7 * DAY_MS),
        "a manager that was away for longer loses registrations",
        "at least",
    ),
    Setting("retention.bytes", "-1", "one worker's flood would delete the unanswered registrations of others"),
    Setting(
        "max.message.bytes",
        "65536",
        "no registration is larger: a higher limit only helps floods, a lower one refuses valid requests",
    ),
    Setting(
        "message.timestamp.type",
        "LogAppendTime",
        "otherwise the senders' clocks decide what retention deletes and how long answers took",
    ),
    _KEEP_CODEC,
    _CLEAN_ELECTION,
)
ALLOCATIONS = (
    Setting(
        "cleanup.policy",
        "compact",
        "this topic is the ledger: with deletion every grant would be lost in time",
        fatal=lambda *_: True,
    ),
    Setting(
        "delete.retention.ms",
        str(DAY_MS),
        "a reader that needs longer for the whole ledger misses deletions, and takes ended allocations for live ones",
        "at least",
        fatal=lambda have, _: _number(have) < SHORTEST_TOMBSTONE_MS,
    ),
    Setting(
        "min.cleanable.dirty.ratio", "0.1", "a manager that starts reads the whole ledger: keep it compact", "at most"
    ),
    Setting(
        "segment.ms", str(HOUR_MS), "the newest segment is never compacted, and a start reads all of it", "at most"
    ),
    Setting(
        "segment.bytes",
        str(128 * 1024 * 1024),
        "the newest segment is never compacted, and a start reads all of it",
        "at most",
    ),
    _WHOLE_BATCHES,
    _KEEP_CODEC,
    _CLEAN_ELECTION._replace(
        why="a copy that is behind may become the leader: published grants are lost, and their devices granted again",
        fatal=lambda _, info: info.replication > 1,
    ),
)
HISTORY = (
    Setting(
        "cleanup.policy", "delete", "history is a log of transitions: compaction would make holes in it, and needs keys"
    ),
    Setting("retention.ms", str(30 * DAY_MS), "how far back `outfitter history` can look", "at least"),
    _WHOLE_BATCHES,
    _KEEP_CODEC,
    _CLEAN_ELECTION,
)
DEAD_LETTERS = (
    Setting(
        "cleanup.policy", "compact,delete", "two dead letters of one message become one, and all are deleted in time"
    ),
    Setting("retention.ms", str(30 * DAY_MS), "how long `outfitter dead-letters` can show a bad message", "at least"),
    Setting(
        "retention.bytes",
        str(512 * 1024 * 1024),
        "a sender of registrations causes dead letters, and could fill the brokers' disks with them",
        "at most",
    ),
    Setting(
        "segment.bytes",
        str(64 * 1024 * 1024),
        "brokers delete only whole segments, so these decide how exactly retention.bytes is kept",
        "at most",
    ),
    _WHOLE_BATCHES,
    _KEEP_CODEC,
    _CLEAN_ELECTION,
)
MANAGERS = (
    Setting("cleanup.policy", "compact", "only the last sign of life of each manager matters"),
    Setting(
        "message.timestamp.type",
        "LogAppendTime",
        "otherwise the managers' own clocks decide which of them count as dead",
    ),
    Setting("min.cleanable.dirty.ratio", "0.1", "most of its records are out of date after seconds", "at most"),
    Setting("segment.ms", str(HOUR_MS // 6), "the newest segment is never compacted", "at most"),
    Setting("segment.bytes", str(1024 * 1024), "the newest segment is never compacted", "at most"),
    Setting("max.message.bytes", "16384", "no sign of life is larger"),
    _KEEP_CODEC,
    _CLEAN_ELECTION._replace(why="a copy that is behind may become the leader: living managers look dead for a moment"),
)
CONTROL = (
    Setting("cleanup.policy", "compact", "an order stands until it is ended: with deletion it would be lost in time"),
    Setting(
        "message.timestamp.type", "LogAppendTime", "otherwise the authors' own clocks say since when an order is there"
    ),
    Setting("max.message.bytes", "16384", "no order is larger"),
    _KEEP_CODEC,
    _CLEAN_ELECTION._replace(
        why="a copy that is behind may become the leader: acknowledged orders are lost, also those that end others"
    ),
)


def required(cluster: str, *, history: bool = True) -> dict[str, tuple[Setting, ...]]:
    """The settings of each of `cluster`'s topics by topic name, except min.insync.replicas (see `acknowledging`).
    `history` False: without that topic."""
    topics = names.topics(cluster)
    settings = zip(topics, (REGISTRATIONS, ALLOCATIONS, HISTORY, DEAD_LETTERS), strict=True)
    return {name: of_topic for name, of_topic in settings if history or name != topics.history}


def optional(cluster: str) -> dict[str, tuple[Setting, ...]]:
    """As `required`, for the topics that everybody may do without."""
    return {names.managers_topic(cluster): MANAGERS, names.control_topic(cluster): CONTROL}


def acknowledging(copies: int) -> int:
    """min.insync.replicas for this number of copies. For three or more it is two: one broker may be away, and
    acknowledged records survive the loss of another. For two or one it is one, because otherwise no broker could be
    away."""
    return 2 if copies >= COPIES else 1


async def partition_count(bus: Bus, cluster: str) -> int | None:
    """The number of partitions of the existing topics, which new ones must have too; None if there are no topics."""
    for name in names.topics(cluster):
        try:
            return (await bus.topic(name)).partitions
        except UnknownTopicError:
            continue
    return None


async def create(
    bus: Bus, cluster: str, *, partitions: int, replication: int | None = None, history: bool = True
) -> list[str]:
    """Create the missing topics and return their names.

    `replication`: copies of each partition. None: one a broker, at most `COPIES`.
    """
    copies = min(COPIES, await bus.brokers()) if replication is None else replication
    common = {"min.insync.replicas": str(acknowledging(copies))}
    return await bus.create_topics(
        [
            TopicSpec(
                name, _partitions(cluster, name, partitions), common | {s.name: s.value for s in settings}, copies
            )
            for name, settings in (required(cluster, history=history) | optional(cluster)).items()
        ]
    )


def all_missing(cluster: str, *, history: bool = True) -> list[TopicDifference]:
    """The result of `check` without a bus."""
    return [
        *(_missing(name) for name in required(cluster, history=history)),
        *(_missing(name, why=_without(name), fatal=False) for name in optional(cluster)),
    ]


_COSTS = {
    "managers": (
        "without it nobody sees on the bus whether a manager lives, so one that was killed looks as if it served on"
    ),
    "control": "without it nobody can take a device or a host out; what was taken out stays out",
}
"""What the lack of an optional topic costs, by the last part of its name."""


def _without(name: str) -> str:
    return _COSTS[name.rpartition(".")[2]]


def _partitions(cluster: str, name: str, ledgers: int) -> int:
    """How many partitions a topic has where the ledger has `ledgers` of them."""
    return 1 if name == names.control_topic(cluster) else ledgers


def _missing(name: str, *, why: str = "a manager cannot read or write it", fatal: bool = True) -> TopicDifference:
    return TopicDifference(name, "(topic)", "missing", "present", why, "outfitter topics create", fatal)


async def check(bus: Bus, cluster: str, *, history: bool = True) -> list[TopicDifference]:
    """The differences of the topics from their required settings; empty if there are none."""
    differences: list[TopicDifference] = []
    existing: dict[str, TopicInfo] = {}
    brokers = await bus.brokers()
    for name, settings in required(cluster, history=history).items():
        try:
            existing[name] = info = await bus.topic(name)
        except UnknownTopicError:
            differences.append(_missing(name))
            continue
        differences += await _of_settings(bus, info, settings, brokers)
    differences += _of_partitions(existing)
    for name, settings in optional(cluster).items():
        ledger = existing.get(names.topics(cluster).allocations)
        needed = _partitions(cluster, name, ledger.partitions if ledger is not None else 0)
        differences += [item._replace(fatal=False) for item in await _of_optional(bus, name, settings, brokers, needed)]
    return differences


async def _of_optional(
    bus: Bus, name: str, settings: tuple[Setting, ...], brokers: int, needed: int
) -> list[TopicDifference]:
    """The differences of a topic that everybody may do without. `needed`: at least so many partitions."""
    try:
        info = await bus.topic(name)
    except UnknownTopicError:
        return [_missing(name, why=_without(name))]
    except BusAuthorizationError as error:
        return [TopicDifference(name, "(topic)", _HIDDEN, "shown", _without(name), f"{error}", fatal=False)]
    found = await _of_settings(bus, info, settings, brokers)
    if name.endswith(".control") and info.partitions > needed:
        why = "managers read the first one only: orders in others are in effect nowhere"
        remedy = "delete the topic, then outfitter topics create; what is in effect stays so"
        found.append(TopicDifference(name, "partitions", str(info.partitions), str(needed), why, remedy, fatal=False))
    if info.partitions < needed:
        why = "the managers of further partitions cannot say there that they live"
        count = str(info.partitions)
        found.append(
            TopicDifference(name, "partitions", count, str(needed), why, _adding(bus, name, needed), fatal=False)
        )
    return found


_HIDDEN = "not shown to this principal"


async def _of_settings(bus: Bus, info: TopicInfo, settings: tuple[Setting, ...], brokers: int) -> list[TopicDifference]:
    """The differences of one topic's copies and settings."""
    name, copies = info.name, _of_copies(info, brokers)
    if not info.config:
        why = "it is unknown whether this topic keeps the records that it must keep"
        remedy = f"grant this principal DescribeConfigs on topic {name}"
        return [*copies, TopicDifference(name, "(settings)", _HIDDEN, "shown", why, remedy, False)]
    differences = [
        TopicDifference(name, s.name, have, s.valid, s.why, _altering(bus, name, s.name, s.value), s.fatal(have, info))
        for s in settings
        if not s.accepts(have := info.config.get(s.name, s.value))
    ]
    return [*copies, *differences, *await _of_acknowledging(bus, info)]


def _of_copies(info: TopicInfo, brokers: int) -> list[TopicDifference]:
    copies = min(COPIES, brokers)
    if info.replication >= copies:
        return []
    return [
        TopicDifference(
            info.name, "replication factor", str(info.replication), f"at least {copies}",
            f"only {info.replication} of {brokers} brokers have it: an outage stops it, and a lost disk loses it",
            f"kafka-reassign-partitions --execute, with a plan that names {copies} brokers for each partition", False,
        )
    ]  # fmt: skip


async def _of_acknowledging(bus: Bus, info: TopicInfo) -> list[TopicDifference]:
    """Check min.insync.replicas against the number of copies. All our writers use `acks=all`."""
    setting = "min.insync.replicas"
    least = acknowledging(info.replication)
    most = max(least, info.replication - 1)
    have = int(info.config.get(setting, least))
    if least <= have <= most:
        return []
    fatal = have > info.replication and not await bus.clamps_acknowledgements()
    if fatal:
        why = f"its {info.replication} copies cannot give so many acknowledgements: nobody can write to it"
    elif have > info.replication:
        why = f"its {info.replication} copies cannot give so many acknowledgements: these brokers then ask for fewer"
    elif have > most:
        why = "all copies must acknowledge: the outage of one broker stops every write"
    else:
        why = "a record that only one copy has acknowledged is lost with its disk: its devices could be granted again"
    bounds = str(least) if least == most else f"{least} to {most}"
    remedy = _altering(bus, info.name, setting, str(least))
    return [TopicDifference(info.name, setting, str(have), bounds, why, remedy, fatal)]


def _of_partitions(existing: Mapping[str, TopicInfo]) -> list[TopicDifference]:
    if len({info.partitions for info in existing.values()}) < 2:
        return []
    shown = ", ".join(f"{name}: {info.partitions}" for name, info in existing.items())
    most = max(info.partitions for info in existing.values())
    return [
        TopicDifference(
            "(all)", "partitions", shown, "one count for all",
            "a host's registrations, grants and history are in the partition of one number, computed from its name and "
            "the count: with different counts they are searched in the wrong partition",
            f"with all managers stopped: a backup, and its restore into topics with {most} partitions each "
            '(service/recover.md, "A wrong number of partitions")',
            True,
        )
    ]  # fmt: skip


def _adding(bus: Bus, topic: str, partitions: int) -> str:
    if bus.local:
        return "the topics of this file cannot be changed: begin with another file"
    brokers = ",".join(map(str, addresses.brokers(bus.url)))
    return f"kafka-topics --bootstrap-server {brokers} --alter --topic {topic} --partitions {partitions}"


def _altering(bus: Bus, topic: str, setting: str, value: str) -> str:
    if bus.local:
        return "the topics of this file cannot be changed: begin with another file"
    brokers = ",".join(map(str, addresses.brokers(bus.url)))
    assignment = f"'{setting}=[{value}]'" if "," in value else f"{setting}={value}"
    return f"kafka-configs --bootstrap-server {brokers} --alter --topic {topic} --add-config {assignment}"


def whole_batches(bus: Bus, topic: str) -> str:
    """The command that lets a topic take managers' commits, or words."""
    return _altering(bus, topic, _WHOLE_BATCHES.name, _WHOLE_BATCHES.value)


def with_remedy(bus: Bus, error: TooLargeError) -> TooLargeError:
    """The refusal of a commit, with the command that lets the topic take it, if the bus names the topic."""
    if error.topic is None:
        return error
    message = (
        f"topic {error.topic} takes less than a commit, which is repeated until it fits ({error}): "
        f"{whole_batches(bus, error.topic)}"
    )
    return TooLargeError(message, topic=error.topic, size=error.size)


def _normal(value: str) -> list[str]:
    """The items of a list without their order, which has no meaning."""
    return sorted(part.strip() for part in value.split(","))


def _number(value: str) -> float:
    return float("inf") if value == "-1" else float(value)
