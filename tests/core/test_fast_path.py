"""The short way of a fast grant says what the steps come to. Every message of every other core test is held against
that as well (support/core/core_driver.py and support/core/world.py)."""

from copy import deepcopy
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from outfitter_proto.records import Register, ResourceRequest, Source
from outfitter_service.core import fast_path
from outfitter_service.core import model as m
from outfitter_service.core.decide import Decision, decide_in_full
from support.core.core_driver import HOST, CoreDriver, asks, device, ill
from support.core.decided import apply, decision_of, touched
from support.core.fingerprint import whole

MAYBE = st.sampled_from([False, False, False, True])
DEVICES = st.sampled_from(
    [
        device("a"),
        device("a", env={"CUDA_VISIBLE_DEVICES": "a"}),
        device("a", cdi=("nvidia.com/gpu=a",)),
        device("a", aliases=("a2", "a3")),
        ill("a"),
    ]
)


def both_ways(core: CoreDriver, **fields: Any) -> tuple[Decision | None, Decision]:
    """What the short way says of a worker's first registration, and what the steps come to. What is said by both is
    done by both."""
    message = Register(host=HOST, worker="w", incarnation="1", **fields)
    event = m.Incoming(message, Source(partition=0, offset=core.offset + 1))
    granted = fast_path.grant(core.ledger, core.rules, event, core.now)
    steps = decide_in_full(core.ledger, core.rules, event, core.now)
    if granted is None:
        return None, steps
    core.ledger.begin_commit()
    core.ledger.end_commit()
    ledgers = core.ledger, deepcopy(core.ledger)
    apply(granted, ledgers[0])
    apply(steps, ledgers[1])
    assert whole(ledgers[0]) == whole(ledgers[1])
    assert touched(ledgers[0]) == touched(ledgers[1])
    for ledger in ledgers:
        ledger.rollback()
    assert whole(ledgers[0]) == whole(ledgers[1])
    return decision_of(granted), steps


@given(
    first=DEVICES,
    count=st.integers(0, 3),
    flags=st.fixed_dictionaries(dict.fromkeys(("shared", "on_demand", "prepares", "confirms"), MAYBE)),
    state=st.sampled_from([*m.SpecState, m.SpecState.OK, m.SpecState.OK]),
    amount=st.sampled_from([None, 1, 1, 2]),
    asked=st.sampled_from([None, {}, {"gpu": 1}, {"gpu": 2}, {"gpu": 0}, {"gpu": 1, "fpga": 1}, {"nothing": 1}]),
    fields=st.fixed_dictionaries(
        {},
        optional={
            "priority": st.integers(-1, 1),
            "wait_s": st.sampled_from([0.0, 5.0]),
            "lease_s": st.sampled_from([None, 7.0]),
            "labels": st.just({"a": "b"}),
            "operators": st.sampled_from([None, {}, {"infer": {"gpu": ResourceRequest(amount=1)}}]),
        },
    ),
    before=st.sampled_from(["nobody", "holder", "waiter", "earlier incarnation", "driver failed"]),
    reported=st.sampled_from(["all", "all", "all", "none", "not yet"]),
    connected=st.sampled_from([(), (), ("a",), ("a", "d0")]),
)
def test_whatever_is_asked_and_known_both_ways_agree(
    first: m.KnownDevice,
    count: int,
    flags: dict[str, bool],
    state: m.SpecState,
    amount: int | None,
    asked: dict[str, int] | None,
    fields: dict[str, Any],
    before: str,
    reported: str,
    connected: tuple[str, ...],
) -> None:
    gpu = m.ResourceSpec(name="gpu", amount=amount, state=state, **flags)
    core = CoreDriver(gpu, m.ResourceSpec(name="fpga", state=m.SpecState.DISABLED), wait_s=9.0)
    if reported != "not yet":
        known = (first, *(device(f"d{number}") for number in range(count)))
        core.report(*(known if reported == "all" else ()), asked=4)
    if connected:
        # by another resource, under a name that comes before theirs: two of one free list may turn out to be one device
        core.report(device("0", aliases=connected), resource="fpga")
    if before == "holder":
        core.register("holder", 1)
    elif before == "waiter":
        core.register("waiter", 9)
    elif before == "earlier incarnation":
        core.register("w", 1, incarnation="0")
    elif before == "driver failed":
        core.fail("no")
    granted, steps = both_ways(core, resources=asked if asked is None else asks(**asked), **fields)
    assert granted is None or granted == steps


def test_one_exclusive_resource_of_which_enough_is_free_is_granted_the_short_way() -> None:
    core = CoreDriver(m.ResourceSpec(name="gpu", amount=1))
    core.report(device("a", env={"E": "1"}, cdi=("x/y=a",), aliases=("b",)), "c", "d")
    core.register("holder", 1)
    for asked in (asks(gpu=2), asks(gpu=1), asks(gpu=0), None):
        granted, steps = both_ways(core, resources=asked, lease_s=5.0, priority=3, labels={"l": "1"})
        assert granted == steps


def test_two_devices_that_another_resource_connects_are_one_device_and_are_not_granted_as_two() -> None:
    core = CoreDriver(m.ResourceSpec(name="gpu", amount=1), m.ResourceSpec(name="nic", amount=1))
    core.report("a", "b")
    core.report(device("0", aliases=("a", "b")), resource="nic")
    granted, steps = both_ways(core, resources=asks(gpu=2))
    assert granted is None
    assert steps.history[0][1].record.reason == "2 gpu requested, but the host has only 1 device for them: a"
    granted, steps = both_ways(core, resources=asks(gpu=1))
    assert granted == steps
    core.register("w", 1)
    core.deregister("w")
    assert core.register("v", 1).state == "allocated"


def test_two_devices_that_are_connected_after_their_grant_are_held_under_one_name_twice() -> None:
    """Held once and given back twice, nobody would have got them ever again."""
    core = CoreDriver(m.ResourceSpec(name="gpu", amount=1), m.ResourceSpec(name="nic", amount=1))
    core.report("a", "b")
    core.register("w", 2)
    core.report(device("0", aliases=("a", "b")), resource="nic")
    core.deregister("w")
    assert core.register("v", 1).state == "allocated"


def test_a_registration_that_asks_for_something_unknown_as_well_is_not_granted_the_short_way() -> None:
    core = CoreDriver(m.ResourceSpec(name="gpu", amount=1))
    core.report("a")
    granted, steps = both_ways(core, resources=asks(gpu=1, nothing=1))
    assert granted is None
    assert steps.history[0][1].record.state == "failed"


def test_who_would_pass_by_a_waiter_is_not_granted_the_short_way() -> None:
    core = CoreDriver(m.ResourceSpec(name="gpu", amount=1))
    core.report("a", "b")
    core.register("holder", 1)
    core.register("waiter", 2)
    granted, _ = both_ways(core, resources=asks(gpu=1))
    assert granted is None
