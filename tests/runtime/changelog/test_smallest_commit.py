"""Where a manager is ready, the topics take each end of an allocation, however large its grant is."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from outfitter_proto import topics
from outfitter_proto.names import topics as topic_names
from outfitter_proto.records import Allocation, Checkpoint, CommitNumber, InputPosition, Token
from outfitter_service.core import model as m
from outfitter_service.core.state.ledger import PutAllocation
from outfitter_service.core.state.sizes import LONGEST_REASON, MAX_BYTES
from outfitter_service.runtime.changelog.encoding import Transaction
from outfitter_service.runtime.processor.tenure import AHEAD_SHARE
from simulation.bulk import batch_bytes
from support.core.core_driver import CoreDriver

NAME, UUID, NUMBER = "n" * 253, "0" * 36, 2**63 - 1
NOW = datetime(2026, 1, 31, 12, 0, 0, 123456, tzinfo=UTC)


def checkpoint() -> Checkpoint:
    """The largest one: its hosts that are ahead fill their share."""
    ahead = {f"{number:04}{NAME}"[:253]: NUMBER for number in range(MAX_BYTES // AHEAD_SHARE // 270)}
    position = InputPosition(
        topic_id=UUID, partition=NUMBER, from_=NUMBER, to=NUMBER, base=NUMBER, begin=NUMBER, ahead=ahead
    )
    return Checkpoint(
        writer=f"host/{NAME}", instance=UUID, cluster="c" * 235, scope="host", commit=CommitNumber(NUMBER),
        token=Token(NUMBER), input=position, at=NOW, machine_id=UUID, boot_id=UUID, snapshot=NOW, pid_ns=NUMBER,
        time_ns=NUMBER, partitions=NUMBER, ledger_id=UUID, ledger_start=NUMBER, lease_grace_s=1e9 / 7, beat_s=1e9 / 7,
    )  # fmt: skip


def largest_grant(**spec: bool) -> CoreDriver:
    """A host on which one worker has as much as a record takes."""
    core = CoreDriver(m.ResourceSpec(name="gpu", **spec))
    core.report(*(m.KnownDevice(id=f"g{n}", properties={"note": "x" * 1000}) for n in range(1000)))
    amount = 1000
    while core.register(f"w{amount}", amount, incarnation="1").state not in ("allocated", "preparing"):
        amount -= 1
    assert len(core.decisions[-1].changes[-1].value) > MAX_BYTES * 97 // 100
    return core


@pytest.mark.parametrize("confirms", [False, True])
def test_every_end_fits_where_a_manager_is_ready(confirms: bool) -> None:
    core = largest_grant(confirms=confirms)
    [holder] = core.host_state.holders.live.values()
    reason = "\U0001f4a5" * LONGEST_REASON
    core.deregister(holder.worker, reason=reason)
    if confirms:
        core.say(m.ReleaseDelayed(allocation=holder.key, token=holder.token, reason=reason))
        core.say(m.Unprepared(allocation=holder.key, token=holder.token, confirmed=True, survivors=reason))
    assert core.ledger.allocations[holder.key].state == "ended"
    for decision in core.decisions:
        transaction = Transaction()
        for change in decision.changes:
            if isinstance(change, PutAllocation):
                transaction.put(change.key, change.record, change.value)
        for key, step in decision.history:
            transaction.step(key, step)
        for topic, entries in transaction.entries(topic_names("c" * 235), checkpoint()):
            assert max(batch_bytes([entry]) for entry in entries) <= topics.LEAST_BATCH_BYTES
            assert "history" in topic or batch_bytes(entries) <= topics.LEAST_BATCH_BYTES
    assert isinstance(core.ledger.allocations[holder.key], Allocation)
