"""The devices of a simulated host: what drivers do to them stays when managers die.

It obeys the rules that drivers must keep at the moment at which something takes effect (a token below the highest seen
for a device changes nothing, nor does a prepare with one that was taken back), and writes down where a manager made a
device ready for two workers.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import NamedTuple

from msgspec import structs

from outfitter_drivers.api import (
    Device,
    ExternalResourceDriver,
    ExternalResourceInfo,
    Grant,
    InUseCheck,
    Inventory,
    NotEnoughDevicesError,
    Preparation,
    TemporaryDriverError,
    Worker,
)
from outfitter_proto.records import Health
from outfitter_service.core.model import ResourceSpec
from outfitter_service.runtime.drivers.building import inspected
from outfitter_service.runtime.drivers.loading import with_driver
from outfitter_service.runtime.drivers.supervisor import Loaded
from simulation.bulk import Bulk
from simulation.hosts.books import BookedDriver, Books

RESOURCE = "gpu"
CARD = "card"
MAP = "map"
PORT = "port"
BOOKED = "booked"
PART = "part"
SLICE = "slice"
HALF = "half"
ASKED = (PORT, BOOKED)
"""Those whose drivers have no inventory."""
PORTS = 2
PARTS = 2
"""How many parts `part` shows of each device of `gpu`."""
REPLICAS = 2
"""To how many workers `half` lends each device."""
LOOK_S = 3.0
"""How often a driver looks at the devices."""
ACCEPTED_BYTES = 60_000
"""What a device may say of itself and stay healthy (`translation.DEVICE_BYTES`, less what is around it)."""


class Catalogue(NamedTuple):
    """The resources there are beside `gpu`: `card`, which shows some of the same devices under names of its own; `map`,
    which shows all of them to everybody; `port`, on demand; `booked`, on demand by a script with books of its own;
    `part`, which shows parts of them; `slice`, which shows some of these parts and does not know of what they are
    parts; `half`, which lends each of the devices of `gpu` to two workers.

    `mapped`: the driver of `map` alone knows which names mean one device; otherwise that of `card` does. `by_card`: the
    driver of `part` calls wholes as `card` does. `repeats`: a worker may get both replicas of a device.
    """

    cards: bool = False
    mapped: bool = False
    maps: bool = False
    ports: bool = False
    books: bool = False
    min_healthy_s: float = 0.0
    """A device that was ill is lent only after it has been healthy for so many seconds; 0: none falls ill."""
    parts: bool = False
    slices: bool = False
    by_card: bool = False
    halves: bool = False
    repeats: bool = False

    @property
    def names(self) -> list[str]:
        there = {
            CARD: self.cards, MAP: self.maps or self.mapped, PORT: self.ports, BOOKED: self.books,
            PART: self.parts, SLICE: self.slices, HALF: self.halves,
        }  # fmt: skip
        return [RESOURCE, *(name for name, is_there in there.items() if is_there)]


GPUS_ALONE = Catalogue()


class Oddities(NamedTuple):
    """How a manager is configured otherwise than the others: it does not know the resources `without`, those that are
    `turned` it shares out where others do not, and the other way round (replicas: it lends whole devices), and its
    drivers tell of devices `backwards`."""

    without: frozenset[str] = frozenset()
    turned: frozenset[str] = frozenset()
    backwards: bool = False


AS_USUAL = Oddities()


class Bench:
    """One host's devices. `slow_s`: how long a driver's call takes at most; `failing`: how often it fails.

    `parted_at` is when the driver of `map` first kept silent about a device: who has read it since need not know its
    names. `era` counts how often drivers that prepare nothing began to serve the host: they take nothing back of what
    was ready before. While `keeps_silent`, the driver of `part` does not say of what its devices are parts.
    """

    def __init__(
        self,
        host: str,
        count: int,
        *,
        dice: random.Random,
        catalogue: Catalogue = GPUS_ALONE,
        cards: int = 0,
        bulk: Bulk | None = None,
    ) -> None:
        """`bulk`: each device says much of itself, and something else whenever it was away."""
        self.host = host
        self.catalogue = catalogue
        self.ids = [f"{host}-{RESOURCE}-{index}" for index in range(count)]
        self.cards = [f"{host}-{CARD}-{index}" for index in range(cards)] if catalogue.cards else []
        self.missing: set[str] = set()
        self.ill: set[str] = set()
        self.parted_at: dict[str, float] = {}
        self.keeps_silent = False
        self.slow_s = 0.0
        self.failing = 0.0
        self.ready_for: dict[str, str] = {}
        self.era = 0
        self.books = Books()
        self.violations: list[str] = []
        self.stale = 0
        self.bulk = bulk
        self._most_info_bytes: int | None = None
        self._highest: dict[str, tuple[int, bool]] = {}
        self._dice = dice
        self._bulk_dice = random.Random(f"{host}/{count}/{bulk}")
        self._info_bytes: dict[str, int] = {}

    @property
    def places(self) -> list[str]:
        """What may be missing: a device in one resource."""
        maps = [f"{self.host}-{MAP}-{index}" for index in range(len(self.ids))] if MAP in self.catalogue.names else []
        halves = [_named(name, HALF) for name in self.ids if self.catalogue.halves]
        return [*self.ids, *self.cards, *maps, *self.parts, *halves]

    @property
    def parts(self) -> list[str]:
        """The devices of `part`: `h0-part-1.0` is a part of `h0-gpu-1`."""
        if not self.catalogue.parts:
            return []
        return [f"{_named(name, PART)}.{number}" for name in self.ids for number in range(PARTS)]

    def lose(self, place: str, now: float) -> None:
        """A driver shows a device no more, until it is no longer in `missing`."""
        self.missing.add(place)
        self._info_bytes.pop(place, None)
        if f"-{MAP}-" in place:
            self.parted_at.setdefault(physical(place), now)

    def recover(self) -> None:
        """All devices are there, answer at once, and say no more of themselves than keeps them healthy."""
        self.missing.clear()
        self.ill.clear()
        self.keeps_silent = False
        self.slow_s = self.failing = 0.0
        self._most_info_bytes = ACCEPTED_BYTES

    def is_hidden(self, device: str) -> bool:
        """Whether the driver that alone knows all names of a device has kept silent about it: who has it under another
        name is not known since."""
        return self.catalogue.mapped and physical(device) in self.parted_at

    def abandon(self) -> None:
        """Drivers that prepared are replaced by others that do not: nobody knows any more what is ready for whom."""
        self.era += 1
        self.ready_for.clear()

    def devices(self, resource: str) -> list[Device]:
        """What a driver finds, and how it is."""
        return [self._with_health(resource, device) for device in self._found(resource)]

    def _with_health(self, resource: str, device: Device) -> Device:
        is_ill = device.id is not None and _named(device.id, resource) in self.ill
        return structs.replace(device, health=Health.UNHEALTHY, reason="ill") if is_ill else device

    def _found(self, resource: str) -> list[Device]:
        if resource == RESOURCE:
            return [self._device(name) for name in self.ids if name not in self.missing]
        if resource == CARD:
            shown = [name for name in self.cards if name not in self.missing]
            return [self._device(name, *(() if self.catalogue.mapped else [physical(name)])) for name in shown]
        if resource == PART:
            return [self._part(name) for name in self.parts if name not in self.missing]
        if resource == SLICE:
            return [_device(name) for name in self.parts[::PARTS]]
        if resource == HALF:
            return [_device(name) for name in self.ids if _named(name, HALF) not in self.missing]
        maps = [name for name in self.ids if _named(name, MAP) not in self.missing]
        if not self.catalogue.mapped:
            return [_device(name) for name in maps]
        return [_device(name, *({_named(name, CARD)} & {*self.cards})) for name in maps]

    def _device(self, name: str, *aliases: str) -> Device:
        device = _device(name, *aliases)
        if self.bulk is not None:
            size = self._info_bytes.setdefault(name, self.bulk.info_bytes(self._bulk_dice))
            device.properties["about"] = "x" * min(size, self._most_info_bytes or size)
        return device

    def _part(self, name: str) -> Device:
        whole = whole_of(physical(name))
        card = _named(whole, CARD) if whole is not None else None
        if self.catalogue.by_card and card in self.cards:
            whole = card
        return _device(name, part_of=None if self.keeps_silent else whole)

    def reset(self) -> None:
        """Somebody has put all devices back as they were, and nobody remembers a token."""
        self.ready_for.clear()
        self.books.entries.clear()
        self._highest.clear()

    async def take_time(self) -> None:
        """What hardware does: it takes its time, and now and then it fails."""
        await asyncio.sleep(self._dice.random() ** 3 * self.slow_s)
        if self._dice.random() < self.failing:
            raise TemporaryDriverError("the hardware did not want to")

    def fresh(self, grant: Grant, *, back: bool = False) -> bool:
        """Whether a call may take effect now. What was taken `back` can be prepared with a later token only, and is not
        taken back again: it may be lent under another name by now."""
        rank = (grant.token, back)
        known = [self._highest.get(device, (0, False)) for device in grant.device_ids]
        if any(rank < highest or rank == highest == (grant.token, True) for highest in known):
            self.stale += 1
            return False
        self._highest.update(dict.fromkeys(grant.device_ids, rank))
        return True


def physical(name: str) -> str:
    """One name for all of a device of a host."""
    if ":" in name:  # of a driver that is asked on demand
        return name
    host, _, index = name.rsplit("-", 2)
    return f"{host}-{RESOURCE}-{index}"


def whole_of(device: str) -> str | None:
    """What a device, by its one name, is really a part of; None: nothing."""
    return device.rpartition(".")[0] or None if ":" not in device else None


def _named(name: str, kind: str) -> str:
    host, _, index = name.rsplit("-", 2)
    return f"{host}-{kind}-{index}"


def _device(name: str, *aliases: str, part_of: str | None = None) -> Device:
    index = name.rpartition("-")[2]
    number = int(index.partition(".")[0])
    properties = {"index": index, "colour": ("red", "blue")[number % 2], "pair": f"{number // 2},all"}
    return Device(id=name, aliases=aliases, part_of=part_of, properties=properties)


def load(
    benches: Mapping[str, Bench],
    *,
    prepares: bool,
    catalogue: Catalogue = GPUS_ALONE,
    oddities: Oddities = AS_USUAL,
) -> dict[str, Loaded]:
    """The resources, with drivers of one manager's own that reach the benches of several hosts."""
    found: dict[str, Loaded] = {}
    names = [name for name in catalogue.names if name not in oddities.without]
    for name in names:
        shared = (name == MAP) != (name in oddities.turned)
        own = prepares and name in (RESOURCE, CARD) and not shared
        driver: ExternalResourceDriver
        if name == PORT:
            driver = AskedDriver(benches)
        elif name == BOOKED:
            driver = BookedDriver(benches)
        else:
            kind = PreparingDriver if own else ListingDriver
            driver = kind(benches, name, backwards=oddities.backwards)
        spec = ResourceSpec(name=name, amount=1, shared=shared, min_healthy_s=catalogue.min_healthy_s)
        if name == HALF:
            count = 1 if name in oddities.turned else REPLICAS
            same = catalogue.repeats and count > 1
            spec = structs.replace(spec, shared=False, replicas=count, replicas_same_device=same)
        found[name] = with_driver(spec, inspected(driver))
    return found


