"""A context that lasts as long as an object: `enter_for`, for frameworks that do not always call a `close()`."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import pytest

import outfitter
from operators.conftest import HOST, WorkerSetup
from outfitter.lifetimes import claims, objects
from outfitter.testing import FakeOutfitter
from support.kafka.broker import KafkaBroker
from support.managers.scripted import ScriptedManager

pytestmark = pytest.mark.timeout(60)


class Function:
    """What a framework makes for each parallel subtask, and drops without a word."""

    def __init__(self) -> None:
        self.warnings: list[outfitter.LeaseLostError] = []


class NoWeakReferences:
    __slots__ = ()


def departures(setup: WorkerSetup, count: int = 1) -> list[tuple[str, str]]:
    setup.fake.wait_for(lambda: len(setup.fake.departures) >= count)
    return setup.fake.departures


def tied() -> int:
    """How many contexts of this process are to be left by a finalizer."""
    return len(objects._lifetimes._leaves) if objects._lifetimes is not None else 0


def test_a_context_is_left_when_the_object_it_was_entered_for_is_gone(setup: WorkerSetup) -> None:
    function = Function()
    context = setup.context({"gpu": 1}, worker="w")
    assert context.enter_for(function) is context
    assert context.get_external_resource_infos("gpu")[0]["id"] == "GPU-a"
    assert setup.fake.departures == []
    del function
    assert departures(setup) == [("w", "its object is gone")]
    with pytest.raises(outfitter.ContextStateError, match="was left"):
        context.get_external_resource_infos("gpu")
    assert tied() == 0


def test_an_object_that_has_its_context_is_gone_all_the_same(real: WorkerSetup) -> None:
    function: Any = Function()
    function.devices = real.context({"gpu": 1}, on_lease_at_risk=function.warnings.append).enter_for(function)
    del function
    assert len(departures(real)) == 1


def test_an_object_in_a_cycle_is_gone_with_the_next_garbage_collection(real: WorkerSetup) -> None:
    function: Any = Function()
    function.self = function
    real.context({"gpu": 1}).enter_for(function)
    del function
    gc.collect()
    assert len(departures(real)) == 1


def test_a_method_of_the_object_may_hear_of_the_lease_and_does_not_keep_the_object(fake: FakeOutfitter) -> None:
    class Listening(Function):
        def warn(self, error: outfitter.LeaseLostError) -> None:
            self.warnings.append(error)

    function = Listening()
    fake.context({"gpu": 1}, on_lease_at_risk=function.warn).enter_for(function)
    fake.lose_lease()
    assert len(function.warnings) == 1
    del function
    fake.wait_for(lambda: fake.departures)


def test_an_object_without_weak_references_is_refused_before_anything_is_registered(setup: WorkerSetup) -> None:
    context = setup.context({"gpu": 1})
    with pytest.raises(TypeError, match=r"'NoWeakReferences' objects have no weak references.*__weakref__"):
        context.enter_for(NoWeakReferences())
    assert setup.fake.registrations == []
    with context:
        assert len(setup.fake.registrations) == 1


def test_an_entry_that_fails_leaves_nothing_behind(setup: WorkerSetup) -> None:
    setup.fake.fail("this is why")
    function = Function()
    with pytest.raises(outfitter.AllocationFailedError, match="this is why"):
        setup.context({"gpu": 1}, worker="w").enter_for(function)
    assert tied() == 0
    setup.fake.grant()
    setup.context({"gpu": 1}, worker="w").enter_for(function)
    del function
    gc.collect()  # the error's traceback has it, too
    assert [worker for worker, _ in departures(setup)] == ["w"]


def test_a_context_that_is_left_by_hand_is_left_once(setup: WorkerSetup) -> None:
    function = Function()
    context = setup.context({"gpu": 1}, worker="w").enter_for(function)
    context.leave()
    assert departures(setup) == [("w", "finished")]
    assert tied() == 0
    context.leave()
    del function
    with setup.context({"gpu": 1}, worker="w"):
        pass
    assert departures(setup, 2) == [("w", "finished")] * 2


def test_a_context_that_is_entered_already_is_not_tied_to_another_object(fake: FakeOutfitter) -> None:
    with fake.context({"gpu": 1}) as context:
        with pytest.raises(outfitter.ContextStateError, match="was entered before"):
            context.enter_for(Function())
        assert tied() == 0
        assert context.get_external_resource_infos("gpu")


def test_one_object_may_have_several_contexts(setup: WorkerSetup) -> None:
    function = Function()
    for worker in ("a", "b"):
        setup.context({"gpu": 1}, worker=worker).enter_for(function)
    del function
    assert sorted(worker for worker, _ in departures(setup, 2)) == ["a", "b"]


def test_a_context_may_be_entered_in_any_thread_and_outlives_it(real: WorkerSetup) -> None:
    function = Function()
    with ThreadPoolExecutor() as pool:
        context = pool.submit(real.context({"gpu": 1}).enter_for, function).result(30)
    assert context.get_external_resource_infos("gpu")
    del function
    assert len(departures(real)) == 1


LOCKS: dict[str, Callable[[outfitter.RuntimeContext], AbstractContextManager[object]]] = {
    "the claims of this process": lambda _: claims._lock,
    "the stop of the context": lambda context: context._stopping,
    "the session's": lambda context: context._backend._backend._lock,  # type: ignore[union-attr]
    "the watch's": lambda context: context._allocation_watch()._changed,
    "logging's": lambda _: logging._lock,  # type: ignore[attr-defined]
}


@pytest.mark.parametrize("lock", LOCKS)
def test_the_garbage_collector_may_come_while_a_lock_is_held(real: WorkerSetup, lock: str) -> None:
    function = Function()
    context = real.context({"gpu": 1}).enter_for(function)
    with LOCKS[lock](context):
        del function  # the finalizer runs here
    assert len(departures(real)) == 1


def test_the_garbage_collector_may_come_in_the_thread_of_the_session(real: WorkerSetup) -> None:
    held = [Function()]
    context = real.context({"gpu": 1}).enter_for(held[0])
    threads: list[str] = []

    def drop() -> None:
        threads.append(threading.current_thread().name)
        held.clear()

    context._allocation_watch()._wakers[drop] = None  # called by the session, and that within a lock
    real.fake.set("gpu", [{}])
    assert len(departures(real)) == 1
    assert threads[0] == f"outfitter-{context.worker}"


@pytest.fixture(params=["embedded bus", pytest.param("kafka", marks=pytest.mark.kafka)])
def bus(request: pytest.FixtureRequest, fake: FakeOutfitter) -> Iterator[tuple[list[str], ScriptedManager]]:
    """A program's arguments, bus and cluster, and the manager there."""
    if request.param == "embedded bus":
        manager: ScriptedManager = request.getfixturevalue("manager")
        yield [request.getfixturevalue("url"), "outfitter"], manager
        return
    broker: KafkaBroker = request.getfixturevalue("kafka_broker")
    cluster = broker.new_cluster()
    with ScriptedManager(broker.url, HOST, fake, cluster=cluster) as manager:
        yield [broker.url, cluster], manager


