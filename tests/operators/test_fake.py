"""What the fake of `outfitter.testing` offers on top of what it shares with the real thing."""

from __future__ import annotations

import threading
from threading import Timer

import pytest

import outfitter
from outfitter.testing import FakeOutfitter, fake_context


def test_one_call_makes_a_context_for_a_simple_test() -> None:
    with fake_context({"gpu": [{"index": "7", "uuid": "GPU-x"}]}) as context:
        (info,) = context.get_external_resource_infos("gpu")
        assert dict(info) == {"id": "gpu:0", "index": "7", "local_index": "0", "uuid": "GPU-x"}


def test_of_a_shared_resource_every_operator_sees_all_devices() -> None:
    fake = FakeOutfitter({"gpu": [{}, {}], "nic": [{}, {}]}, shared=["nic"])
    with fake.context({"gpu": 2, "nic": 1}, operators={"infer": {"gpu": 1, "nic": 1}}) as context:
        seen = [
            [info["id"] for info in context.for_operator(who).get_external_resource_infos(name)]
            for name in ("gpu", "nic")
            for who in ("infer", "other")
        ]
    assert seen == [["gpu:0"], ["gpu:1"], ["nic:0", "nic:1"], ["nic:0", "nic:1"]]


def test_a_test_can_lose_the_lease_and_have_it_back() -> None:
    fake = FakeOutfitter({"gpu": [{}]})
    told: list[outfitter.LeaseLostError] = []
    with fake.context({"gpu": 1}, on_lease_at_risk=told.append) as context, fake.context(lease=None) as forever:
        fake.lose_lease()
        assert len(told) == 1
        assert context.lease_lost
        with pytest.raises(outfitter.LeaseLostError):
            context.get_external_resource_infos("gpu")
        assert forever.get_external_resource_infos("gpu")
        fake.restore_lease()
        assert not context.lease_lost
        assert context.get_external_resource_infos("gpu")


def test_a_test_can_take_the_manager_away() -> None:
    fake = FakeOutfitter({"gpu": [{}]})
    fake.absent = True
    with pytest.raises(outfitter.NoManagerError):
        fake.context({"gpu": 1}).__enter__()


@pytest.mark.parametrize("wait", [0, 0.05])
def test_a_worker_that_waits_longer_than_it_may_is_refused(wait: float) -> None:
    fake = FakeOutfitter({"gpu": [{}]})
    fake.keep_waiting("busy")
    with pytest.raises(outfitter.WaitedTooLongError, match=f"waited {wait} s; last: busy"):
        fake.context({"gpu": 1}, wait=wait).__enter__()
    assert fake.departures == []
    fake.grant()
    assert fake.context({"gpu": 1}, wait=wait).__enter__()


def test_a_worker_that_gets_its_devices_in_time_keeps_them() -> None:
    fake = FakeOutfitter({"gpu": [{}]})
    fake.keep_waiting("busy")
    before = set(threading.enumerate())
    Timer(0, lambda: (fake.wait_for(lambda: fake.registrations), fake.grant())).start()
    with fake.context({"gpu": 1}, wait=3600) as context:
        assert context.get_external_resource_infos("gpu")
        for thread in set(threading.enumerate()) - before:
            thread.join(10)
        assert set(threading.enumerate()) <= before, "nothing waits for the end of the hour"


def test_asking_for_more_than_the_test_has_listed_fails_at_once() -> None:
    with pytest.raises(outfitter.AllocationFailedError, match="2 of 'gpu' asked for, and the fake has 1"):
        FakeOutfitter({"gpu": [{}]}).context({"gpu": 2}).__enter__()


def test_waiting_for_what_does_not_happen_ends() -> None:
    with pytest.raises(TimeoutError, match="no worker made"):
        FakeOutfitter().wait_for(lambda: False, timeout=0.01)


def test_the_fake_starts_no_thread_and_opens_no_bus(tmp_path: object) -> None:
    before = set(threading.enumerate())
    with FakeOutfitter({"gpu": [{}]}).context(bus="sqlite:////nowhere/at/all.db"):
        assert set(threading.enumerate()) <= before
