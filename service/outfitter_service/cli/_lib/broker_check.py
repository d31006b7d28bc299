"""What keeps a manager from working with brokers that answer, for `outfitter topics check` and `outfitter doctor`."""

from __future__ import annotations

from contextlib import suppress

from outfitter_proto.bus import (
    Bus,
    BusAccessError,
    BusAuthorizationError,
    BusUnavailableError,
    Obstacle,
    Right,
    UnknownTopicError,
)
from outfitter_proto.keys import host_writer, partition_writer
from outfitter_proto.names import managers_group, topics, transactional_id
from outfitter_proto.support.causes import side_by_side
from outfitter_proto.topics import TopicDifference
from outfitter_service.config import BusConnection, Settings

_BROKERS = "kafka:"
SESSION_S = 10.0
"""The default of `session-timeout`."""
OUT_OF_REACH = "brokers"
"""The kind of an obstacle because of which nothing else can be asked."""


async def obstacles(bus: Bus, where: BusConnection, settings: Settings | None = None) -> list[Obstacle]:
    """The obstacles for a manager with these settings, else for one of `where`'s host in either scope.

    Raises:
        BusError: the bus did not answer.
    """
    writer, sessions = host_writer(where.host), {managers_group(where.cluster): SESSION_S}
    if settings is not None and settings.scope == "cluster":
        writer, sessions = partition_writer(0), {managers_group(where.cluster): settings.session_timeout}
    elif settings is not None:
        sessions = {}
    return await bus.obstacles(writer=transactional_id(where.cluster, writer), sessions=sessions)


async def refuse_unreadable(where: BusConnection) -> None:
    """Refuse brokers that cannot be read: out of reach, without the rights to read, or with a transaction that stays
    open in a topic of managers. What another client cannot read for another reason it says itself.

    Raises:
        BusError: they cannot be read; the message says why, and what to do.
    """
    from outfitter_service.query import ledger_view

    if not where.bus.startswith(_BROKERS):
        return
    async with ledger_view.opened(where) as bus:
        for obstacle in await obstacles(bus, where):
            if obstacle.kind == OUT_OF_REACH:
                raise BusUnavailableError(f"{bus.url}: {obstacle.why}")
        names = topics(where.cluster)
        if missing := await bus.missing_rights([Right("Read", "topic", name) for name in names]):
            raise BusAuthorizationError(f"{bus.url}: {'; '.join(missing)}")
        written = await bus.layouts(names.written(history=where.history))
        async with side_by_side() as tasks:
            for name, layout in written.items():
                for partition in range(layout.partitions):
                    tasks.start_soon(refuse_undecided, bus, name, partition)


async def refuse_undecided(bus: Bus, topic: str, partition: int) -> None:
    """Refuse a partition in which a transaction stays open, so that nobody can read what follows.

    Raises:
        BusUnavailableError: one stays open; the message says whose, and how to end it.
    """
    with suppress(BusAccessError, UnknownTopicError):
        await bus.stable_end(topic, partition)


def difference(obstacle: Obstacle) -> TopicDifference:
    """The row of `outfitter topics check`, which does not know the scope: only cluster scope needs groups."""
    return TopicDifference(
        "(brokers)", obstacle.setting, obstacle.found, obstacle.wanted, obstacle.why, obstacle.remedy,
        obstacle.kind != "group",
    )  # fmt: skip