class AskedDriver(ExternalResourceDriver):
    """Has no inventory: it is asked for each worker."""

    def __init__(self, benches: Mapping[str, Bench]) -> None:
        self.benches = benches

    async def retrieve_resource_info(self, amount: int, worker: Worker) -> Collection[ExternalResourceInfo]:
        await self.benches[worker.host].take_time()
        if amount > PORTS:
            raise NotEnoughDevicesError(f"{PORTS} ports, not {amount}")
        return [ExternalResourceInfo({"index": str(index)}) for index in range(amount)]

    def device(self, info: ExternalResourceInfo) -> Device:
        return Device(properties=dict(info))


class ListingDriver(ExternalResourceDriver, Inventory):
    """Names the devices that are there."""

    def __init__(self, benches: Mapping[str, Bench], resource: str = RESOURCE, *, backwards: bool = False) -> None:
        self.benches = benches
        self.resource = resource
        self.backwards = backwards

    async def retrieve_resource_info(self, amount: int, worker: Worker) -> Collection[ExternalResourceInfo]:
        return []

    async def inventory(self, host: str) -> AsyncIterator[Sequence[Device]]:
        bench = self.benches[host]
        self.begin(bench)
        told: list[Device] | None = None
        while True:
            found = bench.devices(self.resource)
            if self.backwards:
                found.reverse()
            if found != told:
                told = found
                yield found
            await asyncio.sleep(LOOK_S)

    def begin(self, bench: Bench) -> None:
        """Serve a host from now on, instead of whatever driver did."""
        if self.resource in (RESOURCE, CARD):
            bench.abandon()


