"""The operators' side with the manager it is made for: `outfitter serve`."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import anyio
import pytest

import outfitter
from outfitter import RuntimeContext
from outfitter_proto import topics
from outfitter_proto.bus import connect
from support.managers.process import Manager, add_device


async def make_topics(url: str, cluster: str) -> None:
    async with connect(url) as bus:
        await topics.create(bus, cluster, partitions=2)


@pytest.fixture(params=["embedded bus", pytest.param("kafka", marks=pytest.mark.kafka)])
def served(request: pytest.FixtureRequest) -> Manager:
    """A manager of a host with two devices."""
    start = request.getfixturevalue("start_manager")
    options: dict[str, Any] = {}
    if request.param == "kafka":
        broker = request.getfixturevalue("kafka_broker")
        options = {"bus": broker.url, "cluster": broker.new_cluster()}
        anyio.run(make_topics, *options.values())
    manager: Manager = start(gpus=2, **options)
    return manager


def context(manager: Manager, *args: Any, **kwargs: Any) -> RuntimeContext:
    return RuntimeContext(*args, **{"bus": manager.bus_url, "host": manager.host, "cluster": manager.cluster, **kwargs})


def test_a_worker_gets_its_devices_from_the_manager_and_gives_them_back(served: Manager) -> None:
    with context(served, {"gpu": 2}, {"infer": {"gpu": 1}}, worker="w") as mine:
        (first,) = mine.for_operator("infer").get_external_resource_infos("gpu")
        (second,) = mine.get_external_resource_infos("gpu")
        assert {first["id"], second["id"]} == {"GPU-0", "GPU-1"}
        assert mine.env == {"CUDA_VISIBLE_DEVICES": "GPU-0,GPU-1"}
        assert mine.for_operator("infer").env == {"CUDA_VISIBLE_DEVICES": first["id"]}
        with pytest.raises(outfitter.WaitedTooLongError):
            context(served, {"gpu": 1}, wait=0.2).__enter__()
    with context(served, {"gpu": 2}) as later:
        assert len(later.get_external_resource_infos("gpu")) == 2


def test_the_managers_refusals_are_errors_of_their_own(served: Manager) -> None:
    with pytest.raises(outfitter.UnknownResourceError, match="fpga"):
        context(served, {"fpga": 1}).__enter__()
    with pytest.raises(outfitter.InvalidRequestError):
        context(served, {"gpu": 1}, {"infer": {"gpu": 2}}).__enter__()


def test_a_blocked_worker_outlives_many_leases(served: Manager) -> None:
    with (
        context(served, {"gpu": 2}, lease=1.0, owner=False) as mine,
        pytest.raises(outfitter.WaitedTooLongError),
    ):
        context(served, {"gpu": 1}, wait=4).__enter__()
    assert mine.worker


def test_a_newer_incarnation_tells_the_older_one_that_it_is_over(served: Manager) -> None:
    program = """
        import sys, outfitter
        with outfitter.RuntimeContext({"gpu": 1}, worker="w"):
            print("entered", flush=True)
            sys.stdin.read()
    """
    with context(served, {"gpu": 1}, worker="w") as older:
        changes = older.changes("gpu")
        next(changes)
        command = [sys.executable, "-c", textwrap.dedent(program)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, env=served.environment, **pipes) as newer:
            try:
                with pytest.raises(outfitter.AllocationEndedError, match="superseded"):
                    next(changes)
                with pytest.raises(outfitter.AllocationEndedError):
                    older.get_external_resource_infos("gpu")
            finally:
                newer.communicate("")


def test_a_function_that_is_made_anew_gets_the_devices_of_the_one_that_is_gone(served: Manager) -> None:
    class Function:
        def __init__(self) -> None:
            self.devices = context(served, {"gpu": 2}, wait=30).enter_for(self)

    function: Function | None = Function()
    for _ in range(3):
        function = None  # it must go before its successor can have the devices
        function = Function()
        assert len(function.devices.get_external_resource_infos("gpu")) == 2
    function.devices.leave()


@pytest.mark.parametrize("how", ["plain", "operator", "shared"])
def test_whoever_holds_a_device_that_falls_ill_is_told_with_the_reason_and_keeps_it(served: Manager, how: str) -> None:
    gpus = served.folder / "gpus"
    operators = {"infer": {"gpu": 1}} if how == "operator" else {}
    options = {"shared": "scorer"} if how == "shared" else {}
    with ExitStack() as contexts:
        enter = [context(served, {"gpu": 1}, operators, worker="w", **options) for _ in range(2 if options else 1)]
        entered = [contexts.enter_context(each) for each in enter]
        told = [each.for_operator("infer") for each in entered] if operators else entered
        changes = [each.changes("gpu") for each in told]
        (before, *others) = [device for each in changes for device in next(each)]
        assert others == [before] * (len(entered) - 1)
        assert "health" not in before
        index = int(before["id"].removeprefix("GPU-"))
        add_device(gpus, index, health="unhealthy", reason="Xid 79")
        for each in changes:
            (ill,) = next(each)
            assert (ill["id"], ill["health"], ill["health.reason"]) == (before["id"], "unhealthy", "Xid 79")
        add_device(gpus, index)
        for each in changes:
            assert list(next(each)) == [before]


def test_a_waiting_worker_enters_when_a_device_turns_up(served: Manager) -> None:
    with context(served, {"gpu": 2}), ThreadPoolExecutor() as pool:
        waiting = context(served, {"gpu": 1}, wait=30)
        entering = pool.submit(waiting.__enter__)
        served.wait_for(lambda: waiting._backend and waiting.waiting_because)
        add_device(served.folder / "gpus", 2)
        entering.result(30)
        assert waiting.get_external_resource_infos("gpu")[0]["id"] == "GPU-2"
        waiting.__exit__(None, None, None)
