"""Adds partitions to all topics of a cluster, and moves each host's records to its new partition.

No manager may serve meanwhile, and none can start: while this process moves a host's records, the host's checkpoint
says so (`shape.MOVING`). Each step is recorded before the next one begins, and may be repeated: after a crash, run it
again. Registrations that no manager has read are sent again to the new partition.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from outfitter_proto.bus import Bus
from outfitter_proto.names import managers_topic
from outfitter_service.runtime.changelog.growth.growing_ledger import GrowingLedger
from outfitter_service.runtime.changelog.growth.plan import plan_growth
from outfitter_service.runtime.changelog.growth.relocation import Relocation
from outfitter_service.runtime.changelog.growth.unread_input import UnreadInput


class Grown(Struct, frozen=True, kw_only=True):
    """The result. `before`: the number of partitions before (0: unknown); `partitions`: the number now. `hosts`: the
    moved ones; `records`: the number of their records. `registrations`: how many were sent again."""

    before: int
    partitions: int
    hosts: list[str]
    records: int
    registrations: int


async def grow(
    bus: Bus, cluster: str, partitions: int, *, history: bool = True, force: bool = False,
    say: Callable[[str], object] = lambda _: None,
) -> Grown:  # fmt: skip
    """Give the topics of `cluster` so many `partitions`, or finish an interrupted run.

    `history`: whether the cluster has that topic. `force`: also move hosts whose manager has not written that it
    stopped. `say`: called with a line for each step.

    Raises:
        CannotGrowError: the topics cannot get more partitions now; the message says what to do.
        UnknownTopicError: a topic does not exist.
        FencedError: a manager is still working.
        BusError: the bus failed: run it again.
    """
    ledger = GrowingLedger(bus, cluster, partitions, history=history)
    plan = await plan_growth(bus, ledger, force=force)
    await _add_to_managers_topic(bus, cluster, partitions)
    if plan is None:
        return Grown(before=partitions, partitions=partitions, hosts=[], records=0, registrations=0)
    unread, relocation, names = UnreadInput(bus, ledger, plan), Relocation(ledger, plan, say), ledger.topics
    numbers, former = range(partitions), range(plan.before or partitions)
    for partition in former:
        await unread.announce(partition)
    await ledger.add_partitions(names.registrations, names.history, names.dead_letters)
    for partition in former:
        await unread.carry(partition)
    await ledger.add_partitions(names.allocations)  # workers find their host's partition by this number
    say(f"all topics have {partitions} partitions")
    for partition in former:
        await unread.carry(partition)
    for partition in numbers:
        await relocation.copy(partition)
    for partition in numbers:
        await relocation.delete(partition)
    for partition in numbers:
        await relocation.finish(partition)
    await relocation.check()
    return Grown(
        before=plan.before,
        partitions=partitions,
        hosts=sorted(relocation.hosts),
        records=relocation.records,
        registrations=unread.registrations,
    )


async def _add_to_managers_topic(bus: Bus, cluster: str, partitions: int) -> None:
    """Add partitions to the topic in which managers say that they live, if there is one. Its records need no moving."""
    topic = managers_topic(cluster)
    shape = (await bus.shapes([topic])).get(topic)
    if shape is not None and shape.partitions < partitions:
        await bus.add_partitions(topic, partitions)
