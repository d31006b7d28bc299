"""Parts of devices, replicas of devices, and who keeps whom from having them."""

from __future__ import annotations

from itertools import combinations, product
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from outfitter_proto.records import HOLDING_STATES, Allocation, PoolUse
from outfitter_service.core import model as m
from outfitter_service.core.placement import search
from outfitter_service.core.state.ledger import Ledger, PutAllocation, PutRecord, SetInventory
from outfitter_service.core.state.overlay import HostOverlay
from outfitter_service.core.state.pools import WHOLE
from outfitter_service.query.device_lines import lines_of
from outfitter_service.query.ledger_view import LedgerView
from outfitter_service.runtime.processor.reporting.gauges import StateGauges
from support.api import change
from support.core.core_driver import HOST, CoreDriver, asks, device, restarted
from support.core.fingerprint import whole

GPU, MIG, OTHER = (m.ResourceSpec(name=name) for name in ("gpu", "mig", "other"))
MON, MIGMON = (m.ResourceSpec(name=name, shared=True) for name in ("mon", "migmon"))
PART = PoolUse(1, WHOLE, "parts")


def parts(*names: str) -> list[m.KnownDevice]:
    """`0.1` is part 1 of g0."""
    return [device(f"p{name}", part_of=f"g{name[0]}") for name in names]


def cards(*more: m.ResourceSpec) -> CoreDriver:
    """Two cards as gpu, and two parts of the first and one of the second as mig."""
    core = CoreDriver(GPU, MIG, *more)
    core.report("g0", "g1")
    core.report(*parts("0.0", "0.1", "1.0"), resource="mig")
    return core


# --- parts ---


def test_who_has_a_part_keeps_the_whole_from_others_and_no_other_part() -> None:
    core = cards()
    assert core.register("p", resources=asks(mig=1)).uses == {"g0": PART}
    assert core.register("q", resources=asks(mig=1)).state == "allocated"
    assert core.register("w", 1).resources["gpu"][0]["id"] == "g1"
    assert core.register("v", 1).reason == "waits for 1 gpu: 0 of 2 free"
    core.deregister("p")
    assert core.state("v") == "pending"
    core.deregister("q")
    assert core.has("v") == ["g0"]


def test_who_has_the_whole_keeps_its_parts_from_others() -> None:
    core = cards()
    assert "uses" not in repr(core.register("w", 2).uses)
    assert core.register("p", resources=asks(mig=1)).state == "pending"
    core.deregister("w")
    assert core.state("p") == "allocated"


def test_a_record_says_once_of_which_whole_it_has_parts() -> None:
    core = cards()
    assert core.register("p", resources=asks(mig=3)).uses == {"g0": PART, "g1": PART}


@pytest.mark.parametrize("first", ["gpu", "mig"])
def test_a_part_and_its_whole_are_apart_after_a_restart_whoever_reports_first(first: str) -> None:
    core = cards()
    core.register("p", resources=asks(mig=1))
    core.register("w", 1)
    core = restarted(core)
    for resource in (first, *({"gpu", "mig"} - {first})):
        core.report(*(["g0", "g1"] if resource == "gpu" else parts("0.0", "0.1", "1.0")), resource=resource)
    assert core.register("v", 1).state == "pending"
    assert core.register("q", resources=asks(mig=2)).state == "pending"


def test_what_is_part_of_what_is_known_after_a_restart_before_the_driver_reports_that_knows_it() -> None:
    core = CoreDriver(GPU, MIG, OTHER)
    core.report("g0")
    core.report(*parts("0.0"), resource="mig")
    core.report("p0.0", resource="other")
    core = restarted(core)
    core.report("g0")
    core.report("p0.0", resource="other")
    assert core.register("p", resources=asks(other=1)).uses == {"g0": PART}
    assert core.register("w", 1).state == "pending"


def test_a_part_that_becomes_known_as_one_after_its_grant_keeps_its_whole_from_then_on() -> None:
    core = CoreDriver(GPU, MIG)
    core.report("g0")
    core.report("p0.0", resource="mig")
    core.register("p", resources=asks(mig=1))
    core.report(*parts("0.0"), resource="mig")
    assert core["p"].uses == {"g0": PART}
    core.report(resource="mig")
    core = restarted(core)
    core.report("g0")
    assert core.register("w", 1).state == "pending"
    core.deregister("p")
    assert core.state("w") == "allocated"


