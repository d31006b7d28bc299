"""Plans the growth of a cluster before anything is changed."""

from __future__ import annotations

from msgspec import UNSET, Struct

from outfitter_proto.bus import Bus, UnknownTopicError
from outfitter_proto.records import Checkpoint
from outfitter_service.runtime.changelog.growth.growing_ledger import GrowingLedger
from outfitter_service.runtime.changelog.growth.partition_contents import CannotGrowError, is_begun, unfinished


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
        raise UnknownTopicError(f"{bus.url}: topic {missing[0]!r} does not exist: `outfitter topics create`")
    counts = {shape.partitions for shape in shapes.values()}
    most = max(counts)
    if most > partitions:
        raise CannotGrowError(f"there are {most} partitions already, and their number cannot shrink to {partitions}")
    at_work: list[str] = []
    complete = len(counts) == 1
    for partition in range(shapes[topics.allocations].partitions):
        contents = await ledger.read(partition, most)
        at_work += contents.at_work
        is_finished = not contents.strays and not unfinished(contents, most) and not is_begun(contents, most)
        complete = complete and is_finished
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
            f"cluster {ledger.cluster!r}. If some were killed, make sure that they do not run, and use --force"
        )
    return GrowthPlan(
        before=most if complete else _former(ledger, shapes[topics.allocations].partitions),
        input_partitions=shapes[topics.registrations].partitions,
        input_id=shapes[topics.registrations].id,
        ledger_id=shapes[topics.allocations].id,
    )


def _former(ledger: GrowingLedger, now: int) -> int:
    """The number of partitions before an interrupted growth, by checkpoints or else the ledger's number `now`; 0:
    unknown."""
    numbers = {each.partitions for each in ledger.checkpoints.values()}
    numbers |= {each.grown.partitions for each in ledger.checkpoints.values() if each.grown is not UNSET}
    return max((each for each in (*numbers, now) if each is not UNSET and each != ledger.partitions), default=0)
