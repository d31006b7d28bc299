"""What user code may rely on, on the fake and on a real bus alike."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import anyio
import pytest

import outfitter
from operators.conftest import WorkerSetup
from outfitter import ExternalResourceInfo, ExternalResourceInfos

pytestmark = pytest.mark.timeout(60)


def ids(infos: ExternalResourceInfos) -> list[str]:
    return [info["id"] for info in infos]


def test_a_worker_gets_the_infos_of_its_devices(setup: WorkerSetup) -> None:
    with setup.context({"gpu": 2}) as context:
        infos = context.get_external_resource_infos("gpu")
        assert ids(infos) == ["GPU-a", "GPU-b"]
        assert infos[0].get_property("index") == "0"
        assert infos == {ExternalResourceInfo(dict(info)) for info in infos}
        assert context.external_resource_infos() == {"gpu": infos}
        assert context.env == {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}
        assert context.record.state == "allocated"


async def test_asyncio_code_gets_the_same(setup: WorkerSetup) -> None:
    async with setup.context({"gpu": 2}) as context:
        assert ids(context.get_external_resource_infos("gpu")) == ["GPU-a", "GPU-b"]


def test_a_worker_that_names_no_resources_gets_the_configured_ones(setup: WorkerSetup) -> None:
    with setup.context() as context:
        assert len(context.get_external_resource_infos("gpu")) == 4


def test_a_named_operator_sees_its_own_devices_and_the_others_what_is_left(setup: WorkerSetup) -> None:
    with setup.context({"gpu": 3}, {"infer": {"gpu": 1}, "train": {"gpu": 1}}, operator="train") as context:
        assert ids(context.get_external_resource_infos("gpu")) == ["GPU-b"]
        assert ids(context.for_operator("infer").get_external_resource_infos("gpu")) == ["GPU-a"]
        assert ids(context.for_operator("other").get_external_resource_infos("gpu")) == ["GPU-c"]


def test_without_operators_everybody_sees_everything(setup: WorkerSetup) -> None:
    with setup.context({"gpu": 2}, operator="infer") as context:
        assert ids(context.get_external_resource_infos("gpu")) == ["GPU-a", "GPU-b"]


def test_an_unknown_resource_is_an_error_that_lists_the_known_ones(setup: WorkerSetup) -> None:
    with setup.context({"gpu": 1}) as context:
        with pytest.raises(outfitter.UnknownResourceError, match=r"'fpga'; it has: gpu$"):
            context.get_external_resource_infos("fpga")
        assert context.get_external_resource_infos("fpga", strict=False) == set()


def test_an_operator_is_told_which_resources_are_its_own(setup: WorkerSetup) -> None:
    setup.fake.set("fpga", [{}])
    with (
        setup.context({"gpu": 1, "fpga": 1}, {"infer": {"gpu": 1}}, operator="infer") as context,
        pytest.raises(outfitter.UnknownResourceError, match=r"operator 'infer' has .*'fpga'; it has: gpu$"),
    ):
        context.get_external_resource_infos("fpga")


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("no-driver", outfitter.NoDriverError),
        ("disabled", outfitter.ResourceDisabledError),
        ("driver-failed", outfitter.AllocationFailedError),
    ],
)
def test_a_resource_without_infos_says_why(setup: WorkerSetup, code: str, kind: type[Exception]) -> None:
    setup.fake.set_unavailable("fpga", "the reason", code=code)
    with setup.context({"gpu": 1, "fpga": 1}) as context:
        with pytest.raises(kind, match="'fpga' has no infos: the reason") as caught:
            context.get_external_resource_infos("fpga")
        assert type(caught.value) is kind
        assert context.get_external_resource_infos("fpga", strict=False) == frozenset()
        assert list(context.external_resource_infos()) == ["gpu"]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("unknown-resource", outfitter.UnknownResourceError),
        ("no-driver", outfitter.NoDriverError),
        ("disabled", outfitter.ResourceDisabledError),
        ("invalid-request", outfitter.InvalidRequestError),
        ("waited-too-long", outfitter.WaitedTooLongError),
        ("driver-failed", outfitter.AllocationFailedError),
        ("a-code-of-a-later-version", outfitter.AllocationFailedError),
    ],
)
def test_a_failed_allocation_raises_on_entry_by_its_code(setup: WorkerSetup, code: str, kind: type[Exception]) -> None:
    setup.fake.fail("this is why", code=code)
    context = setup.context({"gpu": 1})
    with pytest.raises(kind, match="this is why") as caught, context:
        pytest.fail("entered")
    assert type(caught.value) is kind
    assert isinstance(caught.value, outfitter.AllocationFailedError)
    assert caught.value.code == code


async def test_asyncio_code_gets_the_error_as_it_is_and_in_no_group(setup: WorkerSetup) -> None:
    setup.fake.fail("this is why")
    with pytest.raises(outfitter.AllocationFailedError, match="this is why"):
        async with setup.context({"gpu": 1}):
            pytest.fail("entered")


def test_a_waiting_worker_enters_when_it_is_granted(setup: WorkerSetup) -> None:
    setup.fake.keep_waiting("all 4 are busy")
    context = setup.context({"gpu": 1})
    with ThreadPoolExecutor() as pool:
        entering = pool.submit(context.__enter__)
        setup.fake.wait_for(lambda: setup.fake.registrations)
        assert not entering.done()
        context._allocation_watch().wait(0, 10)
        assert context.waiting_because == "all 4 are busy"
        setup.fake.grant()
        assert entering.result(10) is context
    assert context.waiting_because is None
    assert ids(context.get_external_resource_infos("gpu")) == ["GPU-a"]
    context.__exit__(None, None, None)


async def test_cancelling_a_waiting_worker_withdraws_its_registration(setup: WorkerSetup) -> None:
    setup.fake.keep_waiting("all 4 are busy")

    async def enter() -> None:
        async with setup.context({"gpu": 1}, worker="w"):
            pytest.fail("entered")

    async with anyio.create_task_group() as group:
        group.start_soon(enter)
        await anyio.to_thread.run_sync(lambda: setup.fake.wait_for(lambda: setup.fake.registrations))
        group.cancel_scope.cancel()
    await anyio.to_thread.run_sync(lambda: setup.fake.wait_for(lambda: setup.fake.departures))
    assert setup.fake.departures == [("w", "left by CancelledError")]


def test_leaving_gives_the_devices_back_and_says_why(setup: WorkerSetup) -> None:
    with setup.context({"gpu": 1}, worker="good"):
        pass
    with pytest.raises(ZeroDivisionError), setup.context({"gpu": 1}, worker="bad"):
        _ = 1 / 0
    setup.fake.wait_for(lambda: len(setup.fake.departures) == 2)
    assert setup.fake.departures == [("good", "finished"), ("bad", "left by ZeroDivisionError")]


def test_an_ended_allocation_raises_from_every_getter(setup: WorkerSetup) -> None:
    with setup.context({"gpu": 1}) as context:
        changes = context.changes("gpu")
        next(changes)
        setup.fake.end("superseded by another", code="superseded")
        with pytest.raises(outfitter.AllocationEndedError, match="is over: superseded by another"):
            next(changes)
        with pytest.raises(outfitter.AllocationEndedError):
            context.get_external_resource_infos("gpu")
        with pytest.raises(outfitter.AllocationEndedError):
            context.get_external_resource_infos("gpu", strict=False)
        with pytest.raises(outfitter.AllocationEndedError):
            _ = context.env


def test_a_state_of_a_later_version_is_not_usable_and_not_final(setup: WorkerSetup) -> None:
    with setup.context({"gpu": 1}) as context:
        changes = context.changes("gpu")
        assert ids(next(changes)) == ["GPU-a"]
        with ThreadPoolExecutor() as pool:
            setup.fake.put_in_state("hibernating")
            after = pool.submit(next, changes)
            setup.fake.set("gpu", [{"id": "GPU-z"}])
            assert ids(after.result(10)) == ["GPU-z"]


def test_a_worker_in_a_state_of_a_later_version_goes_on_waiting(setup: WorkerSetup) -> None:
    setup.fake.keep_waiting("busy")
    context = setup.context({"gpu": 1})
    with ThreadPoolExecutor() as pool:
        entering = pool.submit(context.__enter__)
        setup.fake.wait_for(lambda: setup.fake.registrations)
        setup.fake.put_in_state("hibernating")
        setup.fake.grant()
        entering.result(10)
    context.__exit__(None, None, None)


def test_blocking_code_sees_changes_as_they_come(setup: WorkerSetup) -> None:
    seen: list[list[str]] = []
    with setup.context({"gpu": 1}) as context:
        for infos in context.changes("gpu"):
            seen.append(ids(infos))
            if len(seen) == 3:
                break
            setup.fake.set("gpu", [{"id": f"GPU-{len(seen)}"}])
    assert seen == [["GPU-a"], ["GPU-1"], ["GPU-2"]]


async def test_asyncio_code_sees_changes_as_they_come(setup: WorkerSetup) -> None:
    seen: list[list[str]] = []
    async with setup.context({"gpu": 1}) as context:
        async for infos in context.changes("gpu"):
            seen.append(ids(infos))
            if len(seen) == 3:
                break
            setup.fake.set("gpu", [{"id": f"GPU-{len(seen)}"}])
    assert seen == [["GPU-a"], ["GPU-1"], ["GPU-2"]]


def test_what_does_not_concern_a_resource_is_no_change_of_it(setup: WorkerSetup) -> None:
    with setup.context({"gpu": 1}) as context:
        changes = context.changes("gpu")
        assert ids(next(changes)) == ["GPU-a"]
        setup.fake.set("fpga", [{}])
        setup.fake.set("gpu", [{"id": "GPU-z"}])
        assert ids(next(changes)) == ["GPU-z"]


def test_changes_end_when_the_context_is_left(setup: WorkerSetup) -> None:
    with ThreadPoolExecutor() as pool:
        with setup.context({"gpu": 1}) as context:
            changes = context.changes("gpu")
            assert ids(next(changes)) == ["GPU-a"]
            rest = pool.submit(list, changes)
        assert rest.result(10) == []


def test_several_contexts_live_in_one_process(setup: WorkerSetup) -> None:
    with setup.context({"gpu": 1}) as one, setup.context({"gpu": 2}) as two:
        assert one.worker != two.worker
        assert len(one.get_external_resource_infos("gpu")) == 1
        assert len(two.get_external_resource_infos("gpu")) == 2
    setup.fake.wait_for(lambda: len(setup.fake.departures) == 2)


def test_two_contexts_for_one_worker_in_one_process_are_refused(setup: WorkerSetup) -> None:
    with setup.context({"gpu": 1}, worker="w") as first:
        with pytest.raises(outfitter.ContextStateError, match="for worker 'w' already"):
            setup.context({"gpu": 1}, worker="w").__enter__()
        assert first.get_external_resource_infos("gpu")
    with setup.context({"gpu": 1}, worker="w"):
        pass


def test_a_context_is_used_between_entering_and_leaving_and_entered_once(setup: WorkerSetup) -> None:
    context = setup.context({"gpu": 1})
    with pytest.raises(outfitter.ContextStateError, match="was not entered: use `with"):
        context.get_external_resource_infos("gpu")
    with context:
        view = context.for_operator("infer")
        with pytest.raises(outfitter.ContextStateError, match="was entered before"):
            context.__enter__()
    with pytest.raises(outfitter.ContextStateError, match="was left, and its devices were given back"):
        context.get_external_resource_infos("gpu")
    with pytest.raises(outfitter.ContextStateError, match="was left"):
        view.get_external_resource_infos("gpu")
    with pytest.raises(outfitter.ContextStateError, match="was entered before"):
        context.__enter__()


def test_a_registration_carries_what_was_asked(setup: WorkerSetup) -> None:
    with setup.context(
        {"gpu": 2}, {"infer": {"gpu": 1}}, worker="w", lease=7, wait=60, priority=3, labels={"job": "mnist"}
    ) as context:
        (registration,) = setup.fake.registrations
        assert context.worker == registration.worker == "w"
        assert context.incarnation == registration.incarnation
        assert registration.resources is not None
        assert registration.resources["gpu"].amount == 2
        assert registration.operators is not None
        assert registration.operators["infer"]["gpu"].amount == 1
        assert (registration.lease_s, registration.wait_s, registration.priority) == (7, 60, 3)
        assert registration.labels == {"job": "mnist"}
        assert context.record.request.lease_s == 7