def test_a_held_whole_keeps_what_was_a_part_of_it_although_its_driver_says_so_no_longer() -> None:
    core = CoreDriver(GPU, MIG)
    core.report("g0")
    core.report(*parts("0.0"), resource="mig")
    core.register("w", 1)
    core.report("p0.0", "p9", resource="mig")
    assert core.register("p", resources=asks(mig=1)).resources["mig"][0]["id"] == "p9"
    assert core.register("q", resources=asks(mig=1)).state == "pending"


@pytest.mark.parametrize("lent", ["before", "after", "after what had room"])
@pytest.mark.parametrize("resource", ["gpu", "mon"])
def test_the_holder_of_a_whole_keeps_its_parts_after_a_restart_although_the_report_that_knew_them_had_no_room(
    lent: str, resource: str
) -> None:
    core = CoreDriver(GPU, MIG, MON, OTHER, max_bytes=6000)
    core.report("g0", resource=resource)
    core.report("p0", resource="other")
    crowd = [device("p0", part_of="g0"), *[device(f"p{n}".ljust(300, "x"), part_of=f"g{n}") for n in range(1, 12)]]
    if lent == "after what had room":
        core.report(*crowd[:1], resource="mig")
    if lent == "before":
        core.register("w", resources=asks(**{resource: 1}))
    core.report(*crowd, resource="mig")
    assert core.host_state.devices.inventory("mig").refused is not None
    if lent != "before":
        core.register("w", resources=asks(**{resource: 1}))
    assert core.register("v", resources=asks(other=1)).state == "pending"
    core.deregister("v")
    core = restarted(core, max_bytes=6000)
    core.report("g0", resource=resource)
    core.report("p0", resource="other")
    assert core.register("p", resources=asks(other=1)).state == "pending"
    core.deregister("w")
    assert core.state("p") == "allocated"


def test_one_worker_gets_a_whole_and_parts_of_another_but_not_a_whole_and_its_part() -> None:
    core = cards()
    record = core.register("w", resources=asks(gpu=1, mig=2))
    assert (core.has("w"), core.has("w", "mig")) == (["g1"], ["p0.0", "p0.1"]), record.reason
    core.deregister("w")
    assert core.register("x", resources=asks(gpu=2, mig=1)).reason_code == "infeasible"
    assert core.register("y", resources=asks(gpu=1, mig=3)).reason_code == "infeasible"


def test_a_part_of_a_part_is_a_part_of_the_whole_under_any_of_its_names() -> None:
    core = CoreDriver(GPU, MIG, m.ResourceSpec(name="ci"))
    core.report(device("g0", aliases=("pci:0000:01:00.0",)))
    core.report(device("gi", part_of="pci:0000:01:00.0"), resource="mig")
    core.report(device("ci", part_of="gi"), resource="ci")
    core.register("c", resources=asks(ci=1))
    assert core.register("g", resources=asks(mig=1)).state == "pending"
    assert core.register("w", 1).state == "pending"
    core.deregister("c")
    assert core.state("g") == "allocated"


def test_the_names_of_a_whole_stay_connected_while_somebody_has_a_part_of_it() -> None:
    core = CoreDriver(GPU, MIG, OTHER)
    core.report(device("g0", aliases=("pci:0000:01:00.0",)))
    core.report(device("p", part_of="pci:0000:01:00.0"), resource="mig")
    core.register("p", resources=asks(mig=1))
    core.report("g9")  # the driver that knew both names of the card does not any more
    core = restarted(core)
    core.report("pci:0000:01:00.0", resource="other")
    assert core.register("w", resources=asks(other=1)).state == "pending"


def test_devices_that_are_parts_of_each_other_exclude_each_other_and_nothing_breaks() -> None:
    core = CoreDriver(GPU, MIG)
    core.report(device("a", part_of="b"), device("b", part_of="a"), device("c", part_of="c"))
    assert core.register("w", 2).state == "allocated"
    assert sorted(core.has("w")) in (["a", "c"], ["b", "c"])
    assert core.register("v", 1).state == "pending"


