"""Makes all checks on all partitions of a reading. It is pure: the same reading gives the same report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from outfitter_verify import wire
from outfitter_verify.history import earlier
from outfitter_verify.history.steps import History
from outfitter_verify.ledger.cordons import Cordons
from outfitter_verify.ledger.order import Order
from outfitter_verify.ledger.walk import LedgerWalk
from outfitter_verify.ledger.writers import Commits, VisibleCommit, VisibleWriter, Written
from outfitter_verify.logs import Log, Partition, Place, Reading
from outfitter_verify.registrations.answers import Answers, Input
from outfitter_verify.registrations.releases import Releases
from outfitter_verify.report import Findings, Report


def check(reading: Reading) -> Report:
    """Check all promises on `reading`, in one pass, partition by partition."""
    findings = Findings()
    elsewhere: dict[tuple[str, str], _Holder] = {}
    for logs in reading.logs:
        ledger = _partition(reading, logs, findings)
        _compare(ledger, elsewhere, findings)
    return findings.report(reading.cluster)


class _Holder(NamedTuple):
    """The holder of a device at the end of a partition, whether it holds it alone, and the record's place."""

    key: str
    alone: bool
    place: Place


def _compare(ledger: LedgerWalk, elsewhere: dict[tuple[str, str], _Holder], findings: Findings) -> None:
    """Check that no device is held in two partitions, because a host has one partition.

    `elsewhere`: the holders in other partitions, by the host's and the device's names.
    """
    reported: set[tuple[str, str]] = set()
    for host, name, written, alone in ledger.holders():
        holder = _Holder(written.record.key, alone, ledger.log.place(written.offset))
        first = elsewhere.setdefault((host, name), holder)
        two = first.place.partition != holder.place.partition and first.key != holder.key
        if two and (alone or first.alone) and (first.key, holder.key) not in reported:
            reported.add((first.key, holder.key))
            other = f"which {first.key} holds in partition {first.place.partition}"
            what = f"{holder.key} holds {name} of host {host}, {other}"
            findings.wrong("exclusivity", holder.place, what, first.place)


def _partition(reading: Reading, logs: Partition, findings: Findings) -> LedgerWalk:
    findings.begin_partition(logs)
    for begin, end in logs.registrations.unseen:
        for name in ("answers", "dead-letters"):
            findings.note_partial(
                name, f"{logs.registrations.place(begin)} to {end - 1} not looked at: the client cannot read them"
            )
    topic_id = reading.topic_id
    inputs = _inputs(logs.allocations, topic_id)
    unseen = max(
        (each.unseen for each in _checkpoints(logs.allocations) if topic_id in (None, each.topic_id)), default=0
    )
    answers = Answers(logs, inputs, partitions=reading.partitions, unseen=unseen, findings=findings)
    releases = Releases(logs.registrations, answers.messages, findings)
    of_this_ledger = _of_this_ledger(logs, findings)
    history = History(of_this_ledger, logs.allocations, partitions=reading.partitions, findings=findings)
    commits = Commits(logs.allocations, logs.registrations, reading, findings)

    def on_commit(writer: VisibleWriter, commit: VisibleCommit, records: list[Written]) -> None:
        if topic_id is None or commit.checkpoint.topic_id == topic_id:
            read = answers.commit(ledger, writer, commit, records)
            if read is not None:
                releases.commit(ledger, commit, records, *read)

    order = Order(logs.allocations, commits, findings)
    cordons = Cordons(logs.allocations, commits, logs.control, findings)
    ledger = LedgerWalk(
        logs.allocations, commits, order, cordons, partitions=reading.partitions, findings=findings, on_commit=on_commit
    )
    ledger.walk()
    history.compare(ledger)
    answers.finish(ledger, history.sources)
    releases.finish(ledger)
    if logs.allocations.start > 0:
        findings.note_partial("steps", "the ledger does not begin at its first record")
    return ledger


def _of_this_ledger(logs: Partition, findings: Findings) -> Log:
    """The history without what it has of an earlier ledger."""
    log = logs.history
    ids = {each.ledger_id for each in _checkpoints(logs.allocations) if each.ledger_id is not None}
    begin = earlier.begin(log, logs.allocations, ids)
    if begin == 0:
        return log
    findings.note_partial("history", f"not looked at before {log.place(begin)}: an earlier ledger")
    return log._replace(records=[record for record in log.records if record.offset >= begin])


def _checkpoints(ledger: Log) -> Iterator[wire.Checkpoint]:
    for record in ledger.records:
        if record.value is None or record.key is None or not record.key.startswith(b"@checkpoint/"):
            continue
        try:
            yield wire.checkpoint(wire.parse(record.value))
        except (wire.DamagedError, AttributeError, RecursionError):
            continue  # the walk reports it


def _inputs(ledger: Log, topic_id: str | None) -> dict[str, Input]:
    """Each writer's newest input. `topic_id`: the id of the topic that exists now."""
    inputs: dict[str, Input] = {}
    for checkpoint in _checkpoints(ledger):
        before = inputs.get(checkpoint.writer)
        source = checkpoint.topic_id, checkpoint.base
        same = before is None or (before.topic_id, before.base) == source
        same = same and topic_id in (None, checkpoint.topic_id)
        only = same and (before is None or before.only)
        inputs[checkpoint.writer] = Input(*source, checkpoint.begin, only)
    return inputs
