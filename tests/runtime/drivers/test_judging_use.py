"""The rules by which a process is a stranger, without processes; and how often what is said of them changes."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from outfitter_drivers.api import CannotTell, DeviceUser
from outfitter_proto.keys import AllocationKey
from outfitter_proto.records import Allocation, AllocationState, Owner, PoolUse
from outfitter_proto.support.processes import INITIAL_PID_NAMESPACE
from outfitter_service.core import model as m
from outfitter_service.runtime.drivers import running_processes
from outfitter_service.runtime.drivers import strangers as judging
from outfitter_service.runtime.drivers.borrowers import MOST_PAST, Borrowers
from outfitter_service.runtime.drivers.running_processes import Found, ProcessIdentity, RunningProcess, Unseen
from outfitter_service.runtime.drivers.strangers import CALM_S, LONGEST_DAMPED_S, Damper, Judgement, UseWatch, judge
from outfitter_service.runtime.identity import host_identity
from support.api import allocation

OWN = 1
ME = structs.replace(host_identity("outfitter", "h"), boot_id="b", pid_ns=INITIAL_PID_NAMESPACE, time_ns=5)
OWNER = Owner(pid=100, start_ticks=1000, pid_ns=INITIAL_PID_NAMESPACE, boot_id="b", time_ns=5)
KEY = AllocationKey("h/w/run-1")


def held(state: str = "allocated", *, owner: Owner | None = OWNER, device: str = "a", **more: Any) -> Allocation:
    record = allocation("h", "w", state, devices=[device], **more)
    return structs.replace(record, request=structs.replace(record.request, owner=owner))


def process(*lineage: ProcessIdentity, **more: Any) -> RunningProcess:
    return RunningProcess(**{"uid": 0, "program": "python", "lineage": lineage, "allocations": frozenset(), **more})


def judged(
    found: RunningProcess | Unseen | None,
    *records: Allocation,
    known: dict[ProcessIdentity, AllocationKey] | None = None,
    whole: str | None = None,
) -> Judgement:
    """The judged on device `a`, a part of `whole`, which process 7 uses."""
    borrowers = Borrowers(ME)
    for record in records:
        borrowers.see(record)
    user = DeviceUser(pid=7)
    return judge((user,), ("a", "GPU-a"), {7: found}, borrowers, known or {}, OWN, whole)[0]


CHILD = process((7, 2000), (100, 1000), (2, 1))
SAME = process((7, 2000), (100, 1001))
"""A child of a process with the owner's pid, which started at another time."""
LONELY = process((7, 2000))


@pytest.mark.parametrize(
    ("found", "record", "is_stranger"),
    [
        (CHILD, held(), False),
        (SAME, held(), True),
        (CHILD, held(device="b"), True),
        (CHILD, held("preparing"), False),
        (LONELY, held(), True),
        (LONELY, held("releasing"), False),
        (LONELY, held("releasing", device="b"), True),
        (CHILD, held("ended"), True),
        (process((100, 1000), (2, 1)), held("ended"), False),
        (process((100, 1000), (2, 1)), held("ended", device="b"), True),
        (process((100, 1001), (2, 1)), held("ended"), True),
        (CHILD, held("pending", device="b"), False),
        (process((7, 2000), allocations=frozenset({KEY})), held(), False),
        (process((7, 2000), allocations=frozenset({KEY})), held("pending"), False),
        (process((7, 2000), allocations=frozenset({KEY})), held("ended"), True),
        (process((7, 2000), (OWN, 3)), held(device="b"), False),
    ],
)
def test_whose_a_process_is_decides_whether_it_is_a_stranger(
    found: RunningProcess, record: Allocation, is_stranger: bool
) -> None:
    said = judged(found, record)
    assert [user.pid for _, user in said.strangers] == ([7] if is_stranger else [])
    assert said.untold is None


