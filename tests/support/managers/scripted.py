"""A manager that does as a test tells it, on a real bus: workers cannot tell it from the real one.

What it answers is decided by a `FakeOutfitter`, so that a test can play the same scene to both.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import Self

import anyio
from anyio.abc import TaskStatus
from anyio.from_thread import start_blocking_portal
from msgspec import UNSET, structs

from outfitter.testing import FakeOutfitter
from outfitter_proto import codec, keys, names, topics
from outfitter_proto.bus import Bus, Entry, connect
from outfitter_proto.partitioning import partition_of
from outfitter_proto.records import (
    OBEYED,
    Allocation,
    Checkpoint,
    Deregister,
    Heartbeat,
    Host,
    InputPosition,
    ManagerIdentity,
    Register,
    ResourceRequest,
)
from outfitter_proto.support.processes import boot_id, pid_namespace

PATIENCE = 20.0


def host_record(host: str, *, stopped_at: datetime | None = None, obeys: bool = True) -> Host:
    """What a manager writes of itself. `obeys`: it knows the clauses of registrations, as version 0.2 does not."""
    now = datetime.now(UTC)
    manager = ManagerIdentity(
        instance=f"manager-of-{host}",
        version="0",
        since=now,
        stopped_at=stopped_at,
        obeys=list(OBEYED) if obeys else UNSET,
    )
    return Host(host=host, manager=manager, since=now)


async def publish_record(
    bus: Bus, record: Allocation | Host | Checkpoint, *, cluster: str = names.DEFAULT_CLUSTER
) -> None:
    """Put a ledger record where its host's records belong; of checkpoints, a host's own writer's."""
    topic = names.topics(cluster).allocations
    host = record.writer.removeprefix("host/") if isinstance(record, Checkpoint) else record.host
    partition = partition_of(host, (await bus.topic(topic)).partitions)
    await bus.publish(topic, partition, Entry(record.key.encode(), codec.encode(record)))


def _amounts_alone(requests: dict[str, ResourceRequest] | None) -> dict[str, ResourceRequest] | None:
    """What version 0.2 reads of requests."""
    if requests is None:
        return None
    return {name: ResourceRequest(amount=request.amount) for name, request in requests.items()}


class ScriptedManager:
    """Serves `host` on the bus at `url` from within a `with`; `fake` decides, the lists say what came in.

    `watches`: it says of itself that it watches the processes of this machine. `obeys`: it knows the clauses of
    registrations. `is_known`: the host's record says that it is there.
    """

    def __init__(
        self,
        url: str,
        host: str,
        fake: FakeOutfitter,
        *,
        partitions: int = 3,
        cluster: str = names.DEFAULT_CLUSTER,
        watches: bool = False,
        obeys: bool = True,
        is_known: bool = True,
    ) -> None:
        self.fake = fake
        self.watches = watches
        self.obeys = obeys
        self._is_known = is_known
        self.registrations: list[Register] = []
        self.heartbeats: list[Heartbeat] = []
        self.deregistrations: list[Deregister] = []
        self._url = url
        self._host = host
        self._partitions = partitions
        self._cluster = cluster
        self._read_to = 0
        self._commits = 0
        self._news = threading.Condition()
        self._closing = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as closing:
            portal = closing.enter_context(start_blocking_portal())
            task, _ = portal.start_task(self._serve)
            closing.callback(task.cancel)
            self._closing = closing.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._closing.close()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Block until `condition` holds, looking again at each message that comes in."""
        with self._news:
            if not self._news.wait_for(condition, PATIENCE):
                raise TimeoutError(f"not within {PATIENCE:g} s")

    async def _serve(self, *, task_status: TaskStatus[None]) -> None:
        records: asyncio.Queue[tuple[Allocation, int]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def post(record: Allocation) -> None:
            loop.call_soon_threadsafe(records.put_nowait, (record, self._read_to))

        async with connect(self._url) as bus:
            await topics.create(bus, self._cluster, partitions=self._partitions)
            if self._is_known:
                await publish_record(bus, host_record(self._host, obeys=self.obeys), cluster=self._cluster)
            topic, partition = names.topics(self._cluster).registrations, partition_of(self._host, self._partitions)
            async with (
                await bus.open_reader(topic, partition, start=None, committed=False) as reader,
                anyio.create_task_group() as group,
            ):
                group.start_soon(self._publish, bus, records)
                task_status.started()
                workers: dict[str, Register] = {}
                while True:
                    for message in await reader.fetch(timeout=5.0):
                        self._read_to = message.offset + 1
                        if message.key == self._host.encode():
                            self._take(codec.decode_registration(message.value, key=message.key), workers, post)

    async def _publish(self, bus: Bus, records: asyncio.Queue[tuple[Allocation, int]]) -> None:
        while True:
            record, read_to = await records.get()
            await publish_record(bus, record, cluster=self._cluster)
            await publish_record(bus, self._checkpoint(read_to), cluster=self._cluster)

    def _checkpoint(self, read_to: int) -> Checkpoint:
        self._commits += 1
        partition = partition_of(self._host, self._partitions)
        return Checkpoint(
            writer=keys.host_writer(self._host),
            instance=f"manager-of-{self._host}",
            cluster=self._cluster,
            scope="host",
            commit=self._commits,
            token=0,
            input=InputPosition(topic_id="scripted", partition=partition, from_=0, to=read_to),
            at=datetime.now(UTC),
            boot_id=boot_id() if self.watches else None,
            pid_ns=(pid_namespace() if self.watches else None) or UNSET,
        )

    def _take(
        self,
        message: Register | Heartbeat | Deregister,
        workers: dict[str, Register],
        post: Callable[[Allocation], object],
    ) -> None:
        with self._news:
            match message:
                case Register():
                    self.registrations.append(message)
                    workers[message.incarnation] = message
                    if not self.obeys:
                        message = structs.replace(message, resources=_amounts_alone(message.resources))
                    if not self.fake.absent:
                        self.fake.admit(message, post)
                case Heartbeat():
                    self.heartbeats.append(message)
                case Deregister():
                    self.deregistrations.append(message)
                    if message.incarnation in workers:
                        self.fake.dismiss(workers[message.incarnation], message.reason or "")
            self._news.notify_all()
