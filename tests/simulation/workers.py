"""Simulated workers: they register, keep their lease, use what they get for a while, and leave, or fall silent.

A worker knows by its own clock until when it may use its devices: a lease after it began to send the last message
that was acknowledged. It stops by then, whatever it hears later. What it believed is written down to the moment, and
compared in the end with what the ledger lent to others meanwhile.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import anyio

from outfitter_proto.bus import BusError, Entry, OffsetOutOfRangeError, Reader
from outfitter_proto.names import Topics
from simulation.client import ModelBus
from simulation.hardware import RESOURCE
from simulation.loop import Loop, Process
from simulation.owners import Owners

FINAL = ("ended", "failed")
NEVER_AGAIN = 0.2
"""How often a worker that ended without a word is gone for good."""
GIVES_UP_S = 25.0
"""How long a worker tries to register."""


class Holding:
    """A worker believes that devices are its own, from when it read so until `until` (its clock is everybody's)."""

    __slots__ = ("devices", "key", "since", "token", "until")

    def __init__(self, key: str, devices: list[str], token: int, since: float, until: float) -> None:
        self.key = key
        self.devices = devices
        self.token = token
        self.since = since
        self.until = until


class Plan(NamedTuple):
    """What one incarnation is up to. `owned`: its process is watched, and only its death ends it. `crashes`: it ends
    without a word."""

    amount: int
    owned: bool
    lease_s: float
    wait_s: float | None
    priority: int
    patience_s: float
    use_s: float
    crashes: bool


def plan(dice: random.Random, devices: int, *, tenacious: bool, last: bool) -> Plan:
    """An incarnation's plan; the `last` one wants what it can get, and waits for it."""
    if last:
        return Plan(1, False, 12.0, None, 0, math.inf, 1.0, crashes=False)
    if tenacious:
        return Plan(1, False, dice.choice((4.0, 6.0)), None, 0, 60.0, dice.uniform(10.0, 60.0), crashes=False)
    return Plan(
        amount=dice.choice((1, 1, 1, 2, devices)),
        owned=dice.random() < 0.3,
        lease_s=dice.choice((4.0, 6.0, 10.0, 15.0)),
        wait_s=dice.choice((None, None, 5.0)),
        priority=dice.choice((0, 0, 0, 1)),
        patience_s=dice.uniform(5.0, 40.0),
        use_s=dice.choice((0.2, 4.0, 15.0, 40.0)) * dice.random(),
        crashes=dice.random() < 0.3,
    )


class Worker:
    """One worker's name, and its incarnations one after the other."""

    def __init__(
        self,
        loop: Loop,
        bus: ModelBus,
        topics: Topics,
        *,
        host: str,
        name: str,
        partition: int,
        devices: int,
        owners: Owners | None,
        dice: random.Random,
        tenacious: bool,
        told: Callable[[str, str], None],
    ) -> None:
        """`owners`: those of a host whose manager watches them. `told(what, key)` hears of each incarnation:
        `answered`, `died`, `left`."""
        self.process = Process(f"{host}/{name}")
        self.bus = bus
        self.holdings: list[Holding] = []
        self.closing = False
        self.waiting_for: str | None = None
        self.finished = False
        self._loop = loop
        self._topics = topics
        self._host = host
        self._name = name
        self._partition = partition
        self._devices = devices
        self._owners = owners
        self._dice = dice
        self._tenacious = tenacious
        self._told = told
        self._sent_at = 0.0

    async def main(self) -> None:
        """Live until the world closes, then once more to the good end; unless it crashes and never comes back."""
        number = 0
        while True:
            number += 1
            last = self.closing
            ended_well = await self._incarnation(
                str(number), plan(self._dice, self._devices, tenacious=self._tenacious, last=last)
            )
            if last or (not ended_well and self._dice.random() < NEVER_AGAIN):
                break
            await anyio.sleep(self._dice.random() ** 2 * 5)
        self.finished = True

    async def _incarnation(self, incarnation: str, plan: Plan) -> bool:
        key = f"{self._host}/{self._name}/{incarnation}"
        self.waiting_for = None
        body = {
            "type": "register", "host": self._host, "worker": self._name, "incarnation": incarnation,
            "resources": {RESOURCE: {"amount": plan.amount}}, "wait_s": plan.wait_s, "priority": plan.priority,
            "lease_s": plan.lease_s,
        }  # fmt: skip
        owners = self._owners if plan.owned else None
        pid = 0
        if owners is not None:
            pid = owners.begin()
            body |= {"owner": owners.describe(pid), "lease_s": None}
        said_all = False
        reader = await self._register(body)
        if reader is not None:
            self.waiting_for = key
            async with reader:
                said_all = await self._live(key, body, plan, reader)
        if not said_all:
            self._told("died", key)
        if owners is not None:
            owners.end(pid)
        self.waiting_for = None
        return said_all

    async def _register(self, body: dict[str, Any]) -> Reader | None:
        """Register, as often as it takes; a registration that is not acknowledged may be there nevertheless."""
        with anyio.move_on_after(GIVES_UP_S if not self.closing else math.inf):
            while True:
                try:
                    _, end = await self.bus.offsets(self._topics.allocations, self._partition)
                    reader = await self.bus.open_reader(
                        self._topics.allocations, self._partition, start=end, committed=True
                    )
                    await self._say(body)
                except BusError:
                    await anyio.sleep(0.5)
                else:
                    return reader
        return None

    async def _live(self, key: str, body: dict[str, Any], plan: Plan, reader: Reader) -> bool:
        """From the registration to the end. Whether the manager knows of the end."""
        now = self._loop.time
        who = {name: body[name] for name in ("host", "worker", "incarnation")}
        lease = math.inf if body["lease_s"] is None else plan.lease_s
        leaves_at = now() + plan.patience_s
        next_beat = now() + lease / 3
        holding: Holding | None = None
        silent = False
        while True:
            # nobody heard it for a lease: what it reads of a grant may be over, whoever hears it again
            silent |= holding is None and now() >= self._sent_at + lease
            if holding is not None and now() >= holding.until:
                return False  # its lease may be over: it must not go on, whatever is said now
            if now() >= leaves_at:
                if holding is not None:
                    holding.until = min(holding.until, now())
                if plan.crashes and not self.closing:
                    return False
                return await self._leave({"type": "deregister", **who})
            if now() >= next_beat:
                next_beat = now() + lease / 3
                await self._beat({"type": "heartbeat", **who}, holding, lease)
                continue
            until = min(leaves_at, next_beat, now() + 5.0)
            if holding is not None:
                until = min(until, holding.until)
            record = await self._next(reader, key.encode(), until - now())
            if record is None:
                continue
            if record["state"] in FINAL or record["state"] == "releasing" or record["reason_code"] == "superseded":
                self.waiting_for = None
                if holding is not None:
                    holding.until = min(holding.until, now())
                if record["state"] in FINAL:
                    self._told("answered", key)
                    return True
                return False
            if record["state"] == "allocated" and holding is None and now() < self._sent_at + lease:
                if silent:
                    return False
                self.waiting_for = None
                self._told("answered", key)
                devices = [info["id"] for info in record["resources"].get(RESOURCE, [])]
                holding = Holding(key, devices, record["token"], now(), self._sent_at + lease)
                self.holdings.append(holding)
                leaves_at = now() + plan.use_s

    async def _next(self, reader: Reader, key: bytes, timeout: float) -> dict[str, Any] | None:
        """The newest of the records that have come, if one of them is this incarnation's."""
        await anyio.sleep(max(0.0, min(timeout, 0.1 + 0.3 * self._dice.random())))
        try:
            messages = await reader.fetch(timeout=max(0.001, timeout))
        except OffsetOutOfRangeError as error:
            await reader.seek(error.start)
            return None
        except BusError:
            await anyio.sleep(min(0.5, max(0.001, timeout)))
            return None
        values = [message.value for message in messages if message.key == key and message.value is not None]
        return json.loads(values[-1]) if values else None

    async def _beat(self, body: dict[str, Any], holding: Holding | None, lease: float) -> None:
        before = self._sent_at
        try:
            with anyio.move_on_after(lease / 3):
                await self._say(body)
        except BusError:
            return
        if holding is not None and self._sent_at > before and self._loop.time() < holding.until:
            holding.until = self._sent_at + lease

    async def _leave(self, body: dict[str, Any]) -> bool:
        with anyio.move_on_after(10.0 if not self.closing else math.inf):
            while True:
                try:
                    await self._say(body)
                except BusError:
                    await anyio.sleep(0.5)
                else:
                    self._told("left", f"{body['host']}/{body['worker']}/{body['incarnation']}")
                    return True
        return False

    async def _say(self, body: dict[str, Any]) -> None:
        """Publish; `_sent_at` is when the last message began to be sent that was acknowledged."""
        sent_at = self._loop.time()
        entry = Entry(self._host.encode(), json.dumps(body).encode())
        await self.bus.publish(self._topics.registrations, self._partition, entry)
        self._sent_at = sent_at
