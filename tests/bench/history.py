"""How many bytes history takes: the very entries of real commits, counted without a bus.

    PYTHONPATH=tests python -m bench.history

Workers with the registration of the other measurements come, hold one device each, and go. Kafka adds some 20 bytes
to a record and 100 to a batch, and multiplies all by the number of copies.
"""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta

import msgspec

from bench.loads import HOST, incarnation, registration, worker
from outfitter_proto.bus import Message
from outfitter_proto.codec import encode
from outfitter_proto.keys import host_writer
from outfitter_proto.names import topics
from outfitter_proto.records import Checkpoint, Deregister, Host, InputPosition, ManagerIdentity
from outfitter_service.core import model as m
from outfitter_service.core.decide import Rules
from outfitter_service.core.state.ledger import Ledger, PutRecord
from outfitter_service.runtime.changelog.snapshots import Pace, Snapshots
from outfitter_service.runtime.processor.commit.commit import Commit
from support.core import commits

WORKERS = 2000
RESOURCE = "gpu-000"
TOPICS = topics()
WRITER = host_writer(HOST)
INFO = {"model": "NVIDIA H100 80GB HBM3", "memory.total_bytes": "85899345920", "pci.bus_id": "0000:3b:00.0"}


class Meter:
    """One writer whose commits are counted, by type of record. `devices` below the number of workers: they queue."""

    def __init__(self, devices: int) -> None:
        self.rules = Rules(writer=WRITER, specs={RESOURCE: m.ResourceSpec(name=RESOURCE)}, lease_s=None)
        self.ledger = Ledger()
        self.snapshots = Snapshots(WRITER, "measured", Pace())
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        self.offset = 0
        self.bytes: Counter[str] = Counter()
        self.next = self._begin_commit()
        manager = ManagerIdentity(instance="measured", version="0", since=self.now)
        self.next.apply([PutRecord(Host(host=HOST, manager=manager, since=self.now))])
        known = tuple(
            m.KnownDevice(id=f"GPU-{n:08d}-8a56", properties=INFO | {"index": str(n)}) for n in range(devices)
        )
        self.next.decide(m.DriverReport(host=HOST, resource=RESOURCE, devices=known))
        self.commit()
        self.bytes.clear()

    def _begin_commit(self) -> Commit:
        return commits.begin(self.ledger, self.rules, self.now)

    def say(self, body: bytes) -> None:
        self.offset += 1
        message = Message(TOPICS.registrations, 0, self.offset, HOST.encode(), body, 0)
        if not self.next.message(message):  # the commit is full
            self.commit()
            self.next.message(message)

    def commit(self) -> None:
        commit = self.next
        commit.renumber(HOST, float("inf"))
        commit.transaction.piece = self.snapshots.piece(self.ledger, self.now, commit=self.ledger.commits + 1)
        position = InputPosition(topic_id="AAAAAAAAAAAAAAAAAAAAAA", partition=0, from_=self.offset, to=self.offset)
        checkpoint = Checkpoint(
            writer=WRITER, instance="0" * 32, cluster="outfitter", scope="host", commit=self.ledger.commits + 1,
            token=self.ledger.token, input=position, at=self.now, machine_id="0" * 32, boot_id="0" * 36,
            snapshot=self.snapshots.newest(commit.transaction.piece),
        )  # fmt: skip
        for topic, entries in commit.transaction.entries(TOPICS, checkpoint):
            for entry in entries:
                size = len(entry.key or b"") + len(entry.value or b"")
                kind = msgspec.json.decode(entry.value)["type"] if topic == TOPICS.history and entry.value else topic
                self.bytes[kind] += size
        self.ledger.begin_commit()
        self.ledger.end_commit()
        self.snapshots.committed(commit.transaction.piece, commit.transaction.history_bytes)
        self.now += timedelta(milliseconds=10)
        self.next = self._begin_commit()


def measure(devices: int, together: int) -> Counter[str]:
    """Bytes by type, per worker that came and went; so many messages a commit."""
    meter = Meter(devices)
    messages: list[bytes] = []
    for number in range(WORKERS):
        messages.append(registration(number, resource=RESOURCE))
        if number >= devices - 1:
            gone = number - devices + 1
            messages.append(encode(Deregister(host=HOST, worker=worker(gone), incarnation=incarnation(gone))))
    for at, body in enumerate(messages, start=1):
        meter.say(body)
        if at % together == 0:
            meter.commit()
    meter.commit()
    return Counter({kind: size // WORKERS for kind, size in meter.bytes.items()})


def main() -> None:
    print(f"bytes for each of {WORKERS} workers that register, get a device and deregister (no snapshot)")
    print("messages a commit   history   steps   refreshes   commits   ledger")
    for together in (1, 10, 1000):
        found = measure(64, together)
        history = sum(size for kind, size in found.items() if not kind.startswith("outfitter."))
        print(
            f"{together:17}   {history:7}   {found['transition']:5}   {found['refresh']:9}   {found['commit']:7}   "
            f"{found[TOPICS.allocations]:6}"
        )


if __name__ == "__main__":
    main()
