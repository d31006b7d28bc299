"""Plans the growth of a cluster before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from msgspec import UNSET, Struct

from outfitter_proto.bus import Bus, UnknownTopicError
from outfitter_proto.records import Checkpoint
from outfitter_proto.support.printable import counted
from outfitter_service.runtime.changelog.growth.growing_ledger import GrowingLedger
from outfitter_service.runtime.changelog.growth.partition_contents import CannotGrowError, is_begun, unfinished
from outfitter_service.runtime.changelog.shape import is_restored


class GrowthPlan(Struct, frozen=True, kw_only=True):
    """What a growth starts from. `before`: the number of partitions before (0: unknown). `input_partitions`: the
    current number of the registrations topic. `input_id`, `ledger_id`: the ids of the topics of registrations and of
    the ledger."""

    before: int
    input_partitions: int
    input_id: str
    ledger_id: str

    def unread(self, checkpoint: Checkpoint) -> int:
        """The offset from which on the checkpoint's writer has not read the input."""
        return checkpoint.input.to if checkpoint.input.topic_id == self.input_id else 0


async def plan_growth(bus: Bus, ledger: GrowingLedger, *, force: bool) -> GrowthPlan | None:
    """Read the cluster, and plan its growth. Returns None if nothing is to do. `force`: managers that did not write
    that they stopped count as dead.

    Raises:
        CannotGrowError: the records cannot be moved now.
        UnknownTopicError: a topic does not exist.
        BusError: the bus failed.
    """
    topics, partitions = ledger.topics, ledger.partitions
    shapes = await bus.shapes(ledger.names)
    missing = [name for name in ledger.names if name not in shapes]
    if missing:
        with suppress(UnknownTopicError):
            await bus.topic(missing[0])  # says so if it is only hidden from this principal
        raise UnknownTopicError(f"{bus.url}: topic {missing[0]!r} does not exist: `outfitter topics create`")
    counts = {shape.partitions for shape in shapes.values()}
    most = max(counts)
    if most > partitions:
        raise CannotGrowError(f"there are {most} partitions already, and their number cannot shrink to {partitions}")
    at_work: list[str] = []
    copies: list[str] = []
    complete = len(counts) == 1
    for partition in range(shapes[topics.allocations].partitions):
        contents = await ledger.read(partition, most)
        copies += [f"{host} in partition {partition}" for host in contents.copies(partition, most)]
        at_work += contents.at_work
        is_finished = not contents.strays and not unfinished(contents, most) and not is_begun(contents, most)
        complete = complete and is_finished
    if complete and most == partitions:
        return None
    if copies:
        raise CannotGrowError(
            f"the ledger has records of {_shown(copies)} that belong to another partition of {most}, and it counts as "
            "complete: `outfitter restore` has brought them from a backup that was made while partitions were added, "
            "so nobody knows which grants are true. End all workers of these hosts, stop all managers, delete all "
            f"topics, and run `outfitter topics create --partitions {partitions}`"
        )
    if not complete and most < partitions:
        raise CannotGrowError(
            f"partitions were added before, and not all records are where they belong among {most}: with all "
            f"managers stopped run `outfitter topics grow --partitions {most}` first, then this again"
        )
    restored = [each.writer for each in ledger.checkpoints.values() if is_restored(each)]
    if complete and restored:
        have = "has" if len(restored) == 1 else "have"
        raise CannotGrowError(
            f"{counted(len(restored), 'manager')} {have} not adopted the restored ledger ({_shown(restored)}): start "
            "each once with --adopt-ledger, stop all, and run this again. For a machine that is gone, start `outfitter "
            "serve --host HOST --adopt-ledger --take-over` on another one"
        )
    if at_work and not force:
        who = "manager of 1 host has" if len(at_work) == 1 else f"managers of {len(at_work)} hosts have"
        raise CannotGrowError(
            f"the {who} not said that {'it' if len(at_work) == 1 else 'they'} stopped ({_shown(at_work)}): "
            f"stop all managers of cluster {ledger.cluster!r}. If some were killed, make sure that they do not run, "
            "and use --force"
        )
    return GrowthPlan(
        before=most if complete else _former(ledger, shapes[topics.allocations].partitions),
        input_partitions=shapes[topics.registrations].partitions,
        input_id=shapes[topics.registrations].id,
        ledger_id=shapes[topics.allocations].id,
    )


def _shown(names: Iterable[str]) -> str:
    """The first ones of these names."""
    ordered = sorted(names)
    return ", ".join(ordered[:5]) + (" …" if len(ordered) > 5 else "")


def _former(ledger: GrowingLedger, now: int) -> int:
    """The number of partitions before an interrupted growth, by checkpoints or else the ledger's number `now`; 0:
    unknown."""
    numbers = {each.partitions for each in ledger.checkpoints.values()}
    numbers |= {each.grown.partitions for each in ledger.checkpoints.values() if each.grown is not UNSET}
    return max((each for each in (*numbers, now) if each is not UNSET and each != ledger.partitions), default=0)
