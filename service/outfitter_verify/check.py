"""All checks over all partitions of a reading. Pure: the same reading gives the same report."""

from __future__ import annotations

from outfitter_verify import wire
from outfitter_verify.answers import Answers, Input
from outfitter_verify.history import History
from outfitter_verify.ledger import Ledger
from outfitter_verify.logs import Log, Partition, Reading
from outfitter_verify.order import Order
from outfitter_verify.releases import Releases
from outfitter_verify.report import Findings, Report
from outfitter_verify.writers import Commit, Commits, Writer, Written


def check(reading: Reading) -> Report:
    """Verify the promises on what `reading` holds. It is gone through once, partition by partition."""
    findings = Findings()
    for logs in reading.logs:
        _partition(reading, logs, findings)
    return findings.report(reading.cluster)


def _partition(reading: Reading, logs: Partition, findings: Findings) -> None:
    findings.logs = {log.topic: log for log in logs}
    inputs = _inputs(logs.allocations)
    topic_id = reading.topic_id
    answers = Answers(logs, inputs, partitions=reading.partitions, findings=findings)
    releases = Releases(logs.registrations, answers.said, findings)
    history = History(logs.history, partitions=reading.partitions, findings=findings)
    commits = Commits(
        logs.allocations,
        logs.registrations,
        cluster=reading.cluster,
        partitions=reading.partitions,
        topic_id=topic_id,
        markers=reading.markers,
        findings=findings,
    )

    def settled(writer: Writer, commit: Commit, records: list[Written]) -> None:
        if topic_id is None or commit.checkpoint.topic_id == topic_id:
            read = answers.commit(ledger, writer, commit, records)
            if read is not None:
                releases.commit(ledger, commit, records, *read)

    order = Order(findings)
    ledger = Ledger(logs.allocations, commits, order, partitions=reading.partitions, findings=findings, settled=settled)
    ledger.walk()
    history.compare(ledger)
    answers.finish(ledger, history.sources)
    releases.finish(ledger)
    if logs.allocations.start > 0:
        findings.part("steps", "the ledger does not begin at its first record")


def _inputs(ledger: Log) -> dict[str, Input]:
    """Each writer's newest input."""
    found: dict[str, Input] = {}
    for record in ledger.records:
        if record.value is None or record.key is None or not record.key.startswith(b"@checkpoint/"):
            continue
        try:
            here = wire.checkpoint(wire.parse(record.value))
        except (wire.DamagedError, AttributeError):
            continue  # the walk reports it
        before = found.get(here.writer)
        same = before is None or (before.topic_id, before.base) == (here.topic_id, here.base)
        found[here.writer] = Input(here.topic_id, here.base, here.begin, same and (before is None or before.only))
    return found