def test_a_waiter_for_a_whole_is_not_starved_by_a_stream_of_parts() -> None:
    core = CoreDriver(GPU, MIG)
    core.report("g0")
    core.report(*parts("0.0", "0.1"), resource="mig")
    core.register("p0", resources=asks(mig=1))
    core.register("w", 1)
    assert core.register("p1", resources=asks(mig=1)).reason == "waits behind earlier workers that want gpu"
    core.deregister("p0")
    assert (core.state("w"), core.state("p1")) == ("allocated", "pending")
    core.deregister("w")
    assert core.state("p1") == "allocated"


def test_who_shares_a_whole_and_who_has_a_part_alone_exclude_each_other() -> None:
    core = cards(MON, MIGMON)
    core.report("g0", resource="mon")
    core.report(*parts("0.0", "0.1"), resource="migmon")
    core.register("p", resources=asks(mig=1))
    assert core.register("m1", resources=asks(mon=1)).state == "pending"
    core.deregister("p")
    assert core.state("m1") == "allocated"
    assert core.register("m2", resources=asks(mon=1)).state == "allocated"
    assert core.register("mm", resources=asks(migmon=2)).state == "allocated", "sharers of parts and of wholes"
    assert core["mm"].uses == {"g0": PoolUse(1, WHOLE)}
    assert core.register("q", resources=asks(mig=2)).state == "pending"
    for name in ("m1", "m2"):
        core.deregister(name)
    assert core.state("q") == "pending", "somebody shares the parts of g0"
    core.deregister("mm")
    assert core.state("q") == "allocated"


def test_a_worker_sees_its_own_part_and_the_whole_in_its_shared_resources() -> None:
    core = cards(MON)
    core.report("g0", resource="mon")
    record = core.register("w", resources=asks(mig=1, mon=1))
    assert (record.state, record.uses) == ("allocated", {"g0": PoolUse(1, WHOLE, "parts+shared")})
    assert core.register("v", resources=asks(mig=1)).resources["mig"][0]["id"] == "p1.0"
    assert core.register("u", resources=asks(mon=1)).state == "pending"


def test_an_order_about_a_whole_takes_out_its_parts_and_one_about_a_part_its_whole() -> None:
    core = cards()
    core.cordon("o1", device="g0")
    assert core.register("p", resources=asks(mig=2)).reason_code == "cordoned"
    core.cordon("o1", device="g0", ended_at=core.now, ended_by="ada")
    assert core.state("p") == "allocated"
    core.deregister("p")
    core.cordon("o2", device="p0.1")
    assert core.register("w", 2).reason_code == "cordoned"
    assert core.register("q", resources=asks(mig=2)).state == "allocated"


def test_a_holder_of_a_part_does_not_make_new_cards_suspicious_although_nobody_reports_the_whole() -> None:
    core = CoreDriver(MIG)
    core.report(*parts("0.0"), resource="mig")
    core.register("p", resources=asks(mig=1))
    core.report(*parts("0.0", "0.1"), resource="mig")
    assert core.register("q", resources=asks(mig=1)).state == "allocated"


# --- replicas ---


def replicated(count: int = 2, **fields: bool) -> CoreDriver:
    core = CoreDriver(m.ResourceSpec(name="gpu", replicas=count, **fields), MIG)
    core.report("g0", "g1")
    return core


