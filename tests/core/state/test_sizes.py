"""What is decided can be written: a grant that cannot fails alone, an end always comes before what follows it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outfitter_proto.codec import encode
from outfitter_proto.records import Allocation, Health, Host, ManagerIdentity, Register, Transition
from outfitter_service.core import model as m
from outfitter_service.core.decide import Decision, Rules
from outfitter_service.core.hosts import host_record
from outfitter_service.core.state.resource_state import ResourceState
from outfitter_service.core.state.sizes import LONGEST_REASON, REQUEST_BYTES
from support.core.core_driver import HOST, START, CoreDriver, asks, specs
from support.core.world import written

MOST = 20_000
NOTE = "n" * 400
LARGE = 40
"""So many devices with a note just fit into a record, where `MOST` is the bound, and little else besides."""


def devices(count: int, note: str = NOTE, **fields: Any) -> list[m.KnownDevice]:
    return [m.KnownDevice(id=f"g{n}", properties={"index": str(n), "note": note}, **fields) for n in range(count)]


class Scale(CoreDriver):
    """A core whose decisions are weighed."""

    def only(self, event: m.Event) -> Decision:
        decision = super().only(event)
        assert written(decision) <= self.rules.max_bytes, f"{event} is decided in {written(decision)} bytes"
        return decision


@pytest.fixture
def core() -> CoreDriver:
    return Scale(max_bytes=MOST)


@pytest.mark.parametrize("how", ["deregister", "die", "expire"])
def test_an_end_is_decided_although_the_next_grant_is_too_large(core: CoreDriver, how: str) -> None:
    core.report(*devices(LARGE))
    core.register("w0", 1)
    core.register("large", LARGE, labels={"note": "x" * 2000})
    core.register("next", 1)
    getattr(core, how)("w0")
    assert (core.state("w0"), core.state("large"), core.state("next")) == ("ended", "failed", "allocated")
    assert core["large"].reason_code == "too-large"


def test_it_is_told_at_once_where_even_the_smallest_devices_would_not_fit(core: CoreDriver) -> None:
    core.report(*devices(1, "n" * 9000), *devices(100)[1:])
    core.register("w0", 1)  # it has the large one, and everybody waits for it
    record = core.register("large", 100)
    assert (record.state, record.reason_code) == ("failed", "too-large")
    assert "ask for fewer devices (about 31 of 100 fit)" in str(record.reason)
    assert core.register("other", 99).reason_code == "too-large"
    assert core.register("small", 20).state == "allocated"


def test_whoever_waited_before_the_driver_reported_fails_when_it_has(core: CoreDriver) -> None:
    for worker, amount in (("large", LARGE * 2), ("next", 1)):
        assert core.register(worker, amount).reason_code == "not-reported"
    core.report(*devices(LARGE * 2))
    assert (core.state("large"), core.state("next")) == ("failed", "allocated")


def test_those_that_want_the_same_fail_one_after_the_other_and_the_rest_is_served(core: CoreDriver) -> None:
    core.register("next", 1, priority=-1)
    for number in range(60):
        core.register(f"w{number}", LARGE, labels={"note": "x" * 300})
    core.report(*devices(2 * LARGE, "n" * 550))
    assert {core.state(f"w{number}") for number in range(60)} == {"failed"}
    assert core.state("next") == "allocated"


def test_a_grant_that_fits_by_itself_is_left_to_the_next_decision(core: CoreDriver) -> None:
    core.report(*devices(26))
    core.register("w0", 25)
    core.register("w1", 25)
    decision = core.deregister("w0")
    assert decision.follow_ups == [m.Reschedule(host=HOST, cause="deregister", whole=False)]
    assert (core.state("w0"), core.state("w1")) == ("ended", "allocated")


def test_a_newer_run_waits_for_a_commit_of_its_own_beside_its_large_elder(core: CoreDriver) -> None:
    core.report(*devices(80))
    core.register("w", 36)
    core.register("w", 36, incarnation="2", labels={"note": "x" * 1000})
    assert core["w"].reason_code == "superseded"
    assert (core.state("w"), core.state("w", "2")) == ("allocated", "allocated")


@pytest.mark.parametrize("confirms", [False, True])
def test_what_was_granted_can_be_refreshed_and_released_whatever_becomes_of_its_devices(*, confirms: bool) -> None:
    core = Scale(m.ResourceSpec(name="gpu", confirms=confirms), max_bytes=10 * MOST)
    core.report(*devices(2000, "n"))
    amount = 2000
    while core.register("w", amount, incarnation=str(amount)).state == "failed":
        amount -= 20
    assert len(encode(core["w", str(amount)])) > 5 * MOST
    core.deregister("w", str(amount))
    core.say(m.Unprepared(allocation=f"h/w/{amount}", token=1, confirmed=True))
    core.register("w", amount)
    core.report(*devices(2000, "n", health=Health.UNHEALTHY, reason="r" * 500))
    assert {info["health"] for info in core["w"].resources["gpu"]} == {"unhealthy"}
    decision = core.say(m.OwnerDied(allocation="h/w/1", detail="\x01" * 5000))
    assert len(decision.history[0][1].explanation) == LONGEST_REASON
    assert core.state("w") == ("releasing" if confirms else "ended")
    assert len(str(core["w"].reason)) == LONGEST_REASON
    core.say(m.Unprepared(allocation="h/w/1", token=2, confirmed=True))
    assert core.state("w") == "ended"


def test_a_record_of_another_time_that_is_larger_than_any_may_be_ends_without_its_devices() -> None:
    core = CoreDriver(max_bytes=10 * MOST)
    core.report(*devices(LARGE * 3))
    core.register("w", LARGE * 3)
    core.register("next", 2)
    core.rules = Rules(writer=core.rules.writer, specs=core.rules.specs, max_bytes=MOST)
    core.deregister("w")
    assert (core["w"].state, core["w"].resources) == ("ended", {})
    assert core.state("next") == "allocated"  # of what it had


def test_no_plain_grant_is_larger_than_a_record_may_be() -> None:
    core = Scale(max_bytes=REQUEST_BYTES + MOST)
    core.report(*devices(1000, "n"))
    for amount in (100, 900, 1000):
        record = core.register(f"w{amount}", amount)
        core.deregister(f"w{amount}")
        assert record.state in ("allocated", "failed")
    core.report(*devices(1000, NOTE))
    assert core.register("w", 1000).reason_code == "too-large"
    assert core.register("v", 1).state == "allocated"


def test_many_give_up_and_are_forgotten_in_decisions_that_can_be_written(core: CoreDriver) -> None:
    core.report("a")
    core.register("holder", 1)
    names = [f"w{number}".ljust(240, "x") for number in range(100)]
    for name in names:
        core.register(name, 1, wait_s=5.0, labels={"note": "x" * 1000})
    core.pass_time(6)
    assert {core.state(name) for name in names} == {"failed"}
    core.pass_time(core.rules.retention_s + 1)
    assert list(core.ledger.allocations) == ["h/holder/1"]


def test_whoever_could_not_wait_beside_a_record_of_its_own_is_told_so(core: CoreDriver) -> None:
    record = core.register("w", 1, labels={"note": "x" * (MOST // 4)})
    assert (record.state, record.reason_code) == ("failed", "too-large")


# --- hosts ---------------------------------------------------------------------------------------------


def host_of(inventories: dict[str, ResourceState], most: int) -> Host | None:
    before = Host(host=HOST, manager=ManagerIdentity(instance="i", version="0", since=START), since=START)
    rules = Rules(writer="w", specs=specs(*[m.ResourceSpec(name=name) for name in inventories]), max_bytes=most)
    return host_record(before, rules, inventories, START, keeps_names=False)


def test_a_hosts_record_lists_fewer_devices_of_what_takes_most_and_counts_all() -> None:
    inventories = {"small": ResourceState.of(tuple(devices(3))), "large": ResourceState.of(tuple(devices(300)))}
    record = host_of(inventories, MOST)
    assert record is not None
    told = record.resources
    assert [len(told[name].devices) for name in inventories] == [3, 16]
    assert [told[name].total for name in inventories] == [3, 300]


@given(
    counts=st.lists(st.integers(0, 300), max_size=20),
    note=st.integers(0, 3000),
    failure=st.booleans(),
    most=st.integers(200, 100_000),
)
@settings(deadline=None, max_examples=50)
def test_a_hosts_record_always_fits(counts: list[int], note: int, failure: bool, most: int) -> None:
    failed = m.DriverFailure(reason="x" * 500) if failure else None
    inventories = {
        f"r{number}": ResourceState(devices=tuple(devices(count, "n" * note)), failure=failed, reported=True)
        for number, count in enumerate(counts)
    }
    record = host_of(inventories, most)
    assert record is None or len(encode(record.resources)) <= most


# --- everything at once --------------------------------------------------------------------------------

WORKERS = st.sampled_from("abcdef")


@st.composite
def scenes(draw: st.DrawFn) -> list[tuple[str, Any]]:
    """What happens to one host: registrations with operators, reports of devices of different sizes, ends."""
    step = st.one_of(
        st.tuples(st.just("register"), st.tuples(WORKERS, st.integers(1, 40), st.integers(0, 3), st.integers(0, 900))),
        st.tuples(st.just("share"), st.tuples(WORKERS, st.integers(1, 40))),
        st.tuples(st.just("report"), st.lists(st.sampled_from([0, 10, 300, 800]), min_size=1, max_size=40)),
        st.tuples(st.just("shared"), st.lists(st.sampled_from([0, 10, 300]), min_size=1, max_size=20)),
        st.tuples(st.sampled_from(["ill", "deregister", "death", "lease"]), WORKERS),
    )
    return draw(st.lists(step, min_size=3, max_size=25))


@given(scene=scenes(), most=st.integers(8_000, 40_000), chunk=st.integers(1, 8))
@settings(deadline=None, max_examples=150)
def test_every_decision_fits_every_end_comes_and_nobody_starves(
    scene: list[tuple[str, Any]], most: int, chunk: int
) -> None:
    core = Scale(m.ResourceSpec(name="gpu"), m.ResourceSpec(name="net", shared=True), max_bytes=most, chunk=chunk)
    runs: dict[str, int] = {}

    def newest(worker: str) -> str:
        return str(runs.get(worker, 0))

    def report(sizes: list[int], resource: str, health: Health = Health.HEALTHY) -> None:
        found = [
            m.KnownDevice(
                id=f"{resource}{n}", properties={"note": "n" * size}, env={"SEE": f"{resource}{n}"}, health=health
            )
            for n, size in enumerate(sizes)
        ]
        core.report(*found, resource=resource)

    sizes = [10]
    for what, how in scene:
        match what, how:
            case "register", (worker, amount, operators, label):
                runs[worker] = runs.get(worker, 0) + 1
                wanted = asks(gpu=amount, net=1) if operators == 3 else asks(gpu=amount)
                dealt = {f"o{n}": asks(gpu=1) for n in range(min(operators, amount))} or None
                message = Register(
                    host=HOST, worker=worker, incarnation=newest(worker), resources=wanted, operators=dealt,
                    labels={"note": "x" * label},
                )  # fmt: skip
                core.message(message)
            case "share", (worker, operators):
                runs[worker] = runs.get(worker, 0) + 1
                dealt = {f"o{n}": asks(net=1) for n in range(operators)}
                core.register(worker, incarnation=newest(worker), resources=asks(net=1), operators=dealt)
            case "report", found:
                sizes = found
                report(sizes, "gpu")
            case "shared", found:
                report(found, "net")
            case "ill", _:
                report(sizes, "gpu", Health.UNHEALTHY)
            case "deregister", worker:
                core.deregister(worker, newest(worker))
            case "death", worker:
                core.die(worker, newest(worker))
            case "lease", worker:
                core.expire(worker, newest(worker))
        if what in ("deregister", "death", "lease") and how in runs:
            assert core.state(how, newest(how)) in ("ended", "failed")
    # at rest: everybody who holds is over, and in the end nobody waits for what is there
    for key, record in list(core.ledger.allocations.items()):
        if record.state == "allocated":
            core.say(m.OwnerDied(allocation=key, detail="gone"))
    for record in core.ledger.allocations.values():
        if record.state == "pending":
            assert any(
                len(core.host_state.devices.inventory(name).devices) < amount
                or core.host_state.devices.inventory(name).healthy < amount
                or core.host_state.holders.live
                for name, amount in record.request.amounts.items()
            ), f"{record.key} waits for nothing: {record.reason}"  # fmt: skip
    for decision in core.decisions:
        for _, step in decision.history:
            if isinstance(step, Transition) and isinstance(step.record, Allocation) and step.to == "allocated":
                assert len(encode(step.record)) <= most
