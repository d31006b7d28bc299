"""Whether a manager lives is judged by its signs of life alone, in one place."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET, structs

from outfitter_proto.bus import Message
from outfitter_proto.codec import encode
from outfitter_proto.records import Beat, Checkpoint, CommitNumber, InputPosition, ManagerIdentity, Owner, Token
from outfitter_proto.signs_of_life import UNKNOWN, Life, SignsOfLife, Verdict, judge, responsible
from outfitter_proto.support.processes import process_owner

START = datetime(2026, 1, 1, tzinfo=UTC)
MANAGER = ManagerIdentity(instance="one", version="1", since=START)


class Clock:
    """The reader's clocks, which the test moves on. `wall` is off by `skew_s`."""

    def __init__(self, skew_s: float = 0.0) -> None:
        self.now = 1000.0
        self.skew_s = skew_s

    @property
    def bus_ms(self) -> int:
        """The bus's own time."""
        return int(START.timestamp() * 1000 + self.now * 1000)

    def signs(self) -> SignsOfLife:
        return SignsOfLife(now_ms=lambda: self.bus_ms + self.skew_s * 1000, monotonic=lambda: self.now)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def checkpoint(name: str = "host/h", instance: str = "one", beat_s: Any = 20.0, partition: int = 0) -> Checkpoint:
    position = InputPosition(topic_id="t", partition=partition, from_=0, to=0)
    return Checkpoint(
        writer=name, instance=instance, cluster="c", scope="host", commit=CommitNumber(1), token=Token(0),
        input=position, at=START, beat_s=beat_s,
    )  # fmt: skip


def sign(
    clock: Clock, name: str = "host/h", instance: str = "one", *, ago_s: float = 0.0, partition: int = 0, **more: Any
) -> Message:
    value = encode(Beat(writer=name, instance=instance, version="1", **more))
    return Message("c.managers", partition, 0, name.encode(), value, clock.bus_ms - int(ago_s * 1000))


@pytest.mark.parametrize(("ago_s", "life"), [(0, Life.LIVES), (59, Life.LIVES), (60, Life.DEAD), (179, Life.DEAD)])
def test_no_sign_within_three_intervals_means_dead(clock: Clock, ago_s: float, life: Life) -> None:
    signs = clock.signs()
    signs.add(sign(clock, ago_s=ago_s))
    signs.has_read(0, clock.now)
    verdict = signs.of(checkpoint())
    assert verdict.life is life
    heard = START + timedelta(seconds=clock.now - ago_s)
    assert verdict.at == (heard if life is Life.DEAD else None)


def test_a_reader_that_has_just_begun_and_finds_none_takes_the_writer_for_dead(clock: Clock) -> None:
    signs = clock.signs()
    signs.has_read(0, clock.now)
    assert signs.of(checkpoint()) == Verdict(Life.DEAD, None)


def test_a_writer_that_promises_no_signs_is_unknown(clock: Clock) -> None:
    signs = clock.signs()
    signs.has_read(0, clock.now)
    assert signs.of(checkpoint(beat_s=UNSET)) == UNKNOWN


def test_without_the_topic_or_the_right_everything_is_unknown(clock: Clock) -> None:
    signs = clock.signs()
    assert signs.of(checkpoint()) == UNKNOWN
    signs.could_not_read(0)
    clock.now += 1000
    assert signs.of(checkpoint()) == UNKNOWN


def test_signs_of_another_instance_do_not_count(clock: Clock) -> None:
    signs = clock.signs()
    signs.add(sign(clock, instance="two"))
    signs.has_read(0, clock.now)
    assert signs.of(checkpoint(instance="one")).life is Life.DEAD
    assert signs.of(checkpoint(instance="two")).life is Life.LIVES