def test_a_device_is_lent_to_as_many_workers_as_it_has_replicas() -> None:
    core = replicated()
    assert core.register("a", 2).uses == {name: PoolUse(WHOLE // 2, WHOLE, "replicas") for name in ("g0", "g1")}
    assert core.register("b", 1).state == "allocated"
    assert core.register("c", 1).state == "allocated"
    assert core.register("d", 1).state == "pending"
    core.deregister("a")
    assert core.state("d") == "allocated"


def test_a_worker_gets_replicas_of_different_devices() -> None:
    record = replicated().register("a", 3)
    assert record.reason == "3 gpu requested, 2 discovered; a worker gets replicas of different devices"


def test_a_worker_gets_replicas_of_one_device_where_the_resource_says_so() -> None:
    core = replicated(replicas_same_device=True)
    assert core.register("a", 3).uses == {
        "g0": PoolUse(WHOLE, WHOLE, "replicas"),
        "g1": PoolUse(WHOLE // 2, WHOLE, "replicas"),
    }
    assert [info["local_index"] for info in core["a"].resources["gpu"]] == ["0", "1", "2"]
    assert core.register("b", 2).reason == "waits for 2 gpu: 1 of 2 free"
    core.deregister("b")
    assert core.register("c", 1).state == "allocated"
    assert core.register("d", 5).reason == "5 gpu requested, 2 discovered, with 2 replicas each"
    core = restarted(core)
    core.report("g0", "g1")
    assert core.register("e", 1).state == "pending"
    core.deregister("a")
    assert core.has("e") == ["g0"]


def test_operators_divide_replicas_of_different_devices_only() -> None:
    core = replicated(replicas_same_device=True)
    operators = {name: asks(gpu=1) for name in ("a", "b")}
    assert core.register("w", 2, operators=operators).state == "allocated"
    assert core.has("w") == ["g0", "g1"]
    three = {name: asks(gpu=1) for name in ("a", "b", "c")}
    assert core.register("v", 3, operators=three).reason_code == "infeasible"
    assert core.register("u", 3).reason == "waits for 3 gpu: 2 of 2 free"


def test_who_has_a_replica_keeps_it_where_the_resource_lends_whole_devices_after_a_restart() -> None:
    core = replicated()
    core.register("a", 2)
    core = restarted(core, configured=[GPU, MIG])
    core.report("g0", "g1")
    assert core.register("e", 1).state == "pending"
    core.deregister("a")
    assert core.state("e") == "allocated"


def test_a_replica_of_one_resource_keeps_the_whole_device_of_another() -> None:
    core = replicated()
    core.report("g0", "g1", resource="mig")
    core.register("x", 2)
    assert core.register("y", resources=asks(mig=1)).state == "pending"
    core.deregister("x")
    assert core.state("y") == "allocated"
    assert core.register("z", 2).state == "pending"


# --- a search without an end ---


def test_who_waits_because_a_search_took_too_long_claims_nothing_and_is_looked_at_when_devices_come_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = cards()
    core.register("p", resources=asks(mig=1))
    monkeypatch.setattr(search, "MOST_STEPS", 0)
    record = core.register("w", resources=asks(mig=2, gpu=1))
    assert record.reason_code == "placement-not-found"
    assert core.register("v", 1).state == "allocated"
    monkeypatch.undo()
    core.deregister("v")
    assert core.state("w") == "pending"
    core.deregister("p")
    assert core.state("w") == "allocated"


# --- in any order ---


class Held(NamedTuple):
    """One device of one record. `how`: `alone`, `shared` or `replica`."""

    key: str
    device: str
    how: str


ABOVE = {"p0": "g0", "p1": "g0", "p2": "g1", "c0": "p0", "c1": "p0"}
SHOWN = {
    "gpu": ["g0", "g1"],
    "mig": ["p0", "p1", "p2", "c0", "c1"],
    "any": ["p0", "g1"],
    "mon": ["g0", "p1"],
    "half": ["g1", "p1"],
}
"""What each resource shows. `mon` is shared, `half` has two replicas of each device."""


class AnyParts(RuleBasedStateMachine):
    """Drivers show cards, parts, parts of parts, replicas and shared views; the model judges by pairs of devices. Only
    the driver of `mig` knows what is part of what, and not from the beginning."""

    @initialize(
        chunk=st.integers(1, 3),
        steps=st.sampled_from([2000, 2000, 3]),
        same=st.booleans(),
        late=st.one_of(st.none(), st.sampled_from(["nobody", *SHOWN])),
    )
    def begin(self, chunk: int, steps: int, same: bool, late: str | None) -> None:
        """`late`: all drivers have reported but for this one; None: none has."""
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(search, "MOST_STEPS", steps)
        wait = m.OnFailure.WAIT
        specs = [m.ResourceSpec(name=name, on_failure=wait) for name in ("gpu", "mig", "any")]
        specs.append(m.ResourceSpec(name="mon", on_failure=wait, shared=True))
        specs.append(m.ResourceSpec(name="half", on_failure=wait, replicas=2, replicas_same_device=same))
        self.same = same
        self.core = CoreDriver(*specs, chunk=chunk)
        self.chunk = chunk
        self.count = 0
        self.knows = False
        self.told: set[tuple[str, str]] = set()
        self.judged: set[str] = set()
        self.unreported = set(SHOWN)
        for resource in SHOWN if late is not None else ():
            if resource != late:
                self.report(resource, True)

    def teardown(self) -> None:
        self.patch.undo()

    @rule(resource=st.sampled_from([*SHOWN]), knows=st.booleans())
    def report(self, resource: str, knows: bool) -> None:
        if resource == "mig":
            used = {each.device for each in self.held()}
            used |= {whole for name in used for whole in self.wholes(name)}
            kept = {pair for pair in self.told if not used.isdisjoint(pair)}
            self.knows, self.told = knows, {*ABOVE.items()} if knows else kept
        self.core.report(
            *[
                device(name, part_of=ABOVE.get(name) if resource == "mig" and knows else None)
                for name in SHOWN[resource]
            ],
            resource=resource,
        )
        self.unreported.discard(resource)
        self.look()

    @rule(amounts=st.dictionaries(st.sampled_from([*SHOWN]), st.integers(1, 3), min_size=1, max_size=3))
    def register(self, amounts: dict[str, int]) -> None:
        self.count += 1
        self.core.register(f"w{self.count}", resources=asks(**amounts))
        self.look()

    @rule(resource=st.sampled_from([*SHOWN]))
    def register_one(self, resource: str) -> None:
        self.register({resource: 1})

    @precondition(lambda self: self.held())
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted({each.key for each in self.held()})))
        self.core.deregister(key.split("/")[1])
        self.look()

    @rule(
        first=st.sampled_from([*SHOWN]),
        amount=st.integers(1, 2),
        second=st.sampled_from([*SHOWN]),
        leaves=st.booleans(),
    )
    def take_turns(self, first: str, amount: int, second: str, leaves: bool) -> None:
        """Nobody has anything. Somebody takes devices, nobody knows any more what is part of what, and others come."""
        for name in sorted({record.worker for record in self.core.ledger.allocations.values()}):
            self.core.deregister(name)
        for resource in SHOWN:
            self.report(resource, True)
        self.register({first: amount})
        taker = f"w{self.count}"
        self.register_one(first)
        self.report("mig", False)
        if leaves:
            self.core.deregister(taker)
        self.register_one(second)
        self.register_one(second)

    @rule()
    def restart(self) -> None:
        self.core = restarted(self.core, chunk=self.chunk)
        self.unreported = set(SHOWN)
        self.look()

    # --- the model ---

    def records(self) -> list[Allocation]:
        return [record for record in self.core.ledger.allocations.values() if record.state in HOLDING_STATES]

    def held(self) -> list[Held]:
        how = {"mon": "shared", "half": "replica"}
        return [
            Held(record.key, info["id"], how.get(resource, "alone"))
            for record in self.records()
            for resource, infos in record.resources.items()
            for info in infos
        ]

    def wholes(self, name: str) -> set[str]:
        """What a device is part of, as far as anybody was told."""
        found, todo = set(), [name]
        while todo:
            name = todo.pop()
            more = {whole for part, whole in self.told if part == name}
            todo.extend(more - found)
            found |= more
        return found

    def exclude(self, one: Held, other: Held) -> bool:
        if one.device == other.device:
            return {one.how, other.how} not in ({"shared"}, {"replica"})
        if one.device in self.wholes(other.device) or other.device in self.wholes(one.device):
            return {one.how, other.how} != {"shared"}
        return False

    def look(self) -> None:
        held, late = self.held(), False
        for one, other in combinations(held, 2):
            is_new = not {one.key, other.key} <= self.judged
            if one.key != other.key and self.exclude(one, other):
                assert not is_new, f"{one} and {other}"
                late = True
            elif one.key == other.key and is_new and "shared" not in {one.how, other.how}:
                is_same = one.device == other.device and one.how == "replica" and self.same
                assert is_same or one.device != other.device
                assert one.device not in self.wholes(other.device)
                assert other.device not in self.wholes(one.device)
        for name in SHOWN["half"]:
            assert sum(each.device == name and each.how == "replica" for each in held) <= 2
        self.judged, self.learnt_late = {each.key for each in held}, late
        self.rebuild()
        self.judge_first()
        self.judge_views()

    def judge_views(self) -> None:
        """Views, gauges and the self-check, which read records alone, say the same as the core."""
        gauges = StateGauges(SHOWN)
        violations = gauges.replay(self.core.ledger.allocations, hosts=[HOST])
        if self.learnt_late:
            return
        assert violations == []
        state = self.core.host_state
        ledger = LedgerView()
        for record in [*self.core.ledger.allocations.values(), state.record]:
            ledger.put(change(record))
        if self.unreported:
            return
        free = {
            name: {free_list.names[-position] for position in free_list.free}
            for name, free_list in state.devices.free_lists.items()
        }
        free["mon"] = {each.id for each in HostOverlay(state).sharable("mon")}
        shown: dict[str, set[str]] = {name: set() for name in SHOWN}
        for line in lines_of(ledger, state.record):
            assert not line.lent_twice
            if line.is_free:
                shown[line.resource].add(line.id)
        assert shown == free
        counts = gauges.state_counts(self.core.ledger).devices
        assert {name: counts[name, "free"] for name in SHOWN} == {name: len(ids) for name, ids in free.items()}

    def judge_first(self) -> None:
        """The first waiter does not wait for what it could have."""
        queue = self.core.host_state.waiters.queue
        if self.unreported or not self.knows or not queue:
            return
        record = self.core.ledger.allocations[queue[0][2]]
        if record.reason_code not in ("busy", "infeasible"):
            return
        ways = []
        for resource, amount in record.request.amounts.items():
            if resource == "mon":
                continue
            how = "replica" if resource == "half" else "alone"
            devices = [Held("me", name, how) for name in SHOWN[resource]]
            ways.append(combinations(devices * (2 if how == "replica" and self.same else 1), amount))
        sharable = [Held("me", name, "shared") for name in SHOWN["mon"]]
        sharable = [each for each in sharable if not any(self.exclude(each, other) for other in self.held())]
        if len(sharable) < record.request.amounts.get("mon", 0):
            return
        for way in product(*ways):
            chosen = [each for devices in way for each in devices]
            names = [each.device for each in chosen]
            together = all(
                (one.device != other.device or (one.how == other.how == "replica"))
                and one.device not in self.wholes(other.device)
                and other.device not in self.wholes(one.device)
                for one, other in combinations(chosen, 2)
            )
            free = all(not self.exclude(each, other) for each in chosen for other in self.held())
            halves = [each.device for each in self.held() if each.how == "replica"]
            room = all(names.count(name) + halves.count(name) <= 2 for name in SHOWN["half"])
            assert not (together and free and room), f"{record.key} waits ({record.reason}) and could have {names}"

    def rebuild(self) -> None:
        """The state in memory is a function of the records and the last reports."""
        rebuilt = Ledger()
        for record in self.core.ledger.allocations.values():
            rebuilt.restore(PutAllocation(record.key, record))
        for resource, inventory in self.core.host_state.devices.inventories.items():
            rebuilt.restore(SetInventory(HOST, resource, inventory))
        rebuilt.restore(PutRecord(self.core.host_state.record))
        rebuilt.resume(commit=self.core.ledger.commits, token=self.core.ledger.token)
        rebuilt.host_state(HOST).waiters.set_scan(self.core.host_state.waiters.scan_from)
        assert whole(rebuilt) == whole(self.core.ledger)
        for record in self.records():
            assert self.core.host_state.devices.uses_now(record) == record.uses, record.key


AnyParts.TestCase.settings = settings(
    max_examples=80, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
test_parts_in_any_order = AnyParts.TestCase
