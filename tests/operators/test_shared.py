"""Contexts of one process that share a registration: `shared`."""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import anyio
import pytest

import outfitter
from operators.conftest import WorkerSetup
from outfitter.testing import FakeOutfitter

pytestmark = pytest.mark.timeout(60)


class Function:
    """What a framework makes for each step of a chain."""


def wait_until_begun(contexts: Iterable[outfitter.RuntimeContext]) -> None:
    """Block until other threads have begun to enter the contexts."""
    while any(context._backend is None for context in contexts):
        time.sleep(0.001)


def test_contexts_with_one_shared_name_have_the_same_devices_until_the_last_is_left(setup: WorkerSetup) -> None:
    with setup.context({"gpu": 1}, shared="scorer") as first:
        with setup.context({"gpu": 1}, shared="scorer") as second:
            assert second.record == first.record
            assert (second.worker, second.incarnation) == (first.worker, first.incarnation)
        assert first.get_external_resource_infos("gpu")
        with pytest.raises(outfitter.ContextStateError, match="was left"):
            second.get_external_resource_infos("gpu")
        assert setup.fake.departures == []
        assert len(setup.fake.registrations) == 1
    setup.fake.wait_for(lambda: setup.fake.departures)
    with setup.context({"gpu": 1}, shared="scorer") as later:
        assert later.incarnation != first.incarnation


def test_a_name_that_nobody_uses_any_more_is_forgotten(fake: FakeOutfitter) -> None:
    context = fake.context({"gpu": 1}, shared="scorer")
    with context, fake.context({"gpu": 1}, shared="scorer"):
        assert len(context._shares._by_name) == 1
    assert context._shares._by_name == {}


def test_functions_of_one_chain_share_a_device_until_the_last_is_gone(setup: WorkerSetup) -> None:
    decode, score = Function(), Function()
    for function in (decode, score):
        setup.context({"gpu": 1}, shared="scorer", worker="w").enter_for(function)
    del decode, function
    with setup.context({"gpu": 1}, worker="other"):
        pass
    setup.fake.wait_for(lambda: setup.fake.departures)
    assert [worker for worker, _ in setup.fake.departures] == ["other"]
    del score
    setup.fake.wait_for(lambda: len(setup.fake.departures) == 2)
    assert setup.fake.departures[1] == ("w", "its object is gone")


async def test_asyncio_code_shares_with_blocking_code(setup: WorkerSetup) -> None:
    blocking = await anyio.to_thread.run_sync(setup.context({"gpu": 1}, shared="scorer").__enter__)
    async with setup.context({"gpu": 1}, shared="scorer") as context:
        assert context.incarnation == blocking.incarnation
        await anyio.to_thread.run_sync(blocking.leave)
        assert context.get_external_resource_infos("gpu")


def test_different_names_have_different_devices(setup: WorkerSetup) -> None:
    with setup.context({"gpu": 1}, shared="a") as a, setup.context({"gpu": 1}, shared="b") as b:
        assert a.worker != b.worker


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"resources": {"gpu": 2}}, "resources"),
        ({"wait": 5}, "wait"),
        ({"lease": 7, "priority": 1}, "lease, priority"),
        ({"worker": "another"}, "worker"),
        ({"ends_with": "java"}, "ends_with"),
    ],
)
def test_another_request_under_a_name_in_use_is_refused_and_says_what_differs(
    setup: WorkerSetup, change: dict[str, object], named: str
) -> None:
    asked: dict[str, object] = {"resources": {"gpu": 1}, "shared": "scorer"}
    with setup.context(**asked) as context:
        other = setup.context(**{**asked, **change})
        with pytest.raises(outfitter.InvalidRequestError) as caught, other:
            pytest.fail("entered")
        assert f"shares 'scorer' already, for another request ({named} differ)" in str(caught.value)
        assert context.get_external_resource_infos("gpu")
    with other if "ends_with" not in change else setup.context(**asked):
        pass


def test_labels_and_the_operator_may_differ_and_the_labels_are_the_firsts(setup: WorkerSetup) -> None:
    shares = {"infer": {"gpu": 1}, "train": {"gpu": 1}}
    with (
        setup.context({"gpu": 2}, shares, shared="s", operator="infer", labels={"task": "1"}) as infer,
        setup.context({"gpu": 2}, shares, shared="s", operator="train", labels={"task": "2"}) as train,
    ):
        assert infer.get_external_resource_infos("gpu")[0]["id"] == "GPU-a"
        assert train.get_external_resource_infos("gpu")[0]["id"] == "GPU-b"
        assert train.record.request.labels == {"task": "1"}


