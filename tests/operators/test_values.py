"""The plain values of the operators' side: the set of infos, the lease, the worker's own identity, settings."""

from __future__ import annotations

import math
import os
import re
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

import outfitter
from outfitter import ExternalResourceInfo, ExternalResourceInfos
from outfitter.session import identity, status
from outfitter.session.lease import Lease
from outfitter.session.status import AllocationStatus
from outfitter_proto.records import (
    NAME_PATTERN,
    Allocation,
    OperatorShare,
    Owner,
    ResolvedRequest,
    ResourceRequest,
    Source,
)
from outfitter_proto.support.processes import process_owner

INFOS = st.lists(
    st.dictionaries(st.sampled_from(["index", "local_index", "uuid"]), st.text("0123456789ab", max_size=3)).map(
        ExternalResourceInfo
    )
)


@given(INFOS)
def test_infos_are_equal_to_any_set_of_the_same_infos(infos: list[ExternalResourceInfo]) -> None:
    ours = ExternalResourceInfos(infos)
    assert ours == set(infos)
    assert set(infos) == ours
    assert frozenset(infos) == ours
    assert hash(ours) == hash(frozenset(infos))
    assert len(ours) == len(set(infos))
    assert ours == ExternalResourceInfos(reversed(infos))
    assert ours | set() == set(infos)


def test_infos_that_differ_are_not_equal() -> None:
    one, two = ExternalResourceInfo({"index": "0"}), ExternalResourceInfo({"index": "1"})
    assert ExternalResourceInfos([one]) != {two}
    assert ExternalResourceInfos([one]) != {one, two}
    assert ExternalResourceInfos([one]) != [one]
    assert ExternalResourceInfos([one]) & {two} == set()


def test_infos_are_indexed_by_local_index_as_a_number() -> None:
    infos = ExternalResourceInfos(
        ExternalResourceInfo({"local_index": index, "id": index}) for index in ("10", "x", "9", "", "0")
    )
    assert [info["id"] for info in infos] == ["0", "9", "10", "x", ""]
    assert infos[0]["id"] == "0"
    assert infos[-1]["id"] == ""
    assert infos[1:3] == {ExternalResourceInfo({"local_index": i, "id": i}) for i in ("9", "10")}


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_lease_is_at_risk_after_two_thirds_without_an_acknowledged_heartbeat() -> None:
    clock = Clock()
    lease = Lease(clock)
    lease.grant(30)
    assert lease.interval == 10
    clock.now += 19.9
    assert not lease.at_risk
    clock.now += 0.2
    assert lease.at_risk
    assert lease.remaining == pytest.approx(9.9)


def test_a_lease_says_whether_its_process_begins_or_ceases_to_be_watched() -> None:
    lease = Lease()
    assert [lease.set_watched(watched) for watched in (False, True, True, False)] == [False, True, False, True]
    assert not lease.watched


def test_a_heartbeat_counts_from_when_it_was_begun() -> None:
    clock = Clock()
    lease = Lease(clock)
    lease.grant(30)
    begun = clock.now + 10
    clock.now += 29
    lease.acknowledge(begun)
    assert lease.remaining == pytest.approx(11)
    lease.acknowledge(begun - 5)
    assert lease.remaining == pytest.approx(11), "a late answer to an earlier heartbeat takes nothing back"


def test_once_a_lease_is_over_the_managers_answer_renews_it_and_no_acknowledgement() -> None:
    clock = Clock()
    lease = Lease(clock)
    lease.grant(30)
    clock.now += 31
    assert lease.over
    assert not lease.acknowledge(clock.now)
    lease.claim(clock.now, 7)
    assert not lease.answer(7), "it has read up to there, and not that"
    assert lease.over
    clock.now += 1
    assert lease.answer(8)
    assert lease.remaining == pytest.approx(29)


def test_a_manager_that_is_behind_by_more_than_a_lease_confirms_a_worker_all_the_same() -> None:
    clock = Clock()
    lease = Lease(clock)
    lease.grant(30)
    clock.now += 31
    lease.claim(clock.now, 7)
    for _ in range(10):
        assert lease.claimed
        clock.now += 20
        assert not lease.acknowledge(clock.now)
    assert not lease.claimed_lately, "it may ask again"
    assert lease.answer(8)
    assert lease.remaining == pytest.approx(30)


def test_a_heartbeat_behind_a_gap_confirms_nothing() -> None:
    clock = Clock()
    lease = Lease(clock)
    lease.grant(30)
    clock.now += 31
    lease.claim(clock.now, 7)
    clock.now += 31
    lease.acknowledge(clock.now)
    assert lease.answer(8)
    assert lease.over, "the manager may have given it up in between"


def test_without_a_lease_nothing_is_ever_at_risk() -> None:
    clock = Clock()
    lease = Lease(clock)
    lease.grant(None)
    clock.now += 1e9
    assert not lease.at_risk
    assert lease.remaining is lease.until_risk is lease.interval is None