def run(program: str, *arguments: str) -> None:
    prelude = """
        import os, sys, outfitter
        class Function: pass
        def context(worker):
            return outfitter.RuntimeContext(
                {"gpu": 1}, worker=worker, bus=sys.argv[1], cluster=sys.argv[2], host=sys.argv[3], owner=False
            )
    """
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(prelude) + textwrap.dedent(program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stderr) == (0, "")


def test_when_the_interpreter_ends_the_devices_are_given_back(bus: tuple[list[str], ScriptedManager]) -> None:
    program = """
        functions = [Function(), Function()]
        for name, function in zip("ab", functions):
            function.devices = context(name).enter_for(function)
    """
    arguments, manager = bus
    run(program, *arguments, HOST)
    manager.wait_until(lambda: len(manager.deregistrations) == 2)
    assert sorted((left.worker, left.reason) for left in manager.deregistrations) == [
        ("a", "the interpreter ends"),
        ("b", "the interpreter ends"),
    ]


def test_an_object_that_went_just_before_the_interpreter_ends_counts_as_gone(
    bus: tuple[list[str], ScriptedManager],
) -> None:
    arguments, manager = bus
    run("function = Function(); context('w').enter_for(function); del function", *arguments, HOST)
    manager.wait_until(lambda: bool(manager.deregistrations))
    assert [(left.worker, left.reason) for left in manager.deregistrations] == [("w", "its object is gone")]


def test_in_a_forked_child_the_end_of_the_object_means_nothing(url: str, manager: ScriptedManager) -> None:
    program = """
        function = Function()
        devices = context("w").enter_for(function)
        child = os.fork()
        if child == 0:
            del function
            sys.exit()  # with the handlers of the interpreter's exit
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    """
    run(program, url, "outfitter", HOST)
    manager.wait_until(lambda: bool(manager.deregistrations))
    assert [(left.worker, left.reason) for left in manager.deregistrations] == [("w", "the interpreter ends")]