@pytest.mark.parametrize("skew_s", [0.0, -3600.0])
def test_who_sweeps_has_said_so_lately(skew_s: float) -> None:
    clock = Clock()
    signs = clock.signs()
    signs.add(sign(clock, "host/old", sweeps=True, ago_s=100))
    signs.add(sign(clock, "host/stopped", sweeps=True, stopped_at=START))
    signs.add(sign(clock, "host/sweeps-not", sweeps=False))
    clock.skew_s = skew_s  # the bus's clock decides while anybody says something
    signs.add(sign(clock, "host/new", sweeps=True))
    signs.has_read(0, clock.now)
    assert set(signs.sweepers(0, 50)) == {"host/new"}
    assert set(signs.sweepers(0, 101)) == {"host/new", "host/old"}
    clock.now += 70  # and all are silent
    signs.has_read(0, clock.now)
    assert set(signs.sweepers(0, 50)) == set()


def test_of_two_managers_after_a_take_over_each_is_judged_by_its_own_signs(clock: Clock) -> None:
    signs = clock.signs()
    signs.add(sign(clock, instance="old", ago_s=2))
    signs.add(sign(clock, instance="new", ago_s=1))
    signs.add(sign(clock, instance="old", ago_s=0))  # it was fenced, and has not noticed
    signs.has_read(0, clock.now)
    assert signs.of(checkpoint(instance="new")).life is Life.LIVES
    clock.now += 70
    signs.add(sign(clock, instance="old"), live=True)
    signs.has_read(0, clock.now)
    assert signs.of(checkpoint(instance="new")).life is Life.DEAD


@pytest.mark.parametrize("skew_s", [-3600.0, 0.0, 3600.0])
def test_a_reader_that_follows_needs_no_right_clock_once_it_has_seen_a_sign_come(skew_s: float) -> None:
    clock = Clock(skew_s)
    signs = clock.signs()
    for _ in range(10):
        signs.add(sign(clock), live=True)
        for _ in range(20):
            signs.has_read(0, clock.now)
            assert signs.of(checkpoint()).life is Life.LIVES
            clock.now += 1
    lasted = 20
    while signs.of(checkpoint()).life is Life.LIVES:
        clock.now += 1
        lasted += 1
        signs.has_read(0, clock.now)
    assert lasted == 60


def test_the_age_goes_by_the_newest_sign_of_any_manager(clock: Clock) -> None:
    """A reader whose clock is half a minute ahead takes nobody for dead while others are heard."""
    clock.skew_s = 30
    signs = clock.signs()
    signs.add(sign(clock, "host/h", ago_s=45))
    signs.add(sign(clock, "host/other", ago_s=5))
    signs.has_read(0, clock.now)
    assert signs.of(checkpoint()).life is Life.LIVES


HOUR_S = 3600.0


@pytest.mark.parametrize("partition", [0, 1])
@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("skew_s", [0.0, 5.0, -5.0])
def test_a_sign_of_a_clock_that_was_ahead_makes_no_later_sign_look_old(
    partition: int, live: bool, skew_s: float
) -> None:
    """Of the same partition, or of one whose broker's clock was ahead and where nobody has written since."""
    clock = Clock(skew_s)
    signs = clock.signs()
    signs.add(sign(clock, ago_s=20))
    signs.add(sign(clock, "host/other", ago_s=-HOUR_S, partition=partition), live=live)
    for _ in range(10):
        signs.add(sign(clock, sweeps=True), live=live)
        signs.has_read(0, clock.now)
        assert signs.of(checkpoint()).life is Life.LIVES
        assert "host/h" in signs.sweepers(0, 50)
        clock.now += 20
    clock.now += 40
    signs.add(sign(clock, "host/another", sweeps=True), live=live)
    signs.has_read(0, clock.now)
    assert signs.of(checkpoint()) == Verdict(Life.DEAD, START + timedelta(seconds=clock.now - 60))
    assert set(signs.sweepers(0, 50)) == {"host/another"}


def test_a_sign_from_the_future_makes_no_earlier_one_look_old_for_who_follows(clock: Clock) -> None:
    signs = clock.signs()
    signs.add(sign(clock), live=True)
    clock.now += 10
    signs.add(sign(clock, "host/other", ago_s=-HOUR_S), live=True)
    signs.has_read(0, clock.now)
    assert signs.of(checkpoint()).life is Life.LIVES