def test_a_repeated_record_does_not_renew_the_lease() -> None:
    clock = Clock()
    lease = Lease(clock)
    lease.grant(30)
    clock.now += 25
    lease.grant(30)
    assert lease.remaining == pytest.approx(5)


def test_the_owner_is_this_process_as_proc_shows_it() -> None:
    owner = process_owner()
    assert owner is not None
    assert owner.pid == os.getpid()
    assert owner.pid_ns == int(re.findall(r"\d+", os.readlink("/proc/self/ns/pid"))[0])  # noqa: PTH115
    assert owner.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert owner == process_owner(os.getpid())


def test_a_process_whose_name_holds_blanks_and_brackets_is_told_apart_from_its_parent(tmp_path: Path) -> None:
    program = tmp_path / "a) b (c"
    program.symlink_to("/bin/sleep")
    child = subprocess.Popen([program, "60"])
    try:
        owner, parent = process_owner(child.pid), process_owner()
        assert owner is not None
        assert parent is not None
        assert owner.pid == child.pid
        assert owner.start_ticks >= parent.start_ticks
        assert owner.start_ticks < 2**62
    finally:
        child.kill()
        child.wait()


def test_a_process_that_is_gone_has_no_identity() -> None:
    assert process_owner(2**22 + 1) is None


