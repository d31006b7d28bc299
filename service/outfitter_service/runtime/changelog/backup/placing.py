"""Where each checkpoint belongs when a backup goes into other topics.

A host's manager writes in the partition of its host, and the owner of a partition there. A manager whose input stays
where it is reads on. Any other begins where nothing is answered, and numbers registrations above all earlier ones.
A sweeper reads on in the same topic, and has no checkpoint in another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import UNSET, structs

from outfitter_proto.keys import is_sweeper, partition_writer, sweeper_writer, writer_names
from outfitter_proto.partitioning import partition_of
from outfitter_proto.records import Checkpoint, InputPosition
from outfitter_service.runtime.changelog.backup.answered import Answered


def placed(checkpoints: Iterable[Checkpoint], firsts: Sequence[int], topic_id: str) -> dict[int, list[Checkpoint]]:
    """The checkpoints by their new partition.

    `checkpoints`: the last ones of all writers. `topic_id`: of the registrations topic; `firsts`: its first offsets, by
    partition. A partition's owner has the highest commit number and token of all former owners, because its hosts may
    come from any of them.
    """
    last = list(checkpoints)
    answered = Answered(last, topic_id)
    found: dict[int, list[Checkpoint]] = {}
    for each in last:
        host = writer_names(each.writer).host
        if host is not None:
            partition = partition_of(host, len(firsts))
            begin = max(firsts[partition], answered.until(host, partition))
            found.setdefault(partition, []).append(_reading(each, [each], topic_id, partition, len(firsts), begin))
    owners = [each for each in last if writer_names(each.writer).kind == "partition"]
    if owners:
        for partition, first in enumerate(firsts):
            writers = partition_writer(partition), sweeper_writer(partition)
            begin = max([first, *(answered.of(writer, partition) for writer in writers)])
            found.setdefault(partition, []).append(_owner(owners, len(firsts), topic_id, partition, begin))
    for each in last:
        if is_sweeper(each.writer) and each.input.topic_id == topic_id and each.input.partition < len(firsts):
            found.setdefault(each.input.partition, []).append(each)
    return found


def _owner(owners: list[Checkpoint], partitions: int, topic_id: str, partition: int, begin: int) -> Checkpoint:
    own = next((each for each in owners if each.writer == partition_writer(partition)), None)
    if own is not None and {each.writer for each in owners} == {partition_writer(each) for each in range(partitions)}:
        return _reading(own, [own], topic_id, partition, partitions, begin)
    merged = structs.replace(
        own or owners[0],
        writer=partition_writer(partition),
        commit=max(each.commit for each in owners),
        token=max(each.token for each in owners),
        format=max(each.format for each in owners),
        needs=sorted({need for each in owners for need in each.needs or ()}) or UNSET,
        machine_id=None,
        boot_id=None,
        pid_ns=UNSET,
        time_ns=UNSET,
    )
    return _reading(merged, owners, topic_id, partition, partitions, begin)


def _reading(
    checkpoint: Checkpoint, sources: list[Checkpoint], topic_id: str, partition: int, partitions: int, begin: int
) -> Checkpoint:
    """The checkpoint with its position in one of the `partitions`. `sources`: those whose records it gets. `begin`:
    where it begins if it does not read on."""
    before = checkpoint.input
    stays = before.topic_id == topic_id and before.partition == partition
    if stays and sources == [checkpoint]:
        return checkpoint
    base = max((each.input.base or 0) + each.input.reach for each in sources)
    read = before.ahead or {} if stays else {}
    ahead = {host: to for host, to in read.items() if partition_of(host, partitions) == partition}
    position = InputPosition(
        topic_id=topic_id, partition=partition, from_=begin, to=begin, base=base or UNSET, ahead=ahead or UNSET
    )
    return structs.replace(checkpoint, input=position)
