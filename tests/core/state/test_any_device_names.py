"""Names of devices, in any order of reports, grants and restarts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from msgspec import structs

from outfitter_proto.records import HOLDING_STATES, Allocation
from outfitter_service.core import model as m
from outfitter_service.core.state import names_room
from outfitter_service.core.state.device_index import exclusive_ids
from outfitter_service.core.state.device_names import Links
from outfitter_service.core.state.ledger import Ledger, PutAllocation, PutRecord, SetInventory
from support.core.core_driver import HOST, CoreDriver, asks, ill, restarted
from support.core.fingerprint import whole
from support.exclusivity import Held

NAMES = {"d": ("d0", "d1"), "e": ("a0", "b0", "c0")}
"""Two devices by all their names."""

CHANGED = st.sampled_from([None, None, *"abc"])
"""The resource whose configuration has changed when the manager starts again, if any."""

CROWDS = st.sampled_from([(0, 0), (0, 0), (0, 0), (12, 0), (30, 0), (30, 30), (260, 0)])
"""How many more devices a driver reports, and which of them have other names than before: more names than a record has
room for (12: only together with those of another driver), or more devices than it lists."""


def crowded(resource: str, count: int, since: int) -> list[m.KnownDevice]:
    """Ill devices that no other driver reports. The first 30 have long names, by `since`."""
    devices = [ill(f"{resource}-{n}") for n in range(count)]
    names = [f"{since}-{resource}-{n}".ljust(200, "n") for n in range(30)]
    return [structs.replace(one, aliases=(name,)) for one, name in zip(devices, names, strict=False)] + devices[30:]


SHOWN = st.lists(
    st.tuples(st.sampled_from("de"), st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True)), max_size=3
)


def _one(groups: Iterable[Iterable[str]], name: str) -> set[str]:
    """All names of one device."""
    names, sets = {name}, [set(group) for group in groups]
    while more := [group for group in sets if not group.isdisjoint(names) and not group <= names]:
        names.update(*more)
    return names


def _size(names: Iterable[Sequence[str]]) -> int:
    return names_room.size(Links(names=tuple(map(tuple, names))))


class Names(RuleBasedStateMachine):
    """Drivers that name some devices, by some of their names; what they name wrongly is not drawn."""

    @initialize(
        shared=st.sampled_from([None, None, "b"]),
        confirms=st.booleans(),
        chunk=st.integers(1, 3),
        max_bytes=st.sampled_from([800_000, 8_000]),
    )
    def begin(self, shared: str | None, confirms: bool, chunk: int, max_bytes: int) -> None:
        self.specs = {
            name: m.ResourceSpec(name=name, shared=name == shared, confirms=confirms and name == "a") for name in "abc"
        }
        self.bounds = {"chunk": chunk, "max_bytes": max_bytes}
        self.core = CoreDriver(*self.specs.values(), **self.bounds)
        self.unreported = set("abc")
        self.told: dict[str, list[tuple[str, ...]]] = {}
        self.held: dict[str, dict[str, set[str]]] = {}
        self.count = 0

    @rule(
        resource=st.sampled_from("abc"),
        shown=SHOWN,
        crowd=CROWDS,
        crashes=st.sampled_from([False, False, True]),
        changed=CHANGED,
    )
    def report(
        self,
        resource: str,
        shown: list[tuple[str, list[int]]],
        crowd: tuple[int, int],
        crashes: bool,
        changed: str | None,
    ) -> None:
        """Where the manager `crashes`, it has told no holder of the report."""
        spec = self.core.rules.specs.get(resource)
        if spec is None or spec.state != m.SpecState.OK:
            return
        devices = []
        for kind, picked in shown:
            names = [NAMES[kind][n % len(NAMES[kind])] for n in picked]
            names = list(dict.fromkeys(names))
            devices.append(m.KnownDevice(id=names[0], properties={}, aliases=tuple(names[1:])))
        devices = [*crowded(resource, *crowd), *devices]  # what has no room is cut from the end
        self.told[resource] = [(one.id, *one.aliases) for one in devices]
        self.unreported.discard(resource)
        self.learn()
        if crashes:
            self.core.only(m.DriverReport(host=HOST, resource=resource, devices=tuple(devices)))
            self.restart(changed, None)
        else:
            self.core.report(*devices, resource=resource)
        self.look()

    @rule(amounts=st.dictionaries(st.sampled_from("abc"), st.integers(1, 2), min_size=1, max_size=2))
    def register(self, amounts: dict[str, int]) -> None:
        self.count += 1
        self.core.register(f"w{self.count}", resources=asks(**amounts))
        self.look()

    @rule(
        kind=st.sampled_from("de"),
        order=st.permutations("abc"),
        crowd=CROWDS,
        removed=st.booleans(),
        again=st.one_of(st.none(), CROWDS, st.just("as many")),
    )
    def connect_late(
        self, kind: str, order: list[str], crowd: tuple[int, int], removed: bool, again: tuple[int, int] | str | None
    ) -> None:
        """A driver connects two names just before a crash. Later it may name another device, or be gone; of the others
        it may name as many as before."""
        holds, connects, wants = order
        other = "d" if kind == "e" else "e"
        self.report(holds, [(kind, [0])], (0, 0), False, None)
        self.register({holds: 1})
        self.report(connects, [(kind, [0, 1])], crowd, True, connects if removed else None)
        if again is not None:
            self.report(connects, [(other, [0, 1])], again if isinstance(again, tuple) else crowd, False, None)
        self.report(wants, [(kind, [1])], (0, 0), False, None)
        self.register({wants: 1})

    @precondition(lambda self: self.core.ledger.allocations)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(record.worker for record in self.core.ledger.allocations.values())))
        self.core.deregister(worker)
        self.look()

    @precondition(lambda self: any(one.state == "releasing" for one in self.core.ledger.allocations.values()))
    @rule()
    def release(self) -> None:
        for record in list(self.core.ledger.allocations.values()):
            if record.state == "releasing":
                self.core.say(m.Unprepared(allocation=record.key, token=record.token or 0, confirmed=True))
        self.look()

    @rule(changed=CHANGED, state=st.sampled_from([None, m.SpecState.DISABLED]))
    def restart(self, changed: str | None, state: m.SpecState | None) -> None:
        """The manager starts again; a resource may not be configured then, or not be in effect."""
        self.forget_refused()
        specs = {name: spec for name, spec in self.specs.items() if name != changed or state is not None}
        if changed is not None and state is not None:
            specs[changed] = structs.replace(specs[changed], state=state)
        self.core = restarted(self.core, configured=specs.values(), **self.bounds)
        self.unreported = {name for name, spec in specs.items() if spec.state == m.SpecState.OK}
        self.look()

    def recorded(self, resource: str) -> list[tuple[str, ...]]:
        entry = self.core.host_state.record.resources.get(resource)
        return [tuple(group) for group in (entry.names or [])] if entry is not None else []

    def forget_refused(self) -> None:
        """Of a refused report a restart knows what the host's record and the holders' records say."""
        refused = [name for name, inventory in self.core.host_state.devices.inventories.items() if inventory.refused]
        for name in refused:
            self.told[name] = self.recorded(name)
        groups = [group for name in self.core.host_state.record.resources for group in self.recorded(name)]
        for key, held in self.held.items() if refused else ():
            aliases = self.core.ledger.allocations[key].aliases or {}
            for device_id, names in held.items():
                held[device_id] = names & _one([*groups, (device_id, *aliases.get(device_id, ()))], device_id)

    def forget_without_room(self) -> None:
        """Names for which there is no room any more count until a restart, or not before their driver's report."""
        told = [[group for group in groups if len(group) > 1] for groups in self.told.values()]
        if sum(map(_size, told)) > self.room:
            for name in self.told.keys() & self.unreported:
                self.told[name] = self.recorded(name)

    @property
    def room(self) -> int:
        return names_room.most_bytes(self.bounds["max_bytes"])

    def judge_refusals(self) -> None:
        """The record has all names of what is not refused, and nothing is refused that had room."""
        recorded = {name: _size(self.recorded(name)) for name in self.core.host_state.record.resources}
        assert sum(recorded.values()) <= self.room
        for name, inventory in self.core.host_state.devices.inventories.items():
            if not inventory.reported or name not in recorded:
                continue
            if inventory.refused is None:
                assert self.recorded(name) == list(inventory.names)
            else:
                others = sum(size for other, size in recorded.items() if other != name)
                assert _size(inventory.names) + others > self.room, f"{name} is refused for nothing"

    def forget(self) -> None:
        """Nobody holds a device: what a resource said that is not in effect any more counts no longer."""
        specs = self.core.rules.specs
        for name in [*self.told]:
            if name not in specs or specs[name].state != m.SpecState.OK:
                del self.told[name]

    @property
    def groups(self) -> list[tuple[str, ...]]:
        return [group for told in self.told.values() for group in told]

    def learn(self) -> None:
        """What is connected stays so for those who hold it."""
        for held in self.held.values():
            for device_id, names in held.items():
                held[device_id] = {other for name in names for other in _one([*self.groups, names], name)}

    def look(self) -> None:
        live = {key: one for key, one in self.core.ledger.allocations.items() if one.state in HOLDING_STATES}
        self.held = {key: held for key, held in self.held.items() if key in live}
        self.forget_without_room()
        if not self.held:
            self.forget()  # whoever holds a device now has got it since then
        for key in live.keys() - self.held.keys():
            self.held[key] = {one: _one(self.groups, one) for one in self.ids(live[key])}
            for other in self.held.keys() - {key}:
                assert not self.has(live[key]).clash(self.has(live[other])), f"{key} and {other} have one device"
        for key, record in live.items():
            for device_id, names in self.held[key].items():
                known = {device_id, *(record.aliases or {}).get(device_id, ())}
                if self.bounds["max_bytes"] < 100_000:
                    continue  # the record may have no room for them
                assert known >= names, f"{key} knows {device_id} as {known}, and not as {names}"
        self.judge_refusals()
        self.rebuild()

    def has(self, record: Allocation) -> Held:
        """What a record has, by all names of each device."""
        alone, held = exclusive_ids(record), self.held[record.key]
        return Held(
            frozenset[str]().union(*[names for one, names in held.items() if one in alone]),
            frozenset[str]().union(*[names for one, names in held.items() if one not in alone]),
        )

    def rebuild(self) -> None:
        """The indexes are a function of records and reports."""
        rebuilt = Ledger()
        for record in self.core.ledger.allocations.values():
            rebuilt.restore(PutAllocation(record.key, record))
        for resource, inventory in self.core.host_state.devices.inventories.items():
            rebuilt.restore(SetInventory(HOST, resource, inventory))
        rebuilt.restore(PutRecord(self.core.host_state.record))
        rebuilt.resume(commit=self.core.ledger.commits, token=self.core.ledger.token)
        assert whole(rebuilt) == whole(self.core.ledger)

    def ids(self, record: Allocation) -> list[str]:
        return [info["id"] for infos in record.resources.values() for info in infos]


Names.TestCase.settings = settings(
    max_examples=120, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
test_names_in_any_order = Names.TestCase