def test_incarnations_are_names_in_the_order_of_their_birth(monkeypatch: pytest.MonkeyPatch) -> None:
    first = identity.new_incarnation()
    later = time.time_ns() + 2_000_000
    monkeypatch.setattr(time, "time_ns", lambda: later)
    second = identity.new_incarnation()
    assert first < second
    for name in (first, second):
        assert re.match(NAME_PATTERN, name)
        assert re.match(r"^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$", name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"resources": {"gpu": 0}}, r"\$\.resources\.gpu\.amount"),
        ({"resources": {"gpu": 1.5}}, r"amount"),
        ({"resources": {"a b": 1}}, r"resources"),
        ({"operators": {"x": {"gpu": -1}}}, r"operators"),
        ({"lease": 0}, r"lease_s"),
        ({"wait": -1}, r"wait_s"),
        ({"priority": 10**9}, r"priority"),
        ({"lease": math.nan}, r"lease is nan"),
        ({"lease": math.inf}, r"lease is inf"),
        ({"wait": math.inf}, r"wait is inf"),
        ({"labels": {"a": "\ud800"}}, r"'\\ud800'"),
        ({"labels": {"\udfff": "a"}}, r"'\\udfff'"),
        ({"resources": {"\ud800": 1}}, r"'\\ud800'"),
        ({"operators": {"a\ud800": {"gpu": 1}}}, r"'a\\ud800'"),
        ({"resources": ["gpu"]}, r"resources is \['gpu'\]; it must be amounts by resource"),
        ({"operators": {"a": 1}}, r"operators.a is 1; it must be amounts by resource"),
        ({"operators": ["a"]}, r"operators is \['a'\]"),
        ({"labels": ["x"]}, r"labels is \['x'\]"),
        ({"worker": 5}, r"worker is 5; it must be text"),
        ({"bus": 5}, r"bus is 5; it must be text"),
        ({"owner": 4711}, r"owner is 4711; it must be True, False or an Owner"),
        ({"owner": "yes"}, r"owner is 'yes'"),
        ({"ends_with": True}, r"ends_with is True; it must be a pid"),
        ({"wait_for_manager": "yes"}, r"wait_for_manager is 'yes'; it must be True, False or seconds"),
        ({"on_lease_at_risk": 5}, r"on_lease_at_risk is 5; it must be a function"),
    ],
)
def test_what_no_manager_would_take_is_refused_by_the_constructor(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(outfitter.InvalidRequestError, match=message):
        outfitter.RuntimeContext(**arguments)  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.parametrize("what", ["host", "worker", "operator", "cluster"])
def test_a_name_that_the_wire_does_not_allow_is_refused_by_the_constructor(what: str) -> None:
    with pytest.raises(outfitter.InvalidNameError, match=f"^{what} 'a/b'"):
        outfitter.RuntimeContext(**{what: "a/b"})  # type: ignore[arg-type]


def test_the_environment_configures_what_arguments_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTFITTER_BUS", "sqlite:////nowhere/bus.db")
    monkeypatch.setenv("OUTFITTER_HOST", "h")
    monkeypatch.setenv("OUTFITTER_WORKER", "w")
    monkeypatch.setenv("OUTFITTER_OPERATOR", "o")
    monkeypatch.setenv("OUTFITTER_CLUSTER", "c")
    context = outfitter.RuntimeContext()
    assert (context.host, context.worker, context.operator) == ("h", "w", "o")
    assert context._settings.bus == "sqlite:////nowhere/bus.db"
    assert context._settings.cluster == "c"
    context = outfitter.RuntimeContext(
        host="h2", worker="w2", operator="o2", bus="sqlite:////elsewhere", cluster="c2", owner=False
    )
    assert (context.host, context.worker, context.operator) == ("h2", "w2", "o2")
    assert (context._settings.bus, context._settings.cluster) == ("sqlite:////elsewhere", "c2")
    assert context._settings.registration.owner is None


def test_the_owner_may_be_another_process() -> None:
    owner = Owner(pid=1, start_ticks=2, pid_ns=3, boot_id="b")
    assert outfitter.RuntimeContext(owner=owner)._settings.registration.owner == owner


RECORD = Allocation(
    host="h",
    worker="w",
    incarnation="i",
    state="allocated",
    request=ResolvedRequest(amounts={"gpu": 1}),
    since=datetime(2026, 1, 1, tzinfo=UTC),
    writer="host/h",
    commit=1,
    source=Source(partition=0, offset=0),
    reason="because",
)


@pytest.mark.parametrize(
    ("changes", "meaning", "error"),
    [
        ({"state": "pending"}, AllocationStatus.WAITING, outfitter.AllocationNotUsableError),
        ({"state": "preparing"}, AllocationStatus.WAITING, outfitter.AllocationNotUsableError),
        ({"state": "hibernating"}, AllocationStatus.WAITING, outfitter.AllocationNotUsableError),
        ({"state": "allocated"}, AllocationStatus.YOURS, None),
        ({"state": "allocated", "reason_code": "superseded"}, AllocationStatus.OVER, outfitter.AllocationEndedError),
        ({"state": "releasing", "outcome": "ended"}, AllocationStatus.OVER, outfitter.AllocationEndedError),
        ({"state": "releasing", "outcome": "failed"}, AllocationStatus.FAILED, outfitter.AllocationFailedError),
        ({"state": "ended"}, AllocationStatus.OVER, outfitter.AllocationEndedError),
        ({"state": "failed"}, AllocationStatus.FAILED, outfitter.AllocationFailedError),
    ],
)
def test_a_reader_needs_four_words(
    changes: dict[str, str], meaning: AllocationStatus, error: type[outfitter.AllocationError] | None
) -> None:
    record = structs.replace(RECORD, **changes)
    assert status.status_of(record) is meaning
    refusal = status.refusal(record)
    assert type(refusal) is (error or type(None))
    assert refusal is None or str(refusal).endswith(": because")


def test_a_shared_resource_is_seen_whole_by_every_operator_that_asked_for_it() -> None:
    record = structs.replace(
        RECORD,
        request=ResolvedRequest(amounts={"gpu": 1, "nic": 1}, operators={"infer": {"nic": ResourceRequest(amount=1)}}),
        resources={"gpu": [{"id": "g"}], "nic": [{"id": "a"}, {"id": "b"}]},
        operators={"infer": OperatorShare(resources={})},
    )
    assert len(status.infos(record, "nic", "infer")) == 2
    assert len(status.infos(record, "nic", "other")) == 2


def test_of_shared_devices_that_are_said_once_every_operator_sees_all_and_has_the_variables() -> None:
    record = structs.replace(
        RECORD,
        resources={"gpu": [{"id": "g"}, {"id": "h"}], "nic": [{"id": "a"}, {"id": "b"}]},
        shared=["nic"],
        operators={
            "infer": OperatorShare(
                resources={"gpu": ["g"]}, env={"VISIBLE": "g", "MODE": "fast"}, cdi=["x=g"], shared=["nic"]
            ),
            "load": OperatorShare(resources={}, shared=["nic"]),
        },
        common={
            "nic": OperatorShare(resources={"nic": ["a", "b"]}, env={"VISIBLE": "a,b", "NICS": "a,b", "MODE": "fast"})
        },
    )
    for operator in ("infer", "load", "another", None):
        assert [one["id"] for one in status.infos(record, "nic", operator)] == ["a", "b"]
    assert [one["id"] for one in status.infos(record, "gpu", "infer")] == ["g"]
    assert [one["id"] for one in status.infos(record, "gpu", "another")] == ["h"]
    assert status.resource_names(record, "load") == ["nic"]
    assert status.environment(record, "infer", ("VISIBLE", "MODE", "NICS")) == {
        "VISIBLE": "g,a,b",
        "MODE": "fast",
        "NICS": "a,b",
    }
    assert status.environment(record, "load", ("VISIBLE", "MODE", "NICS")) == {
        "VISIBLE": "a,b",
        "NICS": "a,b",
        "MODE": "fast",
    }


def test_of_an_older_record_that_lists_shared_devices_in_each_share_everybody_sees_all_of_them() -> None:
    record = structs.replace(
        RECORD,
        resources={"nic": [{"id": "a"}, {"id": "b"}]},
        shared=["nic"],
        operators={"infer": OperatorShare(resources={"nic": ["a", "b"]}, env={"NICS": "a,b"})},
    )
    for operator in ("infer", "another", None):
        assert [one["id"] for one in status.infos(record, "nic", operator)] == ["a", "b"]
    assert status.environment(record, "infer", ("VISIBLE", "MODE", "NICS")) == {"NICS": "a,b"}
