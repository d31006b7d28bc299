"""When snapshots are made, in which pieces, and what becomes of one whose commit fails."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, structs

from outfitter_proto.records import Deregister, Register, ResourceRequest
from outfitter_service.core import model as m
from outfitter_service.core.decide import Rules
from outfitter_service.runtime.changelog.snapshots import BETWEEN_TIMES, Pace, Snapshots
from support.core.core_driver import HOST
from support.core.recorded_writer import RecordedWriter

RULES = Rules(writer="host/h", specs={"gpu": m.ResourceSpec(name="gpu", amount=1)}, lease_s=None, retention_s=1e6)
ONE_EACH = Pace(piece_bytes=1)
"""A record in each piece."""


def writer(pace: Pace, **rules: float) -> RecordedWriter:
    """A writer with five workers."""
    recorded = RecordedWriter(structs.replace(RULES, **rules), pace)
    for number in range(5):
        wanted = {"gpu": ResourceRequest(amount=1)}
        recorded.message(Register(host=HOST, worker=f"w{number}", incarnation="1", resources=wanted))
    recorded.commit()
    return recorded


def pieces(log: list[bytes]) -> list[dict[str, Any]]:
    return [line for line in map(msgspec.json.decode, log) if line["type"] == "snapshot"]


def marked(recorded: RecordedWriter) -> bool:
    """Its checkpoint names a whole snapshot."""
    checkpoint = msgspec.json.decode(recorded.topic["@checkpoint/host/h"])
    return "snapshot" in checkpoint


def begin_again(recorded: RecordedWriter) -> None:
    """Another run, after one without history: a snapshot is due."""
    recorded.switch(history=False)
    recorded.commit()
    recorded.switch(history=True)


def test_the_first_commit_has_the_whole_state_where_that_is_small() -> None:
    assert [(piece["part"], piece["last"]) for piece in pieces(writer(Pace()).log)] == [(0, True)]


def test_a_large_state_comes_in_pieces_of_a_bounded_size_one_a_commit() -> None:
    recorded = writer(ONE_EACH)
    begin_again(recorded)
    begun = len(recorded.log)
    for part in range(6):
        assert not marked(recorded)
        recorded.commit()
        assert pieces(recorded.log[begun:])[-1]["part"] == part
    assert marked(recorded)
    told = pieces(recorded.log[begun:])
    assert [len(piece["records"]) for piece in told] == [1] * 6
    assert [piece.get("last", False) for piece in told] == [False] * 5 + [True]
    assert not recorded.snapshots.underway


def test_a_piece_whose_commit_failed_comes_again() -> None:
    recorded = writer(ONE_EACH)
    begin_again(recorded)
    begun = len(recorded.log)
    for _ in range(6):
        recorded.commit()
        recorded.fail_commit()
    assert [piece["part"] for piece in pieces(recorded.log[begun:])] == list(range(6))
    assert recorded.replayed(start=begun) is not None


def test_a_snapshot_whose_first_commit_failed_begins_with_another() -> None:
    recorded = writer(ONE_EACH)
    begin_again(recorded)
    recorded.fail_commit()
    recorded.message(Register(host=HOST, worker="new", incarnation="1"))
    begun = len(recorded.log)
    for _ in range(7):
        recorded.commit()
    assert "h/new/1" in {key for piece in pieces(recorded.log[begun:]) for key in piece["records"]}
    assert recorded.replayed(start=begun) is not None


def test_the_same_manager_goes_on_with_its_snapshot_when_it_takes_the_partition_anew() -> None:
    recorded = writer(ONE_EACH)
    begin_again(recorded)
    begun = len(recorded.log)
    recorded.commit()
    recorded.commit()
    recorded.take_anew()
    for _ in range(4):
        recorded.commit()
    assert marked(recorded)
    assert [piece["part"] for piece in pieces(recorded.log[begun:])] == list(range(6))


def test_another_manager_begins_anew_since_there_may_be_holes() -> None:
    recorded = writer(ONE_EACH)
    begin_again(recorded)
    recorded.commit()
    recorded.commit()
    recorded.crash()
    begun = len(recorded.log)
    recorded.commit()
    assert [piece["part"] for piece in pieces(recorded.log[begun:])] == [0]


def test_a_restart_makes_no_snapshot_while_the_newest_is_young() -> None:
    recorded = writer(Pace())
    recorded.crash()
    recorded.commit()
    assert len(pieces(recorded.log)) == 1
    recorded.pass_time(86_400)
    recorded.commit()
    assert len(pieces(recorded.log)) == 2


def test_much_history_brings_the_next_snapshot_but_never_more_than_a_sixteenth_of_it() -> None:
    recorded = writer(Pace(between_bytes=1), retention_s=0.0)
    begun = len(recorded.log)
    for number in range(100):
        recorded.message(Register(host=HOST, worker=f"more{number}", incarnation="1"))
        recorded.message(Deregister(host=HOST, worker=f"more{number}", incarnation="1"))
        recorded.pass_time(2)
        recorded.commit()
    told = pieces(recorded.log[begun:])
    assert len(told) > 1
    size = sum(len(msgspec.json.encode(piece["records"])) for piece in told)
    assert size < sum(map(len, recorded.log[begun:])) / (BETWEEN_TIMES - 1)


def test_without_history_there_are_no_snapshots() -> None:
    recorded = writer(Pace())
    snapshots = Snapshots("host/h", "one", None)
    assert snapshots.piece(recorded.ledger, recorded.now, commit=1) is None
    checkpoint = structs.replace(recorded.last_checkpoint(), snapshot=recorded.now)
    snapshots.resume(checkpoint)
    assert snapshots.newest(None) is UNSET


def test_a_snapshot_is_given_up_when_somebody_else_wrote_meanwhile_or_its_beginning_is_unsure() -> None:
    recorded = writer(Pace())
    mine = structs.replace(recorded.last_checkpoint(), snapshot=UNSET, instance="one")

    def underway(*, committed: bool) -> Snapshots:
        snapshots = Snapshots("host/h", "one", ONE_EACH)
        piece = snapshots.piece(recorded.ledger, recorded.now, commit=1)
        if committed:
            snapshots.committed(piece, 0)
        assert snapshots.underway
        return snapshots

    for committed, checkpoint, goes_on in [
        (True, mine, True),
        (True, structs.replace(mine, instance="other"), False),
        (True, structs.replace(mine, snapshot=recorded.now), False),
        (False, mine, False),
    ]:
        snapshots = underway(committed=committed)
        snapshots.resume(checkpoint)
        assert snapshots.underway is goes_on
