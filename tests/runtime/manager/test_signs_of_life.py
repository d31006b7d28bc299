"""A manager that was killed, hangs or stopped, as people see it: on both buses, from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from outfitter_service.runtime.machine_lock import alone_on_machine
from support.kafka.broker import Broker, KafkaBroker
from support.managers.api import Api, running
from support.managers.fleet import CONFIG, Fleet, hosts
from support.managers.process import Manager, StartManager, serving_on

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

OFTEN = {"OUTFITTER_BEAT_INTERVAL": "5s"}
WITHIN_S = 90.0
LONGER_THAN_THREE_S = 20.0


@pytest.fixture(params=["embedded", pytest.param("kafka", marks=pytest.mark.kafka)])
def served(request: pytest.FixtureRequest, start_manager: StartManager, tmp_path: Path) -> Iterator[Manager]:
    """A manager on a bus of each kind."""
    if request.param == "embedded":
        yield start_manager(gpus=1, variables=OFTEN)
        return
    broker = request.getfixturevalue("kafka_broker")
    with serving_on(broker, tmp_path / "m", cluster=KafkaBroker.new_cluster(), variables=OFTEN) as manager:
        yield manager


@pytest.fixture
def api(served: Manager, tmp_path: Path) -> Iterator[Api]:
    with running(tmp_path, served.bus_url, "--cluster", served.cluster) as api:
        served.wait_for(lambda: api.is_ready)
        served.wait_for(lambda: host_of(api)["life"] == "lives", timeout=WITHIN_S)
        yield api


def host_of(api: Api) -> dict[str, Any]:
    status, body = api.get("/api/v1/hosts")
    assert status == 200, body
    [item] = body["items"]
    return dict(item)


def judged(manager: Manager, api: Api, life: str) -> dict[str, Any]:
    manager.wait_for(lambda: host_of(api)["life"] == life, timeout=WITHIN_S)
    return host_of(api)


def warnings(manager: Manager) -> str:
    done = manager.outfitter("status")
    assert done.returncode == 0
    return done.stderr


def test_who_was_killed_is_seen_alike_by_everybody_until_it_runs_again(served: Manager, api: Api) -> None:
    killed = f"{served.host}  its manager was killed, or hangs"
    assert "manager" not in warnings(served)
    with watching(served) as watch:
        until_line(watch, f"{served.host}  managed")
        register_too_much(served)
        served.kill9()
        host = judged(served, api, "dead")
        assert (host["managed"], host["manager"]["stopped_at"]) == (False, None)
        assert host["life_at"] is not None
        until_line(watch, killed)
        with watching(served) as late:
            until_line(late, killed)
        commands_say_that_it_was_killed(served)
        assert [each["managed"] for each in api.get("/api/v1/workers/w/explanations")[1]["items"]] == [False]
        with alone_on_machine(served.host, {}):  # as if it had been started again, and had written nothing yet
            says_that_it_lives(served, os.getpid())
        assert f"Start one with `outfitter serve --host {served.host}`" in warnings(served)
        served.start()
        until_line(watch, f"{served.host}  managed")
    assert judged(served, api, "lives")["managed"]
    assert "was killed" not in warnings(served)
    done = served.outfitter("devices", "--free")
    assert (done.stderr, "GPU-0" in done.stdout) == ("", True)


def register_too_much(manager: Manager) -> None:
    manager.outfitter("register", "--worker", "w", "--resource", "gpu=7", "--lease", "none", "--wait", "20")


def commands_say_that_it_was_killed(manager: Manager) -> None:
    assert f"the manager of host '{manager.host}' was killed, or hangs: last heard " in warnings(manager)
    assert f"The manager of {manager.host} was killed, or hangs" in manager.outfitter("top", "--once").stdout
    doctor = json.loads(manager.outfitter("doctor", "--json").stdout)
    [managers] = [check for check in doctor["checks"] if check["check"] == "managers"]
    assert any("was killed, or hangs: it was not heard since" in finding["seen"] for finding in managers["findings"])
    done = manager.outfitter("devices", "--free")
    assert f"no manager serves {manager.host} now (it was killed, or hangs: last heard " in done.stderr
    assert "GPU-0" not in done.stdout
    assert "gpu: 0 of 1 free, 0 held, 1 without manager" in done.stdout
    said = manager.outfitter("explain", "w").stdout.splitlines()[-1]
    assert said.startswith(f"The manager of {manager.host} was killed, or hangs: last heard ")
    assert [each["managed"] for each in json.loads(manager.outfitter("explain", "w", "--json").stdout)] == [False]


@contextmanager
def watching(manager: Manager) -> Iterator[subprocess.Popen[str]]:
    with manager.popen("watch", stderr=None) as process:
        try:
            yield process
        finally:
            process.kill()


def until_line(process: subprocess.Popen[str], words: str) -> None:
    assert process.stdout is not None
    assert any(words in line for line in process.stdout), "it has ended"


def test_who_hangs_is_dead_and_nobody_is_told_to_start_another_until_it_goes_on(served: Manager, api: Api) -> None:
    register_too_much(served)
    served.signal(signal.SIGSTOP)
    try:
        assert judged(served, api, "dead")["managed"] is False
        says_that_it_lives(served, served.pid)
        assert host_of(api)["process"] == served.pid
    finally:
        served.signal(signal.SIGCONT)
    host = judged(served, api, "lives")
    assert (host["managed"], host["process"]) == (True, None)


def says_that_it_lives(manager: Manager, pid: int) -> None:
    """Each command names the process, and none says that somebody must start one."""
    said = {
        name: "".join(served_by(manager, *arguments))
        for name, arguments in {
            "status": ["status"],
            "top": ["top", "--once"],
            "explain": ["explain", "w"],
            "devices": ["devices", "--free"],
            "doctor": ["doctor"],
        }.items()
    }
    for name, text in said.items():
        words = " ".join(text.split())
        assert f"process {pid}" in words, (name, text)
        assert "log" in words, (name, text)
        assert "was killed" not in words, (name, text)
        assert "tart one with" not in words, (name, text)
        assert "before `outfitter serve` runs again" not in words, (name, text)
        assert "start it again" not in words, (name, text)


def served_by(manager: Manager, *arguments: str) -> tuple[str, str]:
    done = manager.outfitter(*arguments)
    return done.stdout, done.stderr


def test_who_stopped_in_order_is_stopped_and_missed_only_once_somebody_asks_for_it(served: Manager, api: Api) -> None:
    served.stop()
    host = judged(served, api, "stopped")
    assert (host["managed"], host["life_at"]) == (False, host["manager"]["stopped_at"])
    served.wait_for(lambda: host_of(api)["unanswered"] == 0)
    assert not host_of(api)["missed"]
    assert "was stopped" not in warnings(served)
    served.outfitter("register", "--worker", "late", "--resource", "gpu=1")
    served.wait_for(lambda: host_of(api)["unanswered"] == 1)
    assert host_of(api)["missed"]
    assert "; 1 messages lie unanswered" in warnings(served)


def test_a_sign_that_changes_nothing_is_no_event_and_changes_no_answer(served: Manager, api: Api) -> None:
    def sent() -> float:
        return served.metric("outfitter_signs_of_life_total", outcome="ok") or 0

    def seen() -> list[Any]:
        return [api.get(f"/api/v1/{name}")[1] for name in ("hosts", "devices", "workers")]

    served.wait_for(lambda: host_of(api)["life"] == "lives")
    before, last, begun = seen(), api.get("/api/v1/status")[1]["event_id"], sent()
    served.wait_for(lambda: sent() >= begun + 2, timeout=WITHIN_S)
    assert seen() == before
    assert api.get("/api/v1/status")[1]["event_id"] == last


@pytest.mark.kafka
async def test_who_takes_over_in_cluster_scope_lives_in_all_views_until_it_is_killed_as_well(
    kafka_broker: KafkaBroker, tmp_path: Path
) -> None:
    names = hosts(8)

    async def seen(manager: Manager, api: Api, life: str) -> None:
        def all_seen() -> bool:
            items = api.get("/api/v1/hosts")[1]["items"]
            return {item["host"]: item["life"] for item in items} == dict.fromkeys(names, life)

        await anyio.to_thread.run_sync(lambda: manager.wait_for(all_seen, timeout=WITHIN_S))

    config = f'beat-interval = "5s"\n{CONFIG}'
    async with Fleet(tmp_path, kafka_broker.url, kafka_broker.new_cluster(), config=config) as fleet:
        one, two = fleet.start("one"), fleet.start("two")
        await fleet.register(names, ["a"])
        await fleet.answered(within=WITHIN_S)
        with running(tmp_path, fleet.url, "--cluster", fleet.cluster) as api:
            await anyio.to_thread.run_sync(lambda: two.wait_for(lambda: api.is_ready))
            await seen(two, api, "lives")
            before = set((await fleet.instances()).values())
            one.kill9()
            await fleet.register(names, ["b"])
            await fleet.answered(within=WITHIN_S)
            [survivor] = set((await fleet.instances()).values()) & before
            await fleet.until(lambda _: set(_instances(api)) == {survivor}, within=WITHIN_S)
            await seen(two, api, "lives")
            assert "was killed" not in warnings(two)
            two.kill9()
            await seen(two, api, "dead")
            said = warnings(two)
            assert all(f"the manager of host '{name}' was killed, or hangs" in said for name in names)


def _instances(api: Api) -> list[str]:
    """The managers that wrote the last checkpoints, as the API has them."""
    return [item["checkpoint"]["instance"] for item in api.get("/api/v1/writers")[1]["items"]]


@pytest.mark.kafka
def test_an_outage_of_the_broker_is_blamed_on_no_manager(own_broker: Broker, tmp_path: Path) -> None:
    with (
        serving_on(own_broker, tmp_path / "m", variables=OFTEN) as manager,
        running(tmp_path, own_broker.url, "--cluster", manager.cluster) as api,
    ):
        manager.wait_for(lambda: api.is_ready)
        judged(manager, api, "lives")
        own_broker.stop()
        begun, sent = time.monotonic(), manager.metric("outfitter_signs_of_life_total", outcome="ok") or 0

        def is_over() -> bool:
            assert host_of(api)["life"] != "dead"
            return time.monotonic() - begun > LONGER_THAN_THREE_S

        manager.wait_for(is_over)
        own_broker.start()
        manager.wait_for(lambda: (manager.metric("outfitter_signs_of_life_total", outcome="ok") or 0) > sent)
        assert "was killed" not in warnings(manager)
        judged(manager, api, "lives")