@pytest.mark.parametrize("live", [False, True])
def test_who_was_heard_last_before_the_clock_was_set_back_is_dead_after_three_intervals(
    clock: Clock, live: bool
) -> None:
    signs = clock.signs()
    signs.add(sign(clock, sweeps=True, ago_s=-HOUR_S), live=live)
    for _ in range(4):
        clock.now += 20
        signs.add(sign(clock, "host/other"), live=live)
    signs.has_read(0, clock.now)
    assert signs.of(checkpoint()).life is Life.DEAD
    assert set(signs.sweepers(0, 60)) == set()


def test_after_an_outage_in_which_the_clock_was_set_back_all_are_judged_anew(clock: Clock) -> None:
    signs = clock.signs()
    signs.add(sign(clock, ago_s=-HOUR_S), live=True)
    signs.has_read(0, clock.now)
    signs.could_not_read(0)
    clock.now += 100
    signs.add(sign(clock, ago_s=5))  # whoever follows reads the last minutes again
    signs.has_read(0, clock.now)
    clock.now += 60
    signs.add(sign(clock), live=True)
    signs.add(sign(clock, "host/other"), live=True)
    signs.has_read(0, clock.now)
    assert signs.of(checkpoint()).life is Life.LIVES
    assert signs.of(checkpoint("host/other")).life is Life.LIVES


@given(
    st.lists(
        st.tuples(
            st.integers(1, 40), st.sampled_from([None, "host/h", "host/i"]), st.sampled_from([0, 0, 0, -90, 4000])
        ),
        max_size=30,
    )
)
def test_whatever_the_clock_of_the_bus_does_who_follows_goes_by_when_signs_came(
    steps: list[tuple[int, str | None, int]],
) -> None:
    """A step: so many seconds pass, somebody may give a sign, and the bus's clock is off by so many seconds then."""
    clock = Clock()
    signs = clock.signs()
    came = dict.fromkeys(["host/h", "host/i"], clock.now)
    for name in came:
        signs.add(sign(clock, name), live=True)
    signs.has_read(0, clock.now)
    for passed_s, name, ahead_s in steps:
        clock.now += passed_s
        if name is not None:
            signs.add(sign(clock, name, ago_s=-ahead_s), live=True)
            came[name] = clock.now
        signs.has_read(0, clock.now)
        last = max(came.values())
        for each, at in came.items():
            silent_s = max(last - at, clock.now - at if clock.now - last >= 60 else 0)
            assert (signs.of(checkpoint(each)).life is Life.DEAD) is (silent_s >= 60), each


def test_an_outage_of_the_bus_is_not_blamed_on_managers(clock: Clock) -> None:
    signs = clock.signs()
    signs.add(sign(clock), live=True)
    signs.has_read(0, clock.now)
    signs.could_not_read(0)
    clock.now += 600
    assert signs.of(checkpoint()) == UNKNOWN
    for _ in range(60):  # whoever could not read waits three intervals
        signs.has_read(0, clock.now)
        assert signs.of(checkpoint()) == UNKNOWN
        clock.now += 1
    signs.has_read(0, clock.now)
    assert signs.of(checkpoint()).life is Life.DEAD


def test_a_reader_that_cannot_read_at_first_waits_too(clock: Clock) -> None:
    signs = clock.signs()
    signs.could_not_read(0)
    clock.now += 5
    signs.has_read(0, clock.now)
    assert signs.of(checkpoint()) == UNKNOWN
    clock.now += 60
    signs.has_read(0, clock.now)
    assert signs.of(checkpoint()).life is Life.DEAD


def test_who_is_dead_stays_dead_through_an_outage_until_there_is_a_sign(clock: Clock) -> None:
    signs = clock.signs()
    signs.add(sign(clock, ago_s=100))
    signs.has_read(0, clock.now)
    dead = signs.of(checkpoint())
    assert dead.life is Life.DEAD
    signs.could_not_read(0)
    assert signs.of(checkpoint()) == dead
    signs.has_read(0, clock.now)
    assert signs.of(checkpoint()) == dead
    signs.add(sign(clock), live=True)
    signs.has_read(0, clock.now)
    assert signs.of(checkpoint()).life is Life.LIVES


