"""When snapshots are made, in which pieces, and what becomes of one whose commit fails."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import msgspec
from msgspec import UNSET, structs

from outfitter_proto.records import Deregister, Register, ResourceRequest
from outfitter_service.core import model as m
from outfitter_service.core.decide import Rules
from outfitter_service.runtime.changelog.snapshots import BETWEEN_TIMES, SMALLEST_PIECE_BYTES, Pace, Snapshots
from support.core_driver import HOST
from support.recorded_writer import RecordedWriter

RULES = Rules(writer="host/h", specs={"gpu": m.ResourceSpec(name="gpu", amount=1)}, lease_s=None, retention_s=1e6)
ONE_EACH = Pace(piece_bytes=1)
"""A record in each piece."""


def writer(pace: Pace, **rules: float) -> RecordedWriter:
    """A writer with five workers."""
    chronicle = RecordedWriter(structs.replace(RULES, **rules), pace)
    for number in range(5):
        wanted = {"gpu": ResourceRequest(amount=1)}
        chronicle.message(Register(host=HOST, worker=f"w{number}", incarnation="1", resources=wanted))
    chronicle.commit()
    return chronicle


def pieces(log: list[bytes]) -> list[dict[str, Any]]:
    return [line for line in map(msgspec.json.decode, log) if line["type"] == "snapshot"]


def marked(chronicle: RecordedWriter) -> bool:
    """Its checkpoint names a whole snapshot."""
    checkpoint = msgspec.json.decode(chronicle.topic["@checkpoint/host/h"])
    return "snapshot" in checkpoint


def begin_again(chronicle: RecordedWriter) -> None:
    """Another run, after one without history: a snapshot is due."""
    chronicle.switch(history=False)
    chronicle.commit()
    chronicle.switch(history=True)


def test_the_first_commit_has_the_whole_state_where_that_is_small() -> None:
    assert [(piece["part"], piece["last"]) for piece in pieces(writer(Pace()).log)] == [(0, True)]


def test_a_large_state_comes_in_pieces_of_a_bounded_size_one_a_commit() -> None:
    chronicle = writer(ONE_EACH)
    begin_again(chronicle)
    begun = len(chronicle.log)
    for part in range(6):
        assert not marked(chronicle)
        chronicle.commit()
        assert pieces(chronicle.log[begun:])[-1]["part"] == part
    assert marked(chronicle)
    told = pieces(chronicle.log[begun:])
    assert [len(piece["records"]) for piece in told] == [1] * 6
    assert [piece.get("last", False) for piece in told] == [False] * 5 + [True]
    assert not chronicle.snapshots.underway


def test_a_piece_whose_commit_failed_comes_again() -> None:
    chronicle = writer(ONE_EACH)
    begin_again(chronicle)
    begun = len(chronicle.log)
    for _ in range(6):
        chronicle.commit()
        chronicle.fail_commit()
    assert [piece["part"] for piece in pieces(chronicle.log[begun:])] == list(range(6))
    assert chronicle.replayed(start=begun) is not None


def test_a_snapshot_whose_first_commit_failed_begins_with_another() -> None:
    chronicle = writer(ONE_EACH)
    begin_again(chronicle)
    chronicle.fail_commit()
    chronicle.message(Register(host=HOST, worker="new", incarnation="1"))
    begun = len(chronicle.log)
    for _ in range(7):
        chronicle.commit()
    assert "h/new/1" in {key for piece in pieces(chronicle.log[begun:]) for key in piece["records"]}
    assert chronicle.replayed(start=begun) is not None


def test_the_same_manager_goes_on_with_its_snapshot_when_it_takes_the_partition_anew() -> None:
    chronicle = writer(ONE_EACH)
    begin_again(chronicle)
    begun = len(chronicle.log)
    chronicle.commit()
    chronicle.commit()
    chronicle.take_anew()
    for _ in range(4):
        chronicle.commit()
    assert marked(chronicle)
    assert [piece["part"] for piece in pieces(chronicle.log[begun:])] == list(range(6))


def test_another_manager_begins_anew_since_there_may_be_holes() -> None:
    chronicle = writer(ONE_EACH)
    begin_again(chronicle)
    chronicle.commit()
    chronicle.commit()
    chronicle.crash()
    begun = len(chronicle.log)
    chronicle.commit()
    assert [piece["part"] for piece in pieces(chronicle.log[begun:])] == [0]


def test_a_restart_makes_no_snapshot_while_the_newest_is_young() -> None:
    chronicle = writer(Pace())
    chronicle.crash()
    chronicle.commit()
    assert len(pieces(chronicle.log)) == 1
    chronicle.pass_time(86_400)
    chronicle.commit()
    assert len(pieces(chronicle.log)) == 2


def test_much_history_brings_the_next_snapshot_but_never_more_than_a_sixteenth_of_it() -> None:
    chronicle = writer(Pace(between_bytes=1), retention_s=0.0)
    begun = len(chronicle.log)
    for number in range(100):
        chronicle.message(Register(host=HOST, worker=f"more{number}", incarnation="1"))
        chronicle.message(Deregister(host=HOST, worker=f"more{number}", incarnation="1"))
        chronicle.pass_time(2)
        chronicle.commit()
    told = pieces(chronicle.log[begun:])
    assert len(told) > 1
    size = sum(len(msgspec.json.encode(piece["records"])) for piece in told)
    assert size < sum(map(len, chronicle.log[begun:])) / (BETWEEN_TIMES - 1)


def test_pieces_that_are_too_large_become_smaller_and_are_put_off_at_last() -> None:
    chronicle = writer(Pace())
    snapshots = Snapshots("host/h", "one", Pace(piece_bytes=8 * SMALLEST_PIECE_BYTES))
    now = chronicle.now
    first = snapshots.piece(chronicle.ledger, now, commit=1)
    assert snapshots.shrink(first, now)
    second = snapshots.piece(chronicle.ledger, now, commit=1)
    assert second is not None
    assert snapshots.shrink(second, now)
    assert snapshots.piece(chronicle.ledger, now, commit=1) is None
    assert not snapshots.underway
    assert snapshots.newest(None) is UNSET
    assert not snapshots.shrink(None, now)
    assert snapshots.piece(chronicle.ledger, now + timedelta(days=2), commit=1) is not None


def test_without_history_there_are_no_snapshots() -> None:
    chronicle = writer(Pace())
    snapshots = Snapshots("host/h", "one", None)
    assert snapshots.piece(chronicle.ledger, chronicle.now, commit=1) is None
    checkpoint = structs.replace(chronicle.last_checkpoint(), snapshot=chronicle.now)
    snapshots.adopt(checkpoint)
    assert snapshots.newest(None) is UNSET


def test_a_snapshot_is_given_up_when_somebody_else_wrote_meanwhile_or_its_beginning_is_unsure() -> None:
    chronicle = writer(Pace())
    mine = structs.replace(chronicle.last_checkpoint(), snapshot=UNSET, instance="one")

    def underway(*, committed: bool) -> Snapshots:
        snapshots = Snapshots("host/h", "one", ONE_EACH)
        piece = snapshots.piece(chronicle.ledger, chronicle.now, commit=1)
        if committed:
            snapshots.settle(piece, 0)
        assert snapshots.underway
        return snapshots

    for committed, checkpoint, goes_on in [
        (True, mine, True),
        (True, structs.replace(mine, instance="other"), False),
        (True, structs.replace(mine, snapshot=chronicle.now), False),
        (False, mine, False),
    ]:
        snapshots = underway(committed=committed)
        snapshots.adopt(checkpoint)
        assert snapshots.underway is goes_on
