"""Simulated workers: the real client on the model bus. They register, keep their lease, use what they get for a while,
and leave, or fall silent.

What is real here is all that `RuntimeContext` and `outfitter run` have in common: `WorkerSession`, its heartbeats, its
lease and its watch. A worker uses its devices as the client lets it: while the record says that they are its own, and
until its lease ends. What it believed is written down to the moment, and compared in the end with what the ledger lent
to others meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import anyio
from msgspec import UNSET, UnsetType, structs

from outfitter.errors import AllocationError
from outfitter.session.lease import Lease
from outfitter.session.status import AllocationStatus, status_of
from outfitter.session.watch import AllocationWatch
from outfitter.session.worker_session import WorkerSession
from outfitter_proto import codec
from outfitter_proto.bus import Bus, BusError, Entry
from outfitter_proto.names import DEFAULT_CLUSTER, topics
from outfitter_proto.partitioning import partition_of
from outfitter_proto.records import Allocation, Condition, Deregister, Owner, Register, ResourceRequest, Survivors
from simulation.hosts.hardware import CARD, RESOURCE, Bench
from simulation.hosts.owners import Owners
from simulation.lent import lent
from simulation.loop import Loop, Process
from simulation.model.client import ModelBus
from support.exclusivity import Held

CRASHES = 0.3
"""How often a worker ends without a word."""
NEVER_AGAIN = 0.2
"""How often a worker that ended without a word is gone for good."""
LONGEST_LEASE_S = 15.0


class Holding:
    """A worker believes that devices (each by its one physical name) are its own, from `since` until `until` (its clock
    is everybody's). `left`: not it, but processes that it has left behind."""

    __slots__ = ("held", "key", "left", "since", "token", "until")

    def __init__(self, key: str, held: Held, token: int, since: float, until: float, *, left: bool = False) -> None:
        self.left = left
        self.key = key
        self.held = held
        self.token = token
        self.since = since
        self.until = until


class Plan(NamedTuple):
    """What one incarnation is up to. `owned`: it names its process, which a manager of its host watches. `crashes`: it
    ends without a word. `silent`: nobody sends heartbeats, and it uses what it got until its end, whatever it hears.
    `choices`: which devices it takes, by resource."""

    amounts: dict[str, int]
    operators: dict[str, dict[str, int]] | None
    owned: bool
    lease_s: float | UnsetType | None
    wait_s: float | None
    priority: int
    patience_s: float
    use_s: float
    crashes: bool
    silent: bool = False
    choices: Mapping[str, Mapping[str, Any]] = MappingProxyType({})


def plan(dice: random.Random, devices: int, *, tenacious: bool, last: bool) -> Plan:
    """An incarnation's plan; the `last` one wants what it can get, and waits for it."""
    if last:
        return Plan({RESOURCE: 1}, None, False, 12.0, None, 0, math.inf, 1.0, crashes=False)
    if tenacious:
        lease_s, use_s = dice.choice((4.0, 6.0)), dice.uniform(10.0, 60.0)
        return Plan({RESOURCE: 1}, None, False, lease_s, None, 0, 60.0, use_s, crashes=False)
    owned = dice.random() < 0.3
    return Plan(
        amounts={RESOURCE: dice.choice((1, 1, 1, 2, devices))},
        operators=None,
        owned=owned,
        lease_s=dice.choice((4.0, 6.0, 10.0, 15.0, *([None] * 4 if owned else ()))),
        wait_s=dice.choice((None, None, 5.0)),
        priority=dice.choice((0, 0, 0, 1)),
        patience_s=dice.uniform(5.0, 40.0),
        use_s=dice.choice((0.2, 4.0, 15.0, 40.0)) * dice.random(),
        crashes=dice.random() < CRASHES,
    )


def bulky(plan: Plan, dice: random.Random, devices: int) -> Plan:
    """The plan with many devices, and with operators whose names are long."""
    amounts = {RESOURCE: dice.choice((1, 2, devices // 2, devices))}
    operators = None
    if dice.random() < 0.3:
        operators = {str(number).ljust(dice.choice((1, 200)), "o"): amounts for number in range(dice.choice((1, 5)))}
    return plan._replace(amounts=amounts, operators=operators)


def varied(plan: Plan, dice: random.Random, resources: Sequence[str], *, last: bool) -> Plan:
    """The plan with others of the host's `resources`, alone or together; and with operators, and without a lease that
    is named, unless it is the `last` one."""
    if last:
        return plan._replace(amounts={dice.choice(resources): 1})
    wanted = dice.sample(resources, dice.choice((1, 1, 2, len(resources))))
    amounts = {name: plan.amounts[RESOURCE] if name == RESOURCE else dice.choice((1, 1, 2)) for name in wanted}
    operators = None
    if dice.random() < 0.4:
        whole, half = dict(amounts), {name: dice.randrange(amount + 1) for name, amount in amounts.items()}
        part = {name: amount for name, amount in half.items() if amount}
        operators = dice.choice(({"all": whole}, {"some": part}, {"some": part, "others": {**part, wanted[0]: 1}}))
    lease_s = UNSET if dice.random() < 0.2 else plan.lease_s
    return plan._replace(amounts=amounts, operators=operators, lease_s=lease_s)


def choosy(plan: Plan, dice: random.Random) -> Plan:
    """The plan of a worker that takes certain devices only."""
    choices = {
        name: dice.choice(
            (
                {},
                {"where": {"colour": "r*"}},
                {"where": {"colour": Condition(not_="red")}},
                {"where": {"index": Condition(max=1)}, "same": ("pair",)},
            )
        )
        for name in plan.amounts
        if name in (RESOURCE, CARD)
    }
    amounts = {name: min(amount, 2) if choices.get(name) else amount for name, amount in plan.amounts.items()}
    return plan._replace(choices=choices, amounts=amounts, operators=None)


class Session(WorkerSession):
    """The client, of a worker that may die without a word, or deregister by its name alone. `known`: the manager hears
    of its end."""

    dies = False
    nameless = False
    known = False

    async def keep_lease(self) -> None:
        if self.registration.heartbeats is not False:
            await super().keep_lease()

    async def deregister(self, reason: str | None = None) -> bool:
        if self.dies:
            self.allocation_watch.close()
        elif self.nameless:
            self.allocation_watch.close()
            self.known = await self._deregister_nameless()
        else:
            self.known = await super().deregister(reason)
        return self.known

    async def _deregister_nameless(self) -> bool:
        asked = self.registration
        try:
            await say(self._bus, Deregister(host=asked.host, worker=asked.worker))
        except BusError:
            return False
        return True


async def say(bus: Bus, message: Register | Deregister) -> None:
    """What the client has no words for, said past it.

    Raises:
        BusError: nobody may have heard it.
    """
    topic = topics(DEFAULT_CLUSTER).registrations
    partition = partition_of(message.host, (await bus.topic(topic)).partitions)
    await bus.publish(topic, partition, Entry(message.host.encode(), codec.encode(message)))


class DiaryLease(Lease):
    """A lease whose every change is told."""

    changed: Callable[[], object] = lambda: None

    def begin(self, sent_at: float) -> None:
        super().begin(sent_at)
        self.changed()

    def confirm(self, alive_at: float) -> None:
        super().confirm(alive_at)
        self.changed()


class Diary(AllocationWatch):
    """A watch that writes down what its worker may believe whenever that may have changed."""

    def __init__(self, loop: Loop, key: str, holdings: list[Holding], *, lasting: bool) -> None:
        """`lasting`: once it has begun the worker believes in it until its end, whatever the ledger says."""
        lease = DiaryLease(loop.time)
        super().__init__(lease)
        self._time = loop.time
        self._key = key
        self._holdings = holdings
        self._open: Holding | None = None
        self.last: Holding | None = None
        self._using = False
        self._lasting = lasting
        lease.changed = self._note

    def begin(self) -> None:
        """The client has said that the devices are the worker's own."""
        self._using = True
        self._note()

    def end(self) -> None:
        """The worker uses them no more."""
        self._using = False
        self._note()

    def _note(self) -> None:
        now, left, record = self._time(), self.lease.remaining, self.read().record
        if self._lasting and self._using and self._open is not None:
            return
        until = math.inf if left is None or self._lasting else now + left
        if self._open is not None and self._open.until <= now:
            self._open = None
        if not self._using or record is None or status_of(record) is not AllocationStatus.YOURS or until <= now:
            if self._open is not None:
                self._open.until = now
                self._open = None
            return
        if self._open is None:
            held = lent(json.loads(codec.encode(record)))
            self._open = self.last = Holding(self._key, held, record.token or 0, now, until)
            self._holdings.append(self._open)
        self._open.until = until

    def _put(self, *, record: Allocation | None = None, error: Exception | None = None, closed: bool = False) -> None:
        super()._put(record=record, error=error, closed=closed)
        self._note()


def _requests(
    amounts: Mapping[str, int], choices: Mapping[str, Mapping[str, Any]] | None = None
) -> dict[str, ResourceRequest]:
    return {name: ResourceRequest(amount=amount, **(choices or {}).get(name, {})) for name, amount in amounts.items()}


class Worker:
    """One worker's name, and its incarnations one after the other."""

    def __init__(
        self,
        loop: Loop,
        bus: ModelBus,
        *,
        host: str,
        name: str,
        bench: Bench,
        owners: Owners | None,
        dice: random.Random,
        tenacious: bool,
        told: Callable[[str, str], None],
        unruly: random.Random | None = None,
        twin: str = "",
        silent: random.Random | None = None,
        choosy: random.Random | None = None,
    ) -> None:
        """`owners`: those of a host whose manager watches them. `told(what, key)` hears of each incarnation:
        `answered`, `died`, `left`. With dice it is `unruly`: now and then it registers a run again with another
        request, and deregisters by its name alone. `twin` is what the incarnations begin with of a worker whose name
        somebody else has, too. With dice nobody sends heartbeats for some of its runs: `silent`;
        and in some it takes certain devices only: `choosy`."""
        self.process = Process(f"{host}/{name}{twin}")
        self.bus = bus
        self.holdings: list[Holding] = []
        self.complaints: list[str] = []
        self.closing = False
        self.registering = False
        self.waiting_for: str | None = None
        self.finished = False
        self._loop = loop
        self._host = host
        self._name = name
        self._bench = bench
        self._owners = owners
        self._dice = dice
        self._bulk_dice = random.Random(f"{host}/{name}/{bench.bulk}")
        self._tenacious = tenacious
        self._told = told
        self._unruly = unruly
        self._twin = twin
        self._silent = silent
        self._choosy = choosy

    async def main(self) -> None:
        """Live until the world closes, then once more to the good end; unless it crashes and never comes back."""
        number = 0
        while True:
            number += 1
            last = self.closing
            chosen = plan(self._dice, len(self._bench.ids), tenacious=self._tenacious, last=last)
            if self._bench.bulk is not None and not last:
                chosen = bulky(chosen, self._bulk_dice, len(self._bench.ids))
            if len(self._bench.catalogue.names) > 1:
                chosen = varied(chosen, self._dice, self._bench.catalogue.names, last=last)
            if self._choosy is not None and not last and self._choosy.random() < 0.5:
                chosen = choosy(chosen, self._choosy)
            if self._silent is not None and not last and self._silent.random() < 0.5:
                chosen = chosen._replace(owned=True, lease_s=None, silent=True)
            ended_well = await self._incarnation(f"{self._twin}{number}", chosen)
            if (last and ended_well) or (not last and not ended_well and self._dice.random() < NEVER_AGAIN):
                break
            await anyio.sleep(self._dice.random() ** 2 * 5)
        self.finished = True

    async def _incarnation(self, incarnation: str, plan: Plan) -> bool:
        """One run; whether the manager knows of its end."""
        haunted = self._owners is not None and self._owners.survivors is not None
        owners = self._owners if plan.owned or haunted else None
        pid = owners.begin() if owners is not None else 0
        asked = Register(
            host=self._host,
            worker=self._name,
            incarnation=incarnation,
            resources=_requests(plan.amounts, plan.choices),
            operators={name: _requests(share) for name, share in (plan.operators or {}).items()} or None,
            owner=Owner(**owners.describe(pid)) if owners is not None else None,
            lease_s=plan.lease_s if owners is not None or plan.lease_s is not None else LONGEST_LEASE_S,
            wait_s=plan.wait_s,
            priority=plan.priority,
            heartbeats=False if plan.silent else UNSET,
            survivors=Survivors(uid=0) if owners is not None and owners.survivors is not None else UNSET,
        )
        key = f"{self._host}/{self._name}/{incarnation}"
        diary = Diary(self._loop, key, self.holdings, lasting=plan.silent)
        session = Session(self.bus, asked, allocation_watch=diary, manager_patience=None)
        asking = self._misbehave(session)
        try:
            self.registering = True
            async with session:
                self.registering = False
                self.waiting_for = key
                try:
                    await self._use(session, diary, plan)
                finally:
                    diary.end()
                    survivors = owners.survivors if owners is not None else None
                    if diary.last is not None and survivors is not None and not self.closing:
                        # its processes are there before it says that it is over
                        self._loop.spawn(self._loop.world, partial(self._outlive, owners, survivors, diary.last))
                session.dies = plan.crashes and not self.closing
        except (AllocationError, BusError):
            pass  # over, refused, or never registered
        finally:
            asking.cancel()
        self._told("left" if session.known else "died", key)
        if owners is not None:
            owners.end(pid)
        self.waiting_for = None
        return session.known

    async def _outlive(self, owners: Owners, dice: random.Random, held: Holding) -> None:
        """What a worker has left behind uses its devices. It goes on as another process now and then."""
        self._told("left processes behind", held.key)
        used = Holding(held.key, held.held, held.token, self._loop.time(), math.inf, left=True)
        self.holdings.append(used)
        pid = owners.leave_behind(held.key)
        for _ in range(dice.choice((1, 3))):
            await anyio.sleep(dice.random() * 4)
            pid, ended = owners.leave_behind(held.key), pid
            owners.end_left(ended)
        await anyio.sleep(dice.random() * 8)
        owners.end_left(pid)
        used.until = self._loop.time()
        self._told("has nothing left", held.key)

    def _misbehave(self, session: Session) -> asyncio.Future[None]:
        """What an unruly worker does with a run; cancelled when that is over."""
        dice = self._unruly
        if dice is None:
            return self._loop.create_future()
        session.nameless = dice.random() < 0.4
        return self._loop.spawn(self.process, lambda: self._ask_for_more(session.registration, dice))

    async def _ask_for_more(self, asked: Register, dice: random.Random) -> None:
        """Register again, as the same run, for something else: the manager must leave everything as it is."""
        resources = {name: ResourceRequest(amount=one.amount + 1) for name, one in (asked.resources or {}).items()}
        while dice.random() < 0.7:
            await anyio.sleep(dice.expovariate(0.3))
            with suppress(BusError):
                await say(self.bus, structs.replace(asked, resources=resources, operators=None))

    async def _use(self, session: Session, diary: Diary, plan: Plan) -> None:
        """Wait for the devices, and use them for a while: as long as the client says that they are the worker's.

        Raises:
            AllocationError: the answer is no, or it is over.
        """
        with anyio.move_on_after(plan.patience_s) as patience:
            await session.wait()
        if patience.cancelled_caught:
            return
        self._told("answered", "/".join((self._host, self._name, session.registration.incarnation)))
        self.waiting_for = None
        if diary.lease.at_risk:
            self.complaints.append(f"{self.process} was told in one breath that it has devices, and to stop using them")
        diary.begin()
        if plan.silent:
            await anyio.sleep(plan.use_s)
            return
        with anyio.move_on_after(plan.use_s):
            while not (snapshot := diary.read()).over:
                await diary.changed(snapshot.version)
            if not snapshot.ended:
                self.complaints.append(f"{self.process} has devices, and its client gave up: {snapshot.error}")