@pytest.mark.parametrize(
    "owner",
    [
        None,
        structs.replace(OWNER, boot_id="another machine's"),
        structs.replace(OWNER, pid_ns=4),
        structs.replace(OWNER, time_ns=6),
    ],
)
def test_while_a_worker_holds_it_whose_process_is_not_known_nobody_can_tell(owner: Owner | None) -> None:
    said = judged(LONELY, held(owner=owner))
    assert said == Judgement(untold="process 7 may be of h/w/run-1, whose owner is not known here")
    assert judged(LONELY, held(owner=owner), structs.replace(held("ended"), worker="w")).strangers


def test_a_process_that_was_its_workers_stays_so_without_its_parents_until_the_worker_ends() -> None:
    known = {(7, 2000): KEY}
    assert judged(LONELY, held(), known=known) == Judgement()
    assert judged(LONELY, held("ended"), known=known).strangers
    assert judged(process((7, 2001)), held(), known=known).strangers


def test_a_device_is_held_under_each_of_its_names() -> None:
    assert judged(CHILD, held(device="GPU-a")) == Judgement()
    assert judged(CHILD, held(device="x", aliases={"x": ["GPU-a"]})) == Judgement()


def test_who_holds_a_part_is_no_stranger_on_the_whole() -> None:
    part = structs.replace(held(device="MIG-1"), uses={"a": PoolUse(1, 720_720, "parts")})
    assert judged(CHILD, part) == Judgement()
    assert judged(LONELY, part).strangers


def test_who_holds_the_whole_is_no_stranger_on_its_part() -> None:
    """Version 0.2 lent a GPU in MIG mode as a whole, and CUDA computes on its first instance."""
    gpu = held(device="GPU-w", aliases={"GPU-w": ["pci:w"]})
    assert judged(CHILD, gpu, whole="pci:w") == Judgement()
    assert judged(LONELY, gpu, whole="pci:w").strangers
    assert judged(process((100, 1000), (2, 1)), structs.replace(gpu, state="ended"), whole="pci:w") == Judgement()


def test_who_holds_a_part_is_a_stranger_on_the_other_parts() -> None:
    part = structs.replace(held(device="MIG-1"), uses={"pci:w": PoolUse(1, 720_720, "parts")})
    assert judged(CHILD, part, whole="pci:w").strangers
    assert judged(process((100, 1000), (2, 1)), structs.replace(part, state="ended"), whole="pci:w").strangers


def test_an_ended_process_uses_nothing_and_one_that_is_not_seen_leaves_it_open() -> None:
    assert judged(None) == Judgement()
    assert judged(Unseen("hidden")) == Judgement(untold="hidden")


def test_a_named_stranger_counts_whoever_else_cannot_be_named() -> None:
    users = (DeviceUser(), DeviceUser(pid=7))
    said, _ = judge(users, ("a",), {7: LONELY}, Borrowers(ME), {}, OWN)
    assert [user.pid for _, user in said.strangers] == [7]
    assert said.untold
    assert judge(CannotTell("why"), ("a",), {}, Borrowers(ME), {}, OWN)[0] == Judgement(untold="why")


def test_only_the_last_past_owners_are_remembered() -> None:
    borrowers = Borrowers(ME)
    for pid in range(1, MOST_PAST + 2):
        borrowers.see(held("ended", owner=structs.replace(OWNER, pid=pid)))
    assert not borrowers.has_held((1, 1000), ("a",))
    assert borrowers.has_held((2, 1000), ("a",))


def test_what_a_worker_gave_back_and_holds_no_more_is_no_holders() -> None:
    borrowers = Borrowers(ME)
    borrowers.see(held())
    assert list(borrowers.holders(("a",))) == [KEY]
    borrowers.see(held("ended"))
    assert borrowers.holders(("a",)) == {}
    borrowers.see(held())
    borrowers.restore([held(device="b")])
    assert borrowers.holders(("a",)) == {}


def test_who_waits_in_several_allocations_waits_until_the_last_of_them() -> None:
    borrowers = Borrowers(ME)
    one, two = held("pending", device="b"), structs.replace(held("pending", device="b"), worker="two")
    for record in (one, two, one):
        borrowers.see(record)
    for record in (one, two):
        assert borrowers.waits(CHILD.lineage, ())
        assert borrowers.waits((), (record.key,))
        borrowers.see(structs.replace(record, state=AllocationState.ENDED))
        assert not borrowers.waits((), (record.key,))
    assert not borrowers.waits(CHILD.lineage, ())