def test_a_reader_that_slept_blames_nobody_for_what_it_has_not_read(clock: Clock) -> None:
    signs = clock.signs()
    signs.add(sign(clock), live=True)
    signs.has_read(0, clock.now)
    clock.now += 600
    assert signs.of(checkpoint()).life is Life.LIVES


def test_a_checkpoint_that_comes_before_the_first_sign_is_read_says_nothing_yet(clock: Clock) -> None:
    signs = clock.signs()
    signs.has_read(0, clock.now)
    clock.now += 1
    assert signs.of(checkpoint(), seen_at=clock.now) == UNKNOWN
    clock.now += 1
    signs.has_read(0, clock.now)
    assert signs.of(checkpoint(), seen_at=clock.now - 1).life is Life.DEAD


def test_a_silent_partition_is_judged_by_itself(clock: Clock) -> None:
    signs = clock.signs()
    signs.has_read(0, clock.now)
    signs.could_not_read(1)
    assert signs.of(checkpoint(partition=1)) == UNKNOWN
    assert signs.of(checkpoint(partition=0)).life is Life.DEAD


def test_who_stopped_in_order_is_stopped_since_then_by_its_sign_or_by_the_hosts_record(clock: Clock) -> None:
    signs = clock.signs()
    signs.add(sign(clock, stopped_at=START))
    assert signs.of(checkpoint()) == Verdict(Life.STOPPED, START)
    stopped = structs.replace(MANAGER, stopped_at=START)
    assert judge(clock.signs(), checkpoint(), stopped) == Verdict(Life.STOPPED, START)
    assert judge(clock.signs(), None, MANAGER) == UNKNOWN


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"{}",
        b"\xff",
        b'{"type":"pulse","writer":"host/h"}',
        encode(Beat(writer="host/x", instance="one", version="")),
    ],
)
def test_what_is_no_sign_of_the_writer_of_its_key_is_passed_over(clock: Clock, value: bytes) -> None:
    signs = clock.signs()
    signs.add(Message("c.managers", 0, 0, b"host/h", value, clock.bus_ms))
    signs.add(Message("c.managers", 0, 0, b"host/h", None, clock.bus_ms))
    signs.has_read(0, clock.now)
    assert signs.of(checkpoint()).life is Life.DEAD


def test_the_writer_that_wrote_last_answers_for_a_host() -> None:
    of_host = checkpoint("host/h")
    of_partition = structs.replace(checkpoint("partition/0"), at=START + timedelta(days=1))
    found = {each.writer: each for each in (of_host, of_partition, checkpoint("host/other"))}
    assert responsible(found, "h", 1) == of_partition
    assert responsible({"host/h": of_host}, "h", 1) == of_host
    assert responsible({}, "h", 1) is None


@pytest.fixture
def process() -> Iterator[tuple[subprocess.Popen[bytes], Owner]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as running:
        owner = process_owner(running.pid)
        assert owner is not None
        yield running, owner
        running.kill()


def test_where_the_process_is_seen_to_end_nothing_is_waited_for(
    clock: Clock, process: tuple[subprocess.Popen[bytes], Owner]
) -> None:
    running, owner = process
    signs = clock.signs()
    signs.add(sign(clock, process=owner))
    signs.has_read(0, clock.now)
    assert signs.of(checkpoint()).life is Life.LIVES
    assert signs.runs_here(checkpoint())
    running.kill()
    os.waitid(os.P_PID, running.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie now
    assert signs.of(checkpoint()) == Verdict(Life.DEAD, START + timedelta(seconds=clock.now))
    assert not signs.runs_here(checkpoint())


def test_a_process_of_another_machine_or_namespace_says_nothing(
    clock: Clock, process: tuple[subprocess.Popen[bytes], Owner]
) -> None:
    running, owner = process
    running.kill()
    running.wait()
    for elsewhere in (structs.replace(owner, boot_id="another"), structs.replace(owner, pid_ns=1)):
        signs = clock.signs()
        signs.add(sign(clock, process=elsewhere))
        signs.has_read(0, clock.now)
        assert signs.of(checkpoint()).life is Life.LIVES
        assert not signs.runs_here(checkpoint())
