"""What is to be done so that a cluster has more partitions, found out before anything is changed."""

from __future__ import annotations

from msgspec import UNSET, Struct

from outfitter_proto.bus import Bus, UnknownTopicError
from outfitter_proto.records import Checkpoint
from outfitter_service.runtime.changelog.growth.growing_ledger import GrowingLedger
from outfitter_service.runtime.changelog.growth.stock import CannotGrowError, is_begun, unfinished


class GrowthPlan(Struct, frozen=True, kw_only=True):
    """`before`: how many partitions there were (0: not known). `input_partitions`: how many the registrations have now.
    `input_id`, `ledger_id`: the ids of the registrations and of the ledger."""

    before: int
    input_partitions: int
    input_id: str
    ledger_id: str

    def unread(self, checkpoint: Checkpoint) -> int:
        """Where its writer would go on reading the input."""
        return checkpoint.input.to if checkpoint.input.topic_id == self.input_id else 0


async def plan_growth(bus: Bus, ledger: GrowingLedger, *, force: bool) -> GrowthPlan | None:
    """Look at what there is; None: there is nothing to do. With `force` managers that did not say that they stopped are
    taken for dead.

    Raises:
        CannotGrowError: it cannot be moved as it is.
        UnknownTopicError: there are no such topics.
        BusError: the bus failed.
    """
    topics, partitions = ledger.topics, ledger.partitions
    shapes = await bus.shapes(ledger.names)
    missing = [name for name in ledger.names if name not in shapes]
    if missing:
        raise UnknownTopicError(f"{bus.url}: there is no topic {missing[0]!r}: `outfitter topics create`")
    counts = {shape.partitions for shape in shapes.values()}
    most = max(counts)
    if most > partitions:
        raise CannotGrowError(f"there are {most} partitions already, and no way back to {partitions}")
    at_work: list[str] = []
    complete = len(counts) == 1
    for partition in range(shapes[topics.allocations].partitions):
        found = await ledger.look(partition, most)
        at_work += found.at_work
        complete = complete and not found.strays and not unfinished(found, most) and not is_begun(found, most)
    if complete and most == partitions:
        return None
    if not complete and most < partitions:
        raise CannotGrowError(
            f"partitions were added before, and not all records are where they belong among {most}: with all "
            f"managers stopped run `outfitter topics grow --partitions {most}` first, then this again"
        )
    if at_work and not force:
        shown = ", ".join(sorted(at_work)[:5]) + (" …" if len(at_work) > 5 else "")
        raise CannotGrowError(
            f"the managers of {len(at_work)} hosts have not said that they stopped ({shown}): stop all managers of "
            f"cluster {ledger.cluster!r}. Of those that were killed make sure that they do not run, and give --force"
        )
    return GrowthPlan(
        before=most if complete else _former(ledger, shapes[topics.allocations].partitions),
        input_partitions=shapes[topics.registrations].partitions,
        input_id=shapes[topics.registrations].id,
        ledger_id=shapes[topics.allocations].id,
    )


def _former(ledger: GrowingLedger, now: int) -> int:
    """How many partitions there were, where growing was begun: as checkpoints say, else as the ledger has `now`;
    0: that is not known."""
    told = {each.partitions for each in ledger.checkpoints.values()}
    told |= {each.grown.partitions for each in ledger.checkpoints.values() if each.grown is not UNSET}
    return max((each for each in (*told, now) if each is not UNSET and each != ledger.partitions), default=0)
