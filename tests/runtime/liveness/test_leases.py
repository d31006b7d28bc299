"""Leases: deadlines that move, and a heap that does not grow."""

from hypothesis import given, settings
from hypothesis import strategies as st

from outfitter_service.runtime.liveness.leases import Leases


def test_a_lease_is_due_when_length_and_grace_are_over() -> None:
    leases = Leases(grace_s=2)
    leases.start("a", 10, now=0)
    assert leases.due(11.9) == []
    assert leases.due(12) == ["a"]


def test_a_sign_of_life_gives_one_whole_lease() -> None:
    leases = Leases(grace_s=0)
    leases.start("a", 10, now=0)
    leases.renew("a", now=9)
    assert leases.due(18.9) == []
    assert leases.due(19) == ["a"]


def test_what_is_due_stays_due_until_dropped_or_renewed() -> None:
    leases = Leases(grace_s=0)
    leases.start("a", 1, now=0)
    assert leases.due(5) == ["a"]
    assert leases.due(6) == ["a"]
    leases.renew("a", now=6)
    assert leases.due(6) == []
    leases.drop("a")
    assert leases.due(100) == []


def test_renewing_what_has_no_lease_does_nothing() -> None:
    leases = Leases(grace_s=0)
    leases.renew("a", now=0)
    assert "a" not in leases


def test_a_shorter_lease_begun_anew_is_due_at_its_own_time() -> None:
    leases = Leases(grace_s=0)
    leases.start("a", 100, now=0)
    leases.start("a", 1, now=0)
    assert leases.due(1) == ["a"]


def test_after_an_outage_everybody_gets_one_whole_lease() -> None:
    leases = Leases(grace_s=0)
    leases.start("a", 10, now=0)
    leases.start("b", 20, now=0)
    leases.renew_all(now=1000)
    assert leases.due(1009) == []
    assert leases.due(1010) == ["a"]


def test_long_leases_that_come_and_go_leave_nothing_behind() -> None:
    leases = Leases(grace_s=0)
    for i in range(10_000):
        leases.start(f"w{i}", 86_400, now=i)
        leases.start(f"w{i}", 86_400, now=i)
        leases.drop(f"w{i}")
    assert len(leases) == 0
    assert len(leases._heap) < 200


def test_of_many_that_are_due_some_are_told_at_once_and_each_once_in_a_round() -> None:
    leases = Leases(grace_s=0)
    for number in range(25):
        leases.start(f"w{number:02}", 1, now=0)
    for now in (5, 6):
        rounds = [leases.due(now, 10)]
        while leases.is_round_open:
            rounds.append(leases.due(now, 10))
        assert [len(told) for told in rounds] == [10, 10, 5]
        assert sorted(key for told in rounds for key in told) == sorted(leases.keys())


def test_those_of_which_nothing_comes_keep_nobody_waiting() -> None:
    leases = Leases(grace_s=0)
    for number in range(20):
        leases.start(f"w{number:02}", 1, now=0)
    assert len(leases.due(2, 5)) == 5
    leases.start("later", 1, now=2)
    assert "later" in {key for _ in range(5) for key in leases.due(3, 5)}


def test_renewed_leases_are_looked_at_some_at_a_time_as_well() -> None:
    leases, renewed = Leases(grace_s=0), 0
    for number in range(30):
        leases.start(f"w{number:02}", 1, now=0)
        leases.renew(f"w{number:02}", now=9)

    class Deadlines(dict[str, float]):
        def __getitem__(self, key: str) -> float:
            nonlocal renewed
            renewed += 1
            return super().__getitem__(key)

    leases._deadline = Deadlines(leases._deadline)
    assert leases.due(5, 10) == []
    assert (leases.is_round_open, renewed) == (True, 20)  # each is asked for its deadline, and then looked at then
    while leases.is_round_open:
        assert leases.due(5, 10) == []
    assert renewed == 60


def test_one_that_was_told_ended_and_began_anew_is_told_once_in_the_next_round() -> None:
    leases = Leases(grace_s=1)
    leases.start("a", 1, now=0)
    assert (leases.due(2, 1), leases.is_round_open) == (["a"], False)
    leases.drop("a")
    leases.start("a", 1, now=2)
    assert (leases.due(4, 1), leases.is_round_open) == (["a"], False)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["start", "renew", "postpone", "drop", "due"]), st.sampled_from("abc"), st.integers(1, 9)
        ),
        max_size=60,
    ),
    st.sampled_from([None, 1, 2]),
)
def test_due_is_what_a_plain_list_of_deadlines_says(steps: list[tuple[str, str, int]], most: int | None) -> None:
    leases = Leases(grace_s=1)
    lengths: dict[str, int] = {}
    deadlines: dict[str, float] = {}
    now = 0.0
    for what, key, number in steps:
        if what == "start":
            leases.start(key, number, now)
            lengths[key], deadlines[key] = number, now + number + 1
        elif what == "renew":
            leases.renew(key, now)
            if key in lengths:
                deadlines[key] = now + lengths[key] + 1
        elif what == "postpone":
            leases.postpone(number)
            deadlines = {each: at + number for each, at in deadlines.items()}
        elif what == "drop":
            leases.drop(key)
            lengths.pop(key, None)
            deadlines.pop(key, None)
        else:
            now += number
            told = leases.due(now, most)
            while leases.is_round_open:
                assert most is not None
                told += leases.due(now, most)
            assert sorted(told) == sorted(key for key, at in deadlines.items() if at <= now)