class PreparingDriver(ListingDriver, Preparation, InUseCheck):
    """Makes devices ready and takes them back."""

    def __init__(self, benches: Mapping[str, Bench], resource: str = RESOURCE, *, backwards: bool = False) -> None:
        super().__init__(benches, resource, backwards=backwards)
        self.eras: dict[str, int] = {}

    def begin(self, bench: Bench) -> None:
        self.eras[bench.host] = bench.era

    def serves(self, bench: Bench) -> bool:
        """Whether no driver that prepares nothing has served the host since this one first did anything there."""
        return self.eras.setdefault(bench.host, bench.era) == bench.era

    async def prepare(self, grant: Grant) -> None:
        bench = self.benches[grant.worker.host]
        await bench.take_time()
        if self.serves(bench) and bench.fresh(grant):
            for device in grant.device_ids:
                other = bench.ready_for.setdefault(physical(device), grant.allocation)
                if other != grant.allocation and not bench.is_hidden(device):
                    bench.violations.append(f"{device} was made ready for {grant.allocation} while it was {other}'s")

    async def unprepare(self, grant: Grant) -> None:
        bench = self.benches[grant.worker.host]
        await bench.take_time()
        if self.serves(bench) and bench.fresh(grant, back=True):
            for device in grant.device_ids:
                other = bench.ready_for.pop(physical(device), grant.allocation)
                if other != grant.allocation and not bench.is_hidden(device):
                    bench.violations.append(f"{device} was taken back from {grant.allocation}, but it was {other}'s")

    async def in_use(self, grant: Grant) -> str | None:
        await self.benches[grant.worker.host].take_time()
        return None
