"""The vectors of proto/conformance, by which a client in any language is checked, against our own client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from outfitter.errors import AllocationEndedError
from outfitter.session import status
from outfitter.session.lease import HEARTBEATS_PER_LEASE, Lease
from outfitter.session.watch import WatchSnapshot
from outfitter.session.worker_session import WorkerSession
from outfitter_proto import clauses, codec, environment, names, topics
from outfitter_proto.bus import Bus, Entry, connect
from outfitter_proto.partitioning import murmur2, partition_of
from outfitter_proto.records import Allocation, Clause, Register
from support.documents import ROOT

FOLDER = ROOT / "proto" / "conformance"
Vector = dict[str, Any]


def document(name: str) -> Vector:
    read: Vector = json.loads((FOLDER / f"{name}.json").read_text())
    return read


RECORDS = document("records")


def vectors(name: str) -> pytest.MarkDecorator:
    """A test for each vector of a file."""
    rows = document(name)["vectors"]
    return pytest.mark.parametrize("vector", rows, ids=[str(row.get("name", row.get("host", ""))) for row in rows])


def body(row: Vector) -> bytes | None:
    """The bytes of a row: its `text` as it is, or its `value` as JSON; None for a tombstone."""
    if "text" in row:
        return str(row["text"]).encode()
    return None if row["value"] is None else json.dumps(row["value"]).encode()


def test_every_file_of_vectors_is_tried_here() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == {
        "partitions", "records", "sequences", "leases", "environment", "choices",
    }  # fmt: skip


def test_every_word_of_a_record_and_of_a_lease_is_there() -> None:
    assert {row["then"] for row in RECORDS["vectors"]} == {"waiting", "yours", "over", "failed", "skip"}
    steps = [step for vector in document("leases")["vectors"] for step in vector["steps"]]
    assert {step["then"] for step in steps} == {"held", "at-risk", "lost"}


@vectors("choices")
def test_a_worker_sees_whether_it_has_what_its_vector_asks_for(vector: Vector) -> None:
    where = msgspec.convert(vector.get("where", {}), dict[str, Clause])
    asked = clauses.clauses_of(where, vector.get("same"))
    assert clauses.problem(asked) is None
    found = "as-asked" if clauses.fault(asked, vector["infos"]) is None else "otherwise"
    assert found == vector["then"]


@vectors("partitions")
def test_a_host_has_the_partition_of_its_vector(vector: Vector) -> None:
    assert murmur2(vector["host"].encode()) == vector["murmur2"]
    assert partition_of(vector["host"], vector["partitions"]) == vector["partition"]


@vectors("environment")
def test_a_variable_is_applied_or_left_out_as_its_vector_says(vector: Vector) -> None:
    kept = environment.divide({vector["name"]: vector["value"]})[0]
    expected = {True: (True, []), False: (False, []), "if allowed": (True, [vector["name"]])}[vector["apply"]]
    assert (bool(kept), environment.unknown(kept, ())) == expected


@vectors("leases")
def test_a_lease_is_held_at_risk_or_lost_as_its_vector_says(vector: Vector) -> None:
    now = vector["registered_at"]
    lease = Lease(clock=lambda: now)
    lease.begin(vector["registered_at"])
    lease.grant(vector["lease_s"])
    assert lease.interval == vector["heartbeat_every_s"]
    assert vector["lease_s"] is None or vector["heartbeat_every_s"] == vector["lease_s"] / HEARTBEATS_PER_LEASE
    for step in vector["steps"]:
        now = step["at"]
        if "acknowledged" in step:
            lease.acknowledge(step["acknowledged"])
        assert ("lost" if lease.over else "at-risk" if lease.at_risk else "held") == step["then"], step


@vectors("records")
def test_an_operator_sees_the_devices_and_variables_of_the_vector(vector: Vector) -> None:
    for view in vector.get("sees", ()):
        record = codec.decode_ledger(body(vector) or b"")
        assert isinstance(record, Allocation)
        operator = view["operator"]
        resources = [name for name in status.resource_names(record, operator) if name not in record.unavailable]
        seen = {name: [info["id"] for info in status.infos(record, name, operator)] for name in resources}
        assert seen == view["devices"]
        assert status.environment(record, operator, view["env"].keys()) == view["env"]


@vectors("records")
async def test_a_worker_concludes_from_a_record_what_its_vector_says(vector: Vector, tmp_path: Path) -> None:
    async with following(tmp_path) as (bus, session):
        assert await conclusion(bus, session, vector) == vector["then"].replace("skip", "waiting")
        if "lease_s" in vector:
            assert session.allocation_watch.lease.seconds == vector["lease_s"]


@vectors("sequences")
async def test_a_worker_concludes_after_each_record_what_its_vector_says(vector: Vector, tmp_path: Path) -> None:
    async with following(tmp_path) as (bus, session):
        for row in vector["records"]:
            assert await conclusion(bus, session, row) == row["then"], row


@asynccontextmanager
async def following(folder: Path) -> AsyncIterator[tuple[Bus, WorkerSession]]:
    """The vectors' worker on a bus of its own, where nobody answers it but a test."""
    names_of_run = {name: RECORDS[name] for name in ("host", "worker", "incarnation")}
    async with connect(f"sqlite://{folder}/bus.db") as bus:
        await topics.create(bus, names.DEFAULT_CLUSTER, partitions=RECORDS["partitions"])
        session = WorkerSession(bus, Register(**names_of_run), manager_patience=None)
        await session.open()
        try:
            yield bus, session
        finally:
            await session.aclose()


async def conclusion(bus: Bus, session: WorkerSession, row: Vector) -> str:
    """What the worker concludes once it has read the record of a row."""
    topic = names.topics(names.DEFAULT_CLUSTER).allocations
    snapshot = session.allocation_watch.read()
    await bus.publish(topic, row["partition"], Entry(row["key"].encode(), body(row)))
    if snapshot.over:
        return word(snapshot)  # it reads no more
    _, end = await bus.offsets(topic, RECORDS["partition"])
    while session._host_partition.is_behind(end):
        await session._records.fetch()  # what its task for reading does again and again
    return word(session.allocation_watch.read())


def word(snapshot: WatchSnapshot) -> str:
    if isinstance(snapshot.error, AllocationEndedError):
        return "over"
    assert snapshot.error is None
    return "waiting" if snapshot.record is None else status.status_of(snapshot.record).value
