"""Records as managers write them, and a model with them, for tests of the read API."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, cast

from aiohttp import ClientResponse, ClientSession, TCPConnector

from outfitter_proto.bus import Bus, Message
from outfitter_proto.codec import encode
from outfitter_proto.partitioning import partition_of
from outfitter_proto.records import (
    Allocation,
    Checkpoint,
    Cordon,
    Host,
    InputPosition,
    InventoryDevice,
    ManagerIdentity,
    ResolvedRequest,
    ResourceInventory,
    Source,
)
from outfitter_service.api.access import Guard
from outfitter_service.api.application import MOST_CONNECTIONS, application
from outfitter_service.api.follower import Follower
from outfitter_service.api.model.fleet import Fleet
from outfitter_service.http.listener import Listening, serving
from outfitter_service.query import ledger_view

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
PARTITIONS = 3


def host_record(
    host: str,
    *,
    gpus: int = 2,
    stopped: bool = False,
    ill: int = 0,
    resources: dict[str, ResourceInventory] | None = None,
) -> Host:
    """A host with `gpus` GPUs, of which the first `ill` are unhealthy, or with these `resources`."""
    devices = [
        InventoryDevice(id=f"{host}-{index}", health="unhealthy" if index < ill else "healthy") for index in range(gpus)
    ]
    manager = ManagerIdentity(instance="i", version="0.1.0", since=NOW, stopped_at=NOW if stopped else None)
    return Host(host=host, manager=manager, since=NOW, resources=resources or {"gpu": resource_of(devices)})


def resource_of(devices: list[InventoryDevice]) -> ResourceInventory:
    """A resource of one host, with these devices."""
    healthy = sum(device.health == "healthy" for device in devices)
    return ResourceInventory(state="reported", amount=1, devices=devices, total=len(devices), healthy=healthy)


def allocation(host: str, worker: str, state: str = "allocated", *, offset: int = 0, **more: Any) -> Allocation:
    """An allocation of one GPU. `devices`: their ids."""
    devices, priority = more.pop("devices", []), more.pop("priority", 0)
    return Allocation(
        host=host,
        worker=worker,
        incarnation=more.pop("incarnation", "run-1"),
        state=state,
        request=ResolvedRequest(amounts={"gpu": 1}, priority=priority),
        since=NOW + timedelta(seconds=offset),
        writer=f"host/{host}",
        commit=1,
        source=Source(partition=partition_of(host, PARTITIONS), offset=offset),
        resources={"gpu": [{"id": device, "index": "0"} for device in devices]} if devices else {},
        **more,
    )


def cordon(host: str, order: str = "k3v9-01", **more: Any) -> Cordon:
    """An order in effect: on the whole host, unless `more` names a resource or a device."""
    usual: dict[str, Any] = {"author": "ada@ops-1", "reason": "rebooted tonight", "since": NOW}
    return Cordon(host=host, order=order, **{**usual, **more})


def checkpoint(writer: str, *, partition: int = 0, to: int = 5) -> Checkpoint:
    return Checkpoint(
        writer=writer, instance="i", cluster="c", scope="host", commit=1, token=1, at=NOW,
        input=InputPosition(topic_id="t", partition=partition, from_=0, to=to),
    )  # fmt: skip


def message(record: Any, *, key: str | None = None, partition: int | None = None, offset: int = 0) -> Message:
    """The message of a record of the ledger; `record` None: of the deletion of `key`."""
    key = key or record.key
    if partition is None:
        host = getattr(record, "host", None) or key.partition("/")[0]
        partition = partition_of(host, PARTITIONS)
    value = None if record is None else encode(record)
    return Message("outfitter.allocations", partition, offset, key.encode(), value, 0)


def change(record: Any, **more: Any) -> ledger_view.RecordChange:
    return ledger_view.decode(message(record, **more))


def deletion(record: Any) -> ledger_view.RecordChange:
    """The deletion of a host's record."""
    return change(None, key=record.key, partition=partition_of(record.host, PARTITIONS))


def fleet_of(*records: Any, host: str | None = None) -> Fleet:
    """A model that was restored from these records."""
    fleet = Fleet(PARTITIONS, host)
    fleet.restore(change(record) for record in records)
    return fleet


def follower_of(fleet: Fleet | None, condition: str = "serving") -> Follower:
    """A follower that has this model and follows nothing."""
    follower = Follower(cast("Bus", None), "c")
    follower.fleet, follower.condition, follower.as_of = fleet, condition, NOW
    return follower


OPEN = Guard(token=None, local=True)
"""Lets in whoever is on this machine."""


@asynccontextmanager
async def serving_api(follower: Follower, guard: Guard = OPEN) -> AsyncIterator[ClientSession]:
    """A client of an API on a port of its own."""
    listening = Listening(address="127.0.0.1:0", most=MOST_CONNECTIONS)
    async with serving(lambda connections: application(follower, connections, guard), listening) as address:
        async with ClientSession(f"http://{address}", connector=TCPConnector(limit=0)) as client:
            yield client


class Events:
    """What a reader of the event stream got, event by event: kind, id and data."""

    def __init__(self, response: ClientResponse) -> None:
        self._response = response
        self.last_id = ""

    async def next(self) -> tuple[str, Any]:
        """The next event that has data. `last_id` is then its id."""
        fields: dict[str, str] = {}
        while True:
            line = (await self._response.content.readline()).decode()
            if not line:
                return "end", None
            if line == "\n":
                self.last_id = fields.get("id", self.last_id)
                if "data" in fields:
                    return fields["event"], json.loads(fields["data"])
                fields = {}
            else:
                name, _, value = line.rstrip("\n").partition(": ")
                fields[name] = value

    async def until_open(self) -> None:
        """Read the first lines, which say from where the stream goes on."""
        while not self.last_id:
            line = (await self._response.content.readline()).decode()
            if line.startswith("id: "):
                self.last_id = line[4:].strip()
                await self._response.content.readline()