async def test_while_proc_hangs_nobody_can_tell_and_reports_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    back, begun = threading.Event(), []

    def hang(pids: Iterable[int]) -> dict[int, Found]:
        begun.append(pids)
        back.wait(60)
        return {}

    monkeypatch.setattr(running_processes, "find", hang)
    monkeypatch.setattr(judging, "PROC_WITHIN_S", 0.05)
    borrowers, sent = Borrowers(ME), list[m.Event]()
    borrowers.restore([])
    watch = UseWatch("gpu", borrowers, emit=sent.append, own=OWN)
    known = m.KnownDevice(id="a", properties={})
    for _ in range(3):
        await watch.looked([known], [(DeviceUser(pid=7),)])
        watch.report(m.DriverReport(host="h", resource="gpu", devices=(known,)))
        report = sent[-1]
        assert isinstance(report, m.DriverReport)
        assert (report.devices[0].untold or "").endswith(
            ("/proc does not answer within 0.05 s", "still does not answer")
        )
    assert len(begun) == 1
    back.set()


async def test_nobody_is_judged_before_the_ledger_is_known() -> None:
    """Every worker would be a stranger."""
    borrowers, sent = Borrowers(ME), list[m.Event]()
    watch = UseWatch("gpu", borrowers, emit=sent.append, own=OWN)
    known = m.KnownDevice(id="a", properties={})
    looked = anyio.Event()

    async def look() -> None:
        await watch.looked([known], [(DeviceUser(pid=2**22 + 1),)])
        looked.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(look)
        await anyio.wait_all_tasks_blocked()
        assert not looked.is_set()
        borrowers.restore([])
        with anyio.fail_after(20):
            await looked.wait()
    watch.report(m.DriverReport(host="h", resource="gpu", devices=(known,)))
    [report] = sent
    assert isinstance(report, m.DriverReport)
    assert report.devices[0].untold == f"no process {2**22 + 1} runs here"


# --- how often it changes ---

A, B = {(7, 1): "process 7"}, {(8, 1): "process 8"}


def test_a_stranger_is_said_at_once_and_its_end_too_the_first_time() -> None:
    damper = Damper()
    assert [damper.say(now, each) for now, each in [(0, {}), (1, A), (2, A), (3, {})]] == [
        None, "process 7", "process 7", None,
    ]  # fmt: skip


def test_strangers_that_take_turns_change_what_is_said_ever_less_often() -> None:
    damper = Damper()
    said = [damper.say(float(now), A if now % 2 else B) for now in range(3600)]
    changes = [now for now in range(1, 3600) if said[now] != said[now - 1]]
    assert None not in said
    assert len(changes) < 20


def test_a_stranger_that_comes_and_goes_is_damped_as_well() -> None:
    damper = Damper()
    said = [damper.say(float(now), A if now % 20 < 10 else {}) for now in range(3600)]
    assert sum(one != other for one, other in pairwise(said)) < 40


def test_after_a_calm_time_the_end_is_said_at_once_again() -> None:
    damper = Damper()
    now = 0.0
    for _ in range(10):
        damper.say(now, A)
        now += LONGEST_DAMPED_S
        damper.say(now, {})
    now += CALM_S + LONGEST_DAMPED_S
    assert damper.say(now, A) == "process 7"
    assert damper.say(now + 1, {}) is None


@given(st.lists(st.tuples(st.integers(0, 100), st.sampled_from([{}, A, B, {**A, **B}])), max_size=60))
def test_a_device_with_a_stranger_is_never_said_to_be_free_and_one_without_is_free_in_the_end(
    looks: list[tuple[int, dict[ProcessIdentity, str]]],
) -> None:
    damper, now = Damper(), 0.0
    for pause, strangers in looks:
        now += pause
        said = damper.say(now, strangers)
        assert said is not None or not strangers
    assert damper.say(now + LONGEST_DAMPED_S, {}) is None
