"""`outfitter history` and `outfitter replay`, from outside, on a real manager that is killed in between."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import pytest

from outfitter_proto.bus import Entry, connect
from outfitter_proto.names import topics
from outfitter_proto.partitioning import partition_of
from outfitter_service.query import ledger_view
from support.checker.verdict import verified_with_replay
from support.managers.process import Manager, StartManager, files_config

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]


class Past(NamedTuple):
    """A manager with something behind it: `status` as it was at `moment`, before it was killed, and what came then."""

    manager: Manager
    moment: datetime
    status: list[dict[str, Any]]


def say(manager: Manager, kind: str, worker: str, incarnation: str | None = "1", **fields: Any) -> None:
    """What a worker would say; it has no lease."""

    async def publish() -> None:
        async with connect(manager.bus_url) as bus:
            topic = topics(manager.cluster).registrations
            partition = partition_of(manager.host, (await bus.topic(topic)).partitions)
            await bus.publish(topic, partition, Entry(manager.host.encode(), json.dumps(body).encode()))

    body = {"type": kind, "host": manager.host, "worker": worker, "incarnation": incarnation, **fields}
    anyio.run(publish)


def register(manager: Manager, worker: str, incarnation: str = "1") -> None:
    say(manager, "register", worker, incarnation, lease_s=None)


def records(manager: Manager) -> list[dict[str, Any]]:
    """As `status --json` prints them."""

    async def look() -> list[dict[str, Any]]:
        async with connect(manager.bus_url) as bus:
            found = await ledger_view.read(bus, manager.cluster, manager.host)
            return [json.loads(stored.wire) for stored in found.allocations]

    return anyio.run(look)


def wait_for(manager: Manager, **states: str | None) -> None:
    """Until the newest record of each worker is in that state; None: there is none."""

    def look() -> bool:
        newest = {record["worker"]: record["state"] for record in records(manager)}
        return all(newest.get(worker) == state for worker, state in states.items())

    manager.wait_for(look)


def at_rest(manager: Manager) -> tuple[datetime, list[dict[str, Any]]]:
    """A moment at which nothing changed, and what `status` said just then."""
    found: list[Any] = []

    def look() -> bool:
        before, moment = records(manager), datetime.now(UTC)
        found[:] = [moment, before]
        return records(manager) == before

    manager.wait_for(look)
    return found[0], found[1]


def started(manager: Manager) -> None:
    """Start it, and wait until its driver has reported: what is decided before that is looked at again then."""
    manager.start()
    manager.wait_for(lambda: manager.metric("outfitter_devices", resource="gpu") == 2)


def live_through(manager: Manager) -> Past:
    """Workers come, wait and go; the manager is killed, and more come and go."""
    for worker in "abcde":
        register(manager, worker)
    wait_for(manager, b="allocated", e="pending")
    say(manager, "deregister", "a")
    wait_for(manager, c="allocated")  # it has what `a` had, whose record is forgotten soon
    moment, status = at_rest(manager)
    manager.kill9()
    started(manager)
    register(manager, "d", "later")
    say(manager, "deregister", "b", reason="enough")
    wait_for(manager, a=None, b=None, d="pending", e="allocated")  # those that ended are forgotten
    manager.kill9()
    started(manager)
    register(manager, "f")
    wait_for(manager, f="pending")
    return Past(manager, moment, status)


@pytest.fixture(scope="module", params=["embedded", pytest.param("kafka", marks=pytest.mark.kafka)])
def past(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Past]:
    folder = tmp_path_factory.mktemp("past")
    options: dict[str, Any] = {}
    if request.param == "kafka":
        broker = request.getfixturevalue("kafka_broker")
        options = {"bus": broker.url, "cluster": broker.new_cluster()}
    config = files_config(folder / "gpus", extra='ended-retention = "4s"')
    manager = Manager(folder, config, host=f"t-{secrets.token_hex(5)}", **options)
    if request.param == "kafka":
        assert manager.outfitter("topics", "create", "--partitions", "3").returncode == 0
    try:
        started(manager)
        yield live_through(manager)
    finally:
        manager.kill9()
        print(f"--- {manager.log}\n{manager.log_tail()}")


def ordered(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(records, key=lambda record: (record["worker"], record["incarnation"]))


def test_a_replay_shows_the_records_just_as_they_stood_then(past: Past) -> None:
    done = past.manager.outfitter("replay", "--at", past.moment.isoformat(), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert ordered(json.loads(done.stdout)) == ordered(past.status)
    assert ordered(records(past.manager)) != ordered(past.status)


def test_the_end_of_history_is_the_ledger_over_all_kills(past: Past) -> None:
    done = past.manager.outfitter("replay", "--json")
    assert (done.returncode, ordered(json.loads(done.stdout))) == (0, ordered(records(past.manager))), done.stderr
    verified_with_replay(past.manager)


def test_a_replay_looks_like_status_with_ages_of_then(past: Past) -> None:
    lines = past.manager.outfitter("replay", "--at", past.moment.isoformat(), "--host", past.manager.host).stdout
    assert lines.splitlines()[0].split() == ["HOST", "WORKER", "STATE", "AGE", "DEVICES", "QUEUE", "REASON"]
    assert len(lines.splitlines()) == 1 + len(past.status)


def test_the_former_option_says_which_command_compares_now(past: Past) -> None:
    done = past.manager.outfitter("replay", "--check")
    assert done.returncode == 2
    assert "`outfitter verify` compares history with the ledger" in done.stderr


def test_of_a_moment_before_the_first_commit_there_is_nothing(past: Past) -> None:
    done = past.manager.outfitter("replay", "--at", "1h", "--json")
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_a_moment_that_is_none_or_yet_to_come_is_refused(past: Past) -> None:
    for wrong in ("yesterday", "2026-01-31T12:00:00", "-5m"):
        done = past.manager.outfitter("replay", f"--at={wrong}")
        assert done.returncode == 2
        assert "is no time: write RFC 3339 with a time zone" in done.stderr
    assert "is in the future" in past.manager.outfitter("replay", "--at", "2999-01-01T00:00:00Z").stderr


def history(past: Past, *arguments: str, said: str = "") -> list[dict[str, Any]]:
    done = past.manager.outfitter("history", "--json", *arguments)
    assert (done.returncode, done.stderr) == (0, said)
    return [json.loads(line)["record"] for line in done.stdout.splitlines()]


def steps(records: list[dict[str, Any]]) -> list[tuple[str, str | None, str]]:
    return [(one["event"], one["from"], one["to"]) for one in records if one["type"] == "transition"]


def test_history_of_a_worker_has_each_step_with_its_cause(past: Past) -> None:
    assert steps(history(past, "--worker", "a")) == [
        ("register", None, "allocated"),
        ("deregister", "allocated", "ended"),
    ]
    assert steps(history(past, "--worker", "c")) == [
        ("register", None, "pending"),
        ("deregister", "pending", "allocated"),
    ]
    assert {one["incarnation"] for one in history(past, "--incarnation", "later")} == {"later"}


def test_history_of_a_device_has_who_had_it(past: Past) -> None:
    (device,) = {info["id"] for record in past.status if record["worker"] == "c" for info in record["resources"]["gpu"]}
    had = [one["worker"] for one in history(past, "--device", device) if one["type"] == "transition"]
    assert had[:3] == ["a", "a", "c"]
    assert history(past, "--device", "another", said="outfitter: no step matches\n") == []


def test_history_is_cut_by_moments(past: Past) -> None:
    whole = [one["at"] for one in history(past)]
    early = [one["at"] for one in history(past, "--until", past.moment.isoformat())]
    late = [one["at"] for one in history(past, "--since", past.moment.isoformat())]
    assert early
    assert late
    assert early + late == whole == sorted(whole)


def test_history_for_people_says_what_led_to_what_and_why(past: Past) -> None:
    lines = past.manager.outfitter("history", "--worker", "b").stdout.splitlines()
    assert lines[0].split() == ["TIME", "STEP", "WORKER", "WHAT,", "AND", "WHY"]
    assert lines[-1].split()[1:3] == ["ended", f"{past.manager.host}/b"]
    assert len({line.index(f"{past.manager.host}/b") for line in lines[1:]}) == 1
    assert "deregistered: enough" in lines[-1]
    assert "unconfirmed" in lines[-1]


def test_history_that_is_followed_goes_on_with_what_happens(past: Past) -> None:
    process = past.manager.popen("history", "--worker", "g", "--follow", "--json")
    assert process.stdout is not None
    assert process.stderr is not None
    register(past.manager, "g")
    with process.stdout, process.stderr:
        assert json.loads(process.stdout.readline())["record"]["worker"] == "g"
        process.kill()
        process.wait()


def test_history_that_is_followed_ends_at_its_time(past: Past) -> None:
    until = past.moment.isoformat()
    followed = past.manager.outfitter("history", "--until", until, "--follow", "--json")
    assert (followed.returncode, followed.stderr) == (0, "")
    assert followed.stdout == past.manager.outfitter("history", "--until", until, "--json").stdout
    soon = (datetime.now(UTC) + timedelta(seconds=1)).isoformat()
    assert past.manager.outfitter("history", "--until", soon, "--follow", "--json").returncode == 0


def test_without_history_nothing_is_written_there_and_that_is_said(start_manager: StartManager, tmp_path: Path) -> None:
    """Switched on later, history begins with a snapshot, and what was before it is told from nothing at all."""
    config = files_config(tmp_path / "gpus", extra="history = false")
    manager = start_manager(config)
    register(manager, "w")
    wait_for(manager, w="allocated")
    assert manager.outfitter("topics", "check").returncode == 0
    assert "history: (topic) is missing" in manager.outfitter(
        "topics", "check", env={"OUTFITTER_HISTORY": "true"}
    ).stdout.replace("outfitter.", "")
    for command in ("history", "replay"):
        done = manager.outfitter(command)
        assert done.returncode == 1
        assert "history is switched off (history = false)" in done.stderr
    manager.config.write_text(config.replace("history = false", ""))
    manager.restart()
    done = manager.outfitter("replay", "--json")
    assert (done.returncode, json.loads(done.stdout)) == (0, records(manager)), done.stderr
    verified_with_replay(manager)
    done = manager.outfitter("replay", "--at", "1h")
    assert done.returncode == 1
    oldest = re.search(r"the oldest moment that can be replayed is (\S+)", done.stderr)
    assert oldest is not None, done.stderr
    assert json.loads(manager.outfitter("replay", "--at", oldest[1], "--json").stdout) == records(manager)


def test_history_shows_the_last_steps_and_says_how_many_there_are(past: Past) -> None:
    whole = history(past)
    done = past.manager.outfitter("history", "--limit", "2")
    assert f"the last 2 of {len(whole)} steps" in done.stderr
    assert len(done.stdout.splitlines()) == 3
    lines = past.manager.outfitter("history", "--limit", "2", "--json").stdout.splitlines()
    assert [json.loads(line)["record"]["at"] for line in lines] == [one["at"] for one in whole[-2:]]


def test_a_sweeper_has_no_history_and_is_not_missed(start_manager: StartManager) -> None:
    manager = start_manager()
    register(manager, "w")
    done = manager.outfitter("register", "--host", "nowhere", "--worker", "w", "--wait", "30")
    assert "no manager serves host 'nowhere'" in done.stderr  # the sweeper has committed
    done = manager.outfitter("replay")
    assert (done.returncode, done.stderr) == (0, "")
    verified_with_replay(manager)
    first = manager.outfitter("replay", "--at", "0001-01-01T00:00:00Z")
    assert first.returncode == 0, first.stderr


def test_of_a_long_history_the_last_fifty_steps_are_shown_in_columns(start_manager: StartManager) -> None:
    manager = start_manager(gpus=1)
    longest = "a-worker-with-a-long-name-that-comes-last"

    for worker in (*(f"w{n}" for n in range(29)), longest):
        say(manager, "register", worker)
        say(manager, "deregister", worker)
    manager.wait_for_state(longest, "ended")
    done = manager.outfitter("history")
    assert "the last 50 of 60 steps: --limit or --since shows more" in done.stderr
    heading, *lines = done.stdout.splitlines()
    assert len(lines) == 50
    assert {line.index(line.split(maxsplit=3)[3]) for line in lines} == {heading.index("WHAT, AND WHY")}
    assert all(line.endswith("deregistered (unconfirmed)") for line in lines if " ended " in line)
