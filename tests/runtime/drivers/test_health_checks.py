"""A health script's words beside its driver's, in virtual time: what counts, since when, and what the core is told."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import anyio
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from outfitter_proto.records import Health
from outfitter_service.core import model as m
from outfitter_service.runtime.drivers import health_checks
from outfitter_service.runtime.drivers.health_checks import HealthChecks, Opinion, merged
from outfitter_service.runtime.drivers.health_script import (
    LONGEST_WORDS,
    MOST_BYTES,
    WELL,
    HealthScript,
    Word,
    first_line,
)
from outfitter_service.runtime.drivers.translation import DriverCallError
from simulation.loop import START_S, running

SCRIPT = HealthScript(path="/check", interval_s=30, timeout_s=10)
HOT = Word(Health.UNHEALTHY, "91 degrees")
Seen = dict[str, tuple[Health, str | None]]
Says = Callable[[str, float], Word | str | None]
"""What the script says of a device at a time: a word, why it fails, or None: it hangs."""


def device(name: str, health: Health = Health.HEALTHY, reason: str | None = None) -> m.KnownDevice:
    return m.KnownDevice(id=name, properties={"index": name}, health=health, reason=reason)


def named(*devices: m.KnownDevice, failure: str | None = None) -> m.DriverReport:
    why = None if failure is None else m.DriverFailure(reason=failure)
    return m.DriverReport(host="h", resource="r", devices=devices, failure=why)


def told(
    reports: Iterable[tuple[float, m.DriverReport]], says: Says, *, within_s: float = 300.0, takes_s: float = 0.1
) -> list[tuple[float, m.DriverReport]]:
    """What the core is told, and when, if the driver reports at these times. `takes_s`: a run takes so long."""
    said: list[tuple[float, m.DriverReport]] = []

    def emit(report: m.DriverReport) -> None:
        if not said or said[-1][1] != report:
            said.append((anyio.current_time() - START_S, report))

    async def ask(asked: m.KnownDevice) -> Word:
        now = anyio.current_time() - START_S
        answer = says(asked.id, now)
        await anyio.sleep(takes_s if answer is not None else SCRIPT.timeout_s)
        if isinstance(answer, Word):
            return answer
        raise DriverCallError(m.DriverFailure(reason=answer or "did not end"))

    async def run() -> None:
        checks = HealthChecks(SCRIPT, ask, emit, structlog.get_logger())
        with anyio.move_on_after(within_s):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(checks.run)
                for at, report in reports:
                    await anyio.sleep_until(START_S + at)
                    checks.report(report)

    with running(0) as loop:
        loop.run_until_complete(run())
    return said


def seen(report: m.DriverReport) -> Seen:
    return {each.id: (each.health, each.reason) for each in report.devices}


def at(said: list[tuple[float, m.DriverReport]], time: float) -> Seen:
    """What was known of the devices at a time."""
    return seen([report for when, report in said if when <= time][-1])


def test_devices_are_reported_only_once_the_script_has_spoken_of_all() -> None:
    """A restart would else make each device unknown, and tell whoever holds one."""
    said = told([(0, named(device("a"), device("b")))], lambda name, _: HOT if name == "b" else WELL)
    assert len(said) == 1
    assert seen(said[0][1]) == {
        "a": (Health.HEALTHY, None),
        "b": (Health.UNHEALTHY, "health script: 91 degrees"),
    }


@pytest.mark.parametrize("number", [8, 16])
def test_a_slow_script_makes_no_device_unknown_at_a_start(number: int) -> None:
    """Its runs take turns. Whoever holds such a device would be told, and who waits would wait for it to be well."""
    many = [device(str(each)) for each in range(number)]
    said = told([(0, named(*many))], lambda _, __: WELL, takes_s=0.9 * SCRIPT.timeout_s)
    assert {health for _, report in said for health, _ in seen(report).values()} == {Health.HEALTHY}


def test_a_script_that_hangs_at_first_keeps_nobody_waiting_for_long() -> None:
    many = [device(str(number)) for number in range(40)]
    said = told([(0, named(*many))], lambda _, __: None)
    first, report = said[0]
    longest = health_checks.FIRST_TURNS * SCRIPT.timeout_s + health_checks.FIRST_GRACE_S
    assert longest <= first <= longest + SCRIPT.timeout_s
    assert {health for health, _ in seen(report).values()} == {Health.UNKNOWN}
    assert seen(report)["39"][1] == "health script: has not looked at it yet"


def test_a_driver_that_fails_before_the_first_words_is_told_at_once() -> None:
    said = told([(0, named(failure="no nvidia-smi"))], lambda _, __: WELL)
    assert [(round(when), report.failure is not None) for when, report in said] == [(0, True)]


def test_a_new_device_is_asked_about_at_once_and_reported_once_the_script_has_spoken_of_it() -> None:
    said = told([(0, named(device("a"))), (10, named(device("a"), device("b")))], lambda _, __: WELL)
    assert at(said, 10) == {"a": (Health.HEALTHY, None)}
    assert at(said, 10.5) == {"a": (Health.HEALTHY, None), "b": (Health.HEALTHY, None)}
    assert len(said) == 2


def test_news_of_other_devices_waits_for_no_new_one() -> None:
    reports = [(0.0, named(device("a"))), (10.0, named(device("a", Health.UNHEALTHY, "ECC"), device("b")))]
    said = told(reports, lambda name, _: None if name == "b" else WELL, within_s=40)
    assert at(said, 10) == {"a": (Health.UNHEALTHY, "ECC")}
    assert at(said, 39)["b"][0] == Health.UNKNOWN


def test_a_device_falls_ill_and_heals_by_the_scripts_word() -> None:
    said = told([(0, named(device("a")))], lambda _, now: HOT if 40 <= now < 100 else WELL)
    assert at(said, 39)["a"] == (Health.HEALTHY, None)
    assert at(said, 61)["a"] == (Health.UNHEALTHY, "health script: 91 degrees")
    assert at(said, 121)["a"] == (Health.HEALTHY, None)
    assert len(said) == 3


def test_a_reason_that_differs_in_each_run_is_told_once() -> None:
    said = told([(0, named(device("a")))], lambda _, now: Word(Health.UNHEALTHY, f"{now:g} degrees"))
    assert len(said) == 1


@pytest.mark.parametrize("runs", [1, 2])
def test_a_script_that_fails_once_or_twice_changes_nothing(runs: int) -> None:
    said = told([(0, named(device("a")))], lambda _, now: "broken" if 20 <= now < 20 + 30 * runs else WELL)
    assert len(said) == 1


@pytest.mark.parametrize("answer", ["broken", None])
def test_a_script_that_fails_again_and_again_makes_what_was_well_unknown_and_leaves_what_is_ill(
    answer: str | None,
) -> None:
    def says(name: str, now: float) -> Word | str | None:
        return answer if now >= 20 else HOT if name == "ill" else WELL

    said = told([(0, named(device("well"), device("ill")))], says)
    assert at(said, 80)["well"] == (Health.HEALTHY, None)
    health, reason = at(said, 299)["well"]
    assert health == Health.UNKNOWN
    assert reason is not None
    assert reason.startswith("health script: has failed since 2")
    assert reason.endswith(answer or "did not end")
    assert at(said, 299)["ill"] == (Health.UNHEALTHY, "health script: 91 degrees")
    assert len(said) == 2


def test_a_script_that_has_never_answered_calls_nothing_healthy() -> None:
    said = told([(0, named(device("a")))], lambda _, __: "broken")
    assert {health for _, report in said for health, _ in seen(report).values()} == {Health.UNKNOWN}


def test_one_hanging_device_leaves_the_word_of_the_others() -> None:
    devices = [device(str(number)) for number in range(8)]

    def says(name: str, now: float) -> Word | None:
        if name == "0" and now >= 20:
            return None
        return HOT if name == "1" and now >= 50 else WELL

    said = told([(0, named(*devices))], says)
    assert at(said, 62)["1"] == (Health.UNHEALTHY, "health script: 91 degrees")
    assert at(said, 299)["0"][0] == Health.UNKNOWN
    assert {at(said, 299)[str(number)][0] for number in range(2, 8)} == {Health.HEALTHY}


def test_what_the_script_says_while_the_driver_fails_is_told_with_the_failure() -> None:
    reports = [(0.0, named(device("a"))), (20.0, named(failure="gone"))]
    said = told(reports, lambda _, now: HOT if now >= 40 else WELL)
    last = said[-1][1]
    assert seen(last)["a"] == (Health.UNHEALTHY, "health script: 91 degrees")
    assert last.failure is not None


def test_a_device_that_the_driver_names_no_longer_is_forgotten() -> None:
    reports = [(0.0, named(device("a"))), (5.0, named()), (10.0, named(device("a")))]
    said = told(reports, lambda _, now: HOT if now < 5 else WELL)
    assert at(said, 5) == {}
    assert at(said, 299)["a"] == (Health.HEALTHY, None)


def test_a_device_that_is_named_twice_is_asked_about_once() -> None:
    asked: list[str] = []

    def says(name: str, _: float) -> Word:
        asked.append(name)
        return HOT

    said = told([(0, named(device("a"), device("a")))], says, within_s=20)
    assert asked == ["a"]
    assert [each.health for each in said[0][1].devices] == [Health.UNHEALTHY] * 2


def test_ten_thousand_devices_of_a_broken_script_are_a_few_reports() -> None:
    many = [device(str(number)) for number in range(10_000)]
    said = told([(0, named(*many))], lambda _, now: "broken" if now > 1 else WELL, within_s=60, takes_s=0.001)
    assert len(said) <= 60


HEALTHS = st.sampled_from(Health)
SEVERITY = {Health.HEALTHY: 0, Health.UNKNOWN: 1, Health.UNHEALTHY: 2}


@given(of_driver=HEALTHS, of_script=HEALTHS)
def test_a_device_is_as_ill_as_the_worse_word_and_both_reasons_are_told(of_driver: Health, of_script: Health) -> None:
    reason = None if of_driver == Health.HEALTHY else "ECC"
    word = WELL if of_script == Health.HEALTHY else Word(of_script, "hot")
    found = merged(device("a", of_driver, reason), word)
    assert SEVERITY[found.health] == max(SEVERITY[of_driver], SEVERITY[of_script])
    assert ("ECC" in (found.reason or "")) == (of_driver != Health.HEALTHY)
    assert ("health script: hot" in (found.reason or "")) == (of_script != Health.HEALTHY)
    assert (found.reason is None) == (found.health == Health.HEALTHY)


RUN = st.sampled_from([WELL, HOT, "broken"])


@given(runs=st.lists(RUN, max_size=12))
def test_what_counts_is_the_last_word_until_the_script_has_failed_three_times(runs: list[Word | str]) -> None:
    opinion = Opinion(awaited_until=0.0)
    for run in runs:
        opinion.said(run) if isinstance(run, Word) else opinion.failed(run)
    words = [run for run in runs if isinstance(run, Word)]
    failed = next((count for count, run in enumerate(reversed(runs)) if isinstance(run, Word)), len(runs))
    if not words or (words[-1].health == Health.HEALTHY and failed >= health_checks.FAILED_RUNS):
        expected = Health.UNKNOWN
    else:
        expected = words[-1].health
    assert opinion.word.health == expected


@given(st.binary(max_size=600))
def test_a_line_of_any_bytes_is_short_and_printable_and_says_something_or_nothing(output: bytes) -> None:
    line = first_line(output)
    assert len(line) <= LONGEST_WORDS
    assert line == line.strip() or len(line) == LONGEST_WORDS
    assert not line or line.isprintable()


@pytest.mark.parametrize("output", [b"\n" * MOST_BYTES + b"hot", b" " * MOST_BYTES + b"hot"])
def test_a_line_behind_much_output_is_not_looked_for(output: bytes) -> None:
    """To look through a mebibyte would keep the manager from everything else."""
    assert first_line(output) == ""


def test_a_long_line_is_cut_wherever_its_characters_end() -> None:
    assert first_line("°".encode() * MOST_BYTES) == "°" * LONGEST_WORDS
    assert first_line(b"x" + "°".encode() * MOST_BYTES) == "x" + "°" * (LONGEST_WORDS - 1)