def test_threads_that_enter_at_the_same_time_wait_for_one_registration(setup: WorkerSetup) -> None:
    setup.fake.keep_waiting("busy")
    contexts = [setup.context({"gpu": 1}, shared="scorer") for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        entering = [pool.submit(context.__enter__) for context in contexts]
        wait_until_begun(contexts)
        setup.fake.grant()
        for each in entering:
            each.result(30)
    assert len({context.incarnation for context in contexts}) == 1
    assert len({each.incarnation for each in setup.fake.registrations}) == 1
    for context in contexts:
        context.leave()


def test_a_refusal_is_told_to_all_who_wait_and_the_next_one_may_try_again(setup: WorkerSetup) -> None:
    setup.fake.keep_waiting("busy")
    contexts = [setup.context({"gpu": 1}, shared="scorer") for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        entering = [pool.submit(context.__enter__) for context in contexts]
        setup.fake.wait_for(lambda: setup.fake.registrations)
        wait_until_begun(contexts)
        setup.fake.fail("this is why")
        for each in entering:
            with pytest.raises(outfitter.AllocationFailedError, match="this is why"):
                each.result(30)
    setup.fake.grant()
    with setup.context({"gpu": 1}, shared="scorer") as context:
        assert context.get_external_resource_infos("gpu")


async def test_one_who_gives_up_waiting_withdraws_nothing_from_the_others(setup: WorkerSetup) -> None:
    setup.fake.keep_waiting("busy")
    patient = setup.context({"gpu": 1}, shared="scorer")
    async with anyio.create_task_group() as group:
        group.start_soon(setup.context({"gpu": 1}, shared="scorer").__aenter__)
        await anyio.to_thread.run_sync(lambda: setup.fake.wait_for(lambda: setup.fake.registrations))
        with ThreadPoolExecutor() as pool:
            entering = pool.submit(patient.__enter__)
            wait_until_begun([patient])
            group.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                setup.fake.grant()
                await anyio.to_thread.run_sync(entering.result, 30)
    assert patient.get_external_resource_infos("gpu")
    assert setup.fake.departures == []
    patient.leave()


def test_who_enters_after_the_end_of_the_shared_allocation_gets_a_new_one(setup: WorkerSetup) -> None:
    with setup.context({"gpu": 1}, shared="scorer") as old:
        changes = old.changes("gpu")
        next(changes)
        setup.fake.end()
        with pytest.raises(outfitter.AllocationEndedError):
            next(changes)
        with setup.context({"gpu": 1}, shared="scorer") as new:
            old.leave()
            assert new.get_external_resource_infos("gpu")
            with setup.context({"gpu": 1}, shared="scorer") as newer:
                assert newer.incarnation == new.incarnation


def test_the_changes_of_a_context_end_when_it_is_left_although_others_go_on(setup: WorkerSetup) -> None:
    with setup.context({"gpu": 1}, shared="scorer") as stays, ThreadPoolExecutor() as pool:
        with setup.context({"gpu": 1}, shared="scorer") as leaves:
            changes = leaves.changes("gpu")
            next(changes)
            rest = pool.submit(list, changes)
        assert rest.result(20) == []
        assert stays.get_external_resource_infos("gpu")


def test_each_context_hears_of_the_lease(fake: FakeOutfitter) -> None:
    heard: list[str] = []

    def listen(name: str) -> outfitter.RuntimeContext:
        return fake.context({"gpu": 1}, shared="scorer", on_lease_at_risk=lambda _: heard.append(name))

    with listen("a"), listen("b"), fake.context({"gpu": 1}, shared="scorer"):
        fake.lose_lease()
    assert heard == ["a", "b"]


def test_a_listener_that_fails_keeps_the_warning_from_nobody(
    fake: FakeOutfitter, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[outfitter.LeaseLostError] = []
    with (
        fake.context({"gpu": 1}, shared="s", on_lease_at_risk=lambda _: 1 / 0),
        fake.context({"gpu": 1}, shared="s", on_lease_at_risk=heard.append),
    ):
        fake.lose_lease()
    assert len(heard) == 1
    assert "on_lease_at_risk raised" in caplog.text


def test_a_lease_at_risk_that_no_context_listens_to_is_logged(
    fake: FakeOutfitter, caplog: pytest.LogCaptureFixture
) -> None:
    with fake.context({"gpu": 1}, shared="s"):
        fake.lose_lease()
    assert "stop using its devices" in caplog.text
