"""How much the topics must take at least, whatever a worker is called: a manager does not start below that."""

from __future__ import annotations

from datetime import UTC, datetime

from outfitter_proto import topics
from outfitter_proto.names import topics as topic_names
from outfitter_proto.records import (
    Allocation,
    Checkpoint,
    CommitNumber,
    InputPosition,
    Owner,
    ResolvedRequest,
    Source,
    Token,
    Transition,
)
from outfitter_service.core.state.sizes import SHORTEST_REASON, shortest
from outfitter_service.runtime.processor.commit.output import CommitOutput
from simulation.bulk import batch_bytes

NAME, UUID, NUMBER = "n" * 253, "0" * 36, 2**63 - 1
CLUSTER = "c" * 235
NOW = datetime(2026, 1, 31, 12, 0, 0, 123456, tzinfo=UTC)
REASON = "\U0001f4a5" * SHORTEST_REASON
OWNER = Owner(pid=2**22, start_ticks=NUMBER, boot_id="b" * 64, pid_ns=NUMBER, time_ns=NUMBER)


def test_no_end_of_an_allocation_needs_more_than_a_manager_demands_of_the_topics() -> None:
    request = ResolvedRequest(amounts={NAME: NUMBER}, owner=OWNER, lease_s=1e9 / 7, wait_s=1e9 / 7, priority=-NUMBER)
    ended = shortest(
        Allocation(
            host=NAME, worker=NAME, incarnation=NAME, state="ended", request=request, since=NOW,
            writer=f"host/{NAME}", commit=CommitNumber(NUMBER), source=Source(partition=NUMBER, offset=NUMBER),
            token=Token(NUMBER), shared=[NAME], reason=REASON, reason_code="deregistered", wait_until=NOW,
        )
    )  # fmt: skip
    step = Transition(
        at=NOW, host=NAME, worker=NAME, incarnation=NAME, event="deregister", to="ended", from_="releasing",
        explanation=REASON, record=ended, source=ended.source, confirmed=False,
    )  # fmt: skip
    position = InputPosition(topic_id=UUID, partition=NUMBER, from_=NUMBER, to=NUMBER, base=NUMBER, begin=NUMBER)
    checkpoint = Checkpoint(
        writer=f"host/{NAME}", instance=UUID, cluster=CLUSTER, scope="host", commit=CommitNumber(NUMBER),
        token=Token(NUMBER), input=position, at=NOW, machine_id=UUID, boot_id=UUID, snapshot=NOW, pid_ns=NUMBER,
        time_ns=NUMBER, partitions=NUMBER, ledger_id=UUID, ledger_start=NUMBER,
    )  # fmt: skip
    output = CommitOutput(history=True)
    output.put(ended.key, ended)
    output.step(ended.key, step)
    sizes = {topic: batch_bytes(entries) for topic, entries in output.transaction(topic_names(CLUSTER), checkpoint)}
    print(sizes)
    assert topics.SMALLEST_COMMIT_BYTES // 2 < max(sizes.values()) <= topics.SMALLEST_COMMIT_BYTES
