"""A world around the core for property tests: a compacted topic, a batch in the making, drivers, crashes.

It knows nothing of how decisions are made. What it checks it works out from records and reports by brute force.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from datetime import timedelta
from itertools import combinations, product

from outfitter_proto import clauses
from outfitter_proto.clauses import Clauses, chosen
from outfitter_proto.codec import encode
from outfitter_proto.records import (
    FINAL_STATES,
    HOLDING_STATES,
    Allocation,
    AllocationState,
    CordonOrder,
    Deregister,
    Health,
    Heartbeat,
    Host,
    ManagerIdentity,
    Register,
    Source,
    StateRecord,
    Transition,
)
from outfitter_service.core import delays
from outfitter_service.core import model as m
from outfitter_service.core.decide import Decision, Rules, decide, decide_in_full, implied, is_due, renumber
from outfitter_service.core.hosts import host_record
from outfitter_service.core.state.host_state import queue_entry
from outfitter_service.core.state.ledger import (
    DropAllocation,
    DropRecord,
    Ledger,
    PutAllocation,
    PutRecord,
    SetInventory,
    SetScan,
)
from outfitter_service.core.state.sizes import items
from outfitter_service.core.states import GRANTED_STATES
from support.core.core_driver import HOST, START
from support.core.decided import apply, change_all, decision_of, is_committed, touched
from support.core.fingerprint import whole
from support.core.uses import REPLICAS, Pair, Room, Use, may_exclude, uses_of
from support.exclusivity import Held, lent_too_often

ALIASES = {"g0": ("p0",), "g1": ("p1", "x1")}
"""Devices with several names; `p0` is also what another resource calls `g0`."""
WHOLES = {"g0.0": "p0", "g0.1": "g0", "g2.0": "g2"}
"""What devices are parts of, by some name of it."""

MORE = 13
"""Changes of one decision beyond `Rules.chunk`: the event's own, each inventory, and the last of a larger effect."""

_ONE_NAME = {alias: name for name, aliases in ALIASES.items() for alias in aliases}


def one_name(name: str) -> str:
    """A device by one of its names: what is after `~` is how it is called since some restart, which nothing connects
    with how it was called before."""
    name = name.partition("~")[0]
    return _ONE_NAME.get(name, name)


def known(
    name: str,
    health: Health = Health.HEALTHY,
    *,
    used_by: str | None = None,
    untold: str | None = None,
    painted: str = "",
    part_of: str | None = None,
) -> m.KnownDevice:
    """A device. Its colour and its groups follow from its name, unless it is `painted` otherwise."""
    number = int("".join(filter(str.isdigit, one_name(name))) or 0)
    properties = {
        "index": name,
        "colour": painted or ("red", "blue")[number % 2],
        "group": ("a", "a,b", "b,c", "c")[number % 4],
    }
    aliases = ALIASES.get(name, ())
    return m.KnownDevice(
        id=name, properties=properties, aliases=aliases, health=health, used_by=used_by, untold=untold, part_of=part_of
    )


def written(decision: Decision) -> int:
    """The bytes of the records that a decision puts and deletes."""
    size = 0
    for change in decision.changes:
        if isinstance(change, PutAllocation | PutRecord):
            size += len(change.key) + len(encode(change.record)) + 16
        elif isinstance(change, DropAllocation | DropRecord):
            size += len(change.key) + 16
    return size


def held_by(record: Allocation) -> Held:
    """The devices of a live record, each by one name: to itself, with others, and as replicas."""
    if record.state not in HOLDING_STATES:
        return Held()
    halves = {one_name(pool) for pool, use in (record.uses or {}).items() if "replicas" in use.word}
    ids = [info["id"] for name, infos in record.resources.items() if name not in record.shared for info in infos]
    own = [*map(one_name, ids)]
    alone = [name for name in own if name not in halves]
    shared = frozenset(one_name(info["id"]) for name in record.shared for info in record.resources[name])
    assert len({*alone}) == len(alone), f"one device twice in {record.key}: {ids}"
    return Held(frozenset(alone), shared, tuple(name for name in own if name in halves))


def wholes(name: str) -> list[str]:
    """What a device is really a part of, by one name."""
    return [one_name(WHOLES[name])] if name in WHOLES else []


def check_exclusive(records: Iterable[Allocation]) -> None:
    """Promise 1, but for parts."""
    held = {one.key: held_by(one) for one in records if one.state in HOLDING_STATES}
    for (key, mine), (other, its) in combinations(held.items(), 2):
        assert not mine.clash(its), f"{set(mine.clash(its))} are in {key} and in {other}"
    assert not lent_too_often(held.values(), REPLICAS)


def check_operators(record: Allocation) -> None:
    """Each operator has what it named: as many devices of its own, or a view of what is shared."""
    dealt: list[str] = []
    for operator, wanted in (record.request.operators or {}).items():
        share = record.operators[operator]
        for resource, asked in wanted.items():
            if resource in record.unavailable:
                assert resource not in share.resources, f"{operator} of {record.key} has {resource} without a grant"
            elif resource in record.shared:
                assert resource in (share.shared or ()), f"{operator} of {record.key} does not see {resource}"
                assert record.common, f"{record.key} does not say what its operators see"
                assert len(record.common[resource].resources[resource]) >= asked.amount
            else:
                own = share.resources[resource]
                assert len(own) == asked.amount, f"{operator} of {record.key} named {asked.amount} {resource}: {own}"
                assert set(own) <= {info["id"] for info in record.resources[resource]}
                dealt += own
    has = [info["id"] for infos in record.resources.values() for info in infos]
    assert all(dealt.count(each) <= has.count(each) for each in dealt), f"two operators of {record.key} have one device"


def _joined(name: str, groups: Iterable[set[str]]) -> set[str]:
    """All names of a device. `groups`: those that mean one device each."""
    names = {name}
    while more := [group for group in groups if not group.isdisjoint(names) and not group <= names]:
        names.update(*more)
    return names


class World:
    """One manager's core, with what is committed beside what is only decided."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.now = START
        self.offset = 0
        self.ledger = Ledger()
        self.topic: dict[str, Allocation | StateRecord] = {}
        self.orders: dict[str, CordonOrder] = {}
        """The control topic: the last version of each order."""
        self.names_of: dict[tuple[str, str], set[str]] = {}
        """By order and the device that it names, the names that this device had in some commit since then."""
        self.token = 0
        self.waiting: deque[m.Event] = deque()
        self.decided: list[tuple[m.Event, Decision]] = []
        self.commands: list[m.Command] = []
        self.registered: set[str] = set()
        self.answers: dict[str, str] = {}
        self.gone: set[str] = set()
        self.is_deciding = False
        self.known: dict[str, set[Pair]] = {}
        """By holder, what was known to be a part of what at some time since its grant."""
        self.known_before: dict[str, set[Pair]] = {}
        """The same as of the last commit."""
        self.late: set[frozenset[str]] = set()
        """The pairs of holders of a part and its whole, of which nobody knew that when the later one got it."""
        manager = ManagerIdentity(instance="one", version="0", since=START)
        self.ledger.change(PutRecord(Host(host=HOST, manager=manager, since=START)))
        self.commit()

    # --- deciding and committing ---

    def say(self, event: m.Event) -> None:
        """Queue an event and decide all that is queued but for follow-ups: those come with the next commit."""
        self.waiting.append(event)
        while self.waiting:
            self._decide(self.waiting.popleft())

    def message(self, message: Register | Heartbeat | Deregister) -> None:
        self.offset += 1
        if isinstance(message, Register):
            self.registered.add(f"{HOST}/{message.worker}/{message.incarnation}")
        self.say(m.Incoming(message, Source(partition=0, offset=self.offset)))

    def order(self, order: CordonOrder) -> None:
        """An operator's order, which the manager reads at once."""
        self.orders[order.id] = order
        self.say(m.OrderRead(order=order))

    def _decide(self, event: m.Event) -> None:
        self.is_deciding = True
        self._decide_and_check(event)
        self.is_deciding = False

    def _decide_and_check(self, event: m.Event) -> None:
        before = whole(self.ledger)
        decided = decide(self.ledger, self.rules, event, self.now)
        decision = decision_of(decided)
        assert whole(self.ledger) == before, "deciding changed the ledger"
        assert decide(self.ledger, self.rules, event, self.now) == decided, "deciding twice gave two decisions"
        if isinstance(event, m.Incoming):
            assert decide_in_full(self.ledger, self.rules, event, self.now) == decision, (
                "the short way says something else"
            )
        assert len(decision.changes) <= self.rules.chunk + MORE, f"{len(decision.changes)} changes of {event}"
        apply(decided, self.ledger)
        self.decided.append((event, decision))
        assert written(decision) <= self.rules.max_bytes, f"{event} is decided in {written(decision)} bytes"
        self._check_grants(decision)
        check_exclusive(self.ledger.allocations.values())
        self._check_parts()
        host_state = self.ledger.host_state(HOST)
        assert sum(not held_by(one).own for one in host_state.holders.live.values()) <= self.rules.max_live
        unfinished = [one for one in self.ledger.allocations.values() if one.state not in FINAL_STATES]
        assert sum(items(one.request) for one in unfinished) == host_state.items

    def _check_grants(self, decision: Decision) -> None:
        """All or none; and nobody is granted a device that would serve an earlier waiter which could be served."""
        for _, step in decision.history:
            if not isinstance(step, Transition):
                continue
            record = step.record
            if step.from_ not in (None, AllocationState.PENDING) or step.to not in HOLDING_STATES:
                continue
            assert isinstance(record, Allocation)
            for resource, amount in record.request.amounts.items():
                given = len(record.resources[resource])
                assert given >= amount if self.rules.specs[resource].shared else given == amount
            check_operators(record)
            for resource, asked in chosen(record.request).items():
                assert clauses.fault(asked, record.resources.get(resource, [])) is None, f"{record.key}: {asked}"
            out = self.cordoned()
            given_out = [info["id"] for infos in record.resources.values() for info in infos if info["id"] in out]
            assert not given_out, f"{record.key} was given {given_out}, which are cordoned"
            given_unwell = [
                info["id"]
                for name, infos in record.resources.items()
                for info in infos
                if info["id"] in self.unwell(name)
            ]
            assert not given_unwell, f"{record.key} was given {given_unwell}, which were ill just now"
            self._check_users(record, step)
            uses, parts = uses_of(held_by(record)), self.parts()
            for _, _, key in self.ledger.host_state(HOST).waiters.queue:
                waiter = self.ledger.allocations[key]
                if queue_entry(waiter) < queue_entry(record) and self.feasible(waiter):
                    wants = self.wants(waiter)
                    overtaken = {use for use in uses if any(may_exclude(use, other, parts) for other in wants)}
                    assert not overtaken, f"{record.key} overtook {key} at {overtaken}"

    def _check_users(self, record: Allocation, step: Transition) -> None:
        """Nobody is granted what a stranger uses; and history says of which devices nobody could tell."""
        inventories, untold = self.ledger.host_state(HOST).devices.inventories, False
        for resource, infos in record.resources.items():
            ids = {info["id"] for info in infos}
            given = [device for device in inventories[resource].devices if device.id in ids]
            used = [device.id for device in given if device.used_by is not None]
            assert not used, f"{record.key} was given {used}, which strangers use"
            untold |= self.rules.specs[resource].confirms and any(device.untold is not None for device in given)
        assert (step.confirmed is False) == untold, step.explanation

    def _check_parts(self) -> None:
        """Nobody is granted a part of what another has, nor the reverse, unless nobody knew that it is a part; and what
        was known while somebody held it is known still."""
        parts = self.parts()
        live = {key: held_by(one) for key, one in self.ledger.host_state(HOST).holders.live.items()}
        granted = [key for key in live if key not in self.known]
        for key, other in product(granted, live):
            for pair in live[key].beside(live[other], wholes) if key != other else ():
                is_known = pair in parts or pair in self.known.get(other, ())
                assert not is_known, f"{key} and {other} have {pair[1]} and its part {pair[0]}"
                self.late.add(frozenset((key, other)))
        self.known = {key: self.known.get(key, set()) | parts for key in live}
        for key, held in live.items():
            kept = {pair for pair in self.known[key] if not (held.own | held.together).isdisjoint(pair)}
            assert kept <= parts, f"nobody knows any more of {kept - parts}, which {key} has"

    def parts(self) -> set[Pair]:
        """What is known to be a part of what, by one name each: by what drivers report, or the host's record says, or
        that of who has the whole."""
        uses = [use for record in self.ledger.host_state(HOST).holders.live.values() for use in (record.uses or {})]
        kept = [(part, WHOLES[part]) for part in uses if part in WHOLES]
        return {(one_name(part), one_name(whole)) for part, whole in [*self._parts(), *kept]}

    def _parts(self) -> list[tuple[str, str]]:
        host_state = self.ledger.host_state(HOST)
        inventories = host_state.devices.inventories
        recorded = host_state.record.resources if host_state.record is not None else {}
        found = [pair for inventory in inventories.values() for pair in inventory.parts]
        for resource, entry in recorded.items():
            if resource not in inventories or not inventories[resource].reported:
                found += [(part, whole) for whole, parts in (entry.parts or {}).items() for part in parts]
        return found

    def commit(self) -> None:
        """Write what was decided as one ordered batch, look at each prefix of it, and act."""
        change_all(self.ledger, renumber(self.ledger, self.rules, HOST))
        changed = touched(self.ledger)
        changed.sort(key=lambda item: isinstance(item[1], Allocation) and item[1].state in HOLDING_STATES)
        forgotten = {
            change.key
            for _, decision in self.decided
            for change in decision.changes
            if isinstance(change, DropAllocation)
        }
        for key, record in changed:
            if key in forgotten or (record is None and key.startswith("@cordon/")):
                self._write(key, None)
            if record is not None:
                self._write(key, record)
            self._check_prefix()
        fresh = [
            record.token
            for _, record in changed
            if isinstance(record, Allocation) and record.token is not None and record.token > self.token
        ]
        assert len(set(fresh)) == len(fresh)
        assert self.ledger.token >= max([self.token, *fresh])
        self.token = self.ledger.token
        self.ledger.begin_commit()
        self.ledger.end_commit()
        self._note_names()
        self.known_before = {key: set(pairs) for key, pairs in self.known.items()}
        decided, self.decided = self.decided, []
        self.last = decided
        for _, decision in decided:
            self.commands += decision.commands
            self.waiting.extend(decision.follow_ups)

    def _check_prefix(self) -> None:
        """Promise 1 of what is written so far."""
        records = [one for one in self.topic.values() if isinstance(one, Allocation)]
        check_exclusive(records)
        held = {one.key: held_by(one) for one in records if one.state in HOLDING_STATES}
        for (key, mine), (other, its) in combinations(held.items(), 2):
            beside = mine.beside(its, wholes)
            assert not beside or frozenset((key, other)) in self.late, f"{set(beside)} are in {key} and in {other}"

    def _write(self, key: str, record: Allocation | StateRecord | None) -> None:
        old = self.topic.get(key)
        if record is None and key.startswith("@cordon/"):
            self.topic.pop(key, None)
            return
        if record is None:
            assert old is None or (isinstance(old, Allocation) and old.state in FINAL_STATES), f"{key} lost"
            self.topic.pop(key, None)
            self.gone.add(key)
            self.answers.pop(key, None)
            return
        if isinstance(record, Allocation):
            if isinstance(old, Allocation) and old.state in FINAL_STATES:
                assert record.state in FINAL_STATES, f"{key} rose from {old.state} to {record.state}"
            if isinstance(old, Allocation) and old.token is not None:
                assert record.token == old.token, f"{key} was granted twice"
                unsearched = (
                    old.state in GRANTED_STATES and old.request.survivors and old.request.owner and old.resources
                )
                same = (old.request.waits_for_owner, old.request.lease_s)
                now = (record.request.waits_for_owner, record.request.lease_s)
                assert now == same or not old.request.waits_for_owner, f"{key} got a lease that nobody renews"
                assert not (unsearched and record.state in FINAL_STATES), f"nobody looked for survivors of {key}"
            self.gone.discard(key)
        self.topic[key] = record

    def fail_commit(self) -> None:
        """The commit failed: take all back. What led to it is decided again."""
        events = [event for event, _ in self.decided]
        self.decided = []
        self.ledger.rollback()
        self.known = {key: set(pairs) for key, pairs in self.known_before.items()}
        assert self.ledger.allocations == {key: one for key, one in self.topic.items() if isinstance(one, Allocation)}
        assert is_committed(self.ledger)
        assert self.ledger.token == self.token
        self._check_rebuilt()
        self.waiting.extendleft(reversed(events))

    def settle(self) -> None:
        """Commit until nothing follows any more."""
        for _ in range(1000):
            while self.waiting:
                self._decide(self.waiting.popleft())
            self._tick()  # only now: what was decided may have a deadline that is over
            self.commit()
            if not self.waiting:
                self._check_rebuilt()
                assert self.ledger.host_state(HOST).waiters.scan_from is None, "somebody has not been looked at"
                self._check_nothing_stalls()
                self._check_held_back()
                self._check_orders()
                self._check_releases()
                self._check_time()
                self._check_recovery()
                for key in self.registered - self.gone:
                    assert key in self.topic, f"{key} was registered and has no answer"
                return
        raise AssertionError(f"follow-ups do not end: {self.last}")

    def crash(self, rules: Rules | None = None) -> None:
        """All memory is lost, the topic alone says what was; messages that were not decided are read again. `rules`:
        what the manager that comes next is configured with."""
        unread = [event for event, _ in self.decided if isinstance(event, m.Incoming)]
        unread += [event for event in self.waiting if isinstance(event, m.Incoming)]
        self.ledger = self.replayed()
        self.known = {key: set(pairs) for key, pairs in self.known_before.items()}
        self.decided = []
        self.rules = rules or self.rules
        host_state = self.ledger.host_state(HOST)
        keeps = host_state.keeps_names
        if host_state.record is not None and (
            (told := host_record(host_state.record, self.rules, {}, self.now, keeps_names=keeps)) is not None
        ):
            self.ledger.change(PutRecord(told))
        self.commands = [command for one in self.ledger.allocations.values() if (command := implied(one)) is not None]
        orders = [m.OrderRead(order=order) for order in self.orders.values()]
        self.waiting = deque([*orders, m.Reschedule(host=HOST), *unread])

    def replayed(self) -> Ledger:
        """A ledger built from the topic alone, in the topic's order."""
        ledger = Ledger()
        for record in self.topic.values():
            ledger.restore(PutAllocation(record.key, record) if isinstance(record, Allocation) else PutRecord(record))
        ledger.resume(commit=self.ledger.commits, token=self.token)
        assert is_committed(ledger)
        assert touched(ledger) == []
        return ledger

    # --- what must be so ---

    def _check_rebuilt(self) -> None:
        rebuilt = self.replayed()
        for resource, inventory in self.ledger.host_state(HOST).devices.inventories.items():
            rebuilt.restore(SetInventory(HOST, resource, inventory))
        rebuilt.restore(SetScan(HOST, self.ledger.host_state(HOST).waiters.scan_from))
        assert whole(rebuilt) == whole(self.ledger)

    def shows(self, resource: str, *, healthy: bool = True, asked: Clauses = m.NO_CLAUSES) -> set[str]:
        """The devices of a resource, each by one name. `healthy`: only those that could be lent. `asked`: only those
        that meet these clauses."""
        out, sieve = self.cordoned() if healthy else (), clauses.Sieve(asked)
        return {
            one_name(device.id)
            for device in self.ledger.host_state(HOST).devices.inventory(resource).devices
            if ((device.health == Health.HEALTHY and device.id not in out and device.used_by is None) or not healthy)
            and sieve.fault(device.properties) is None
        }

    def unwell(self, resource: str) -> set[str]:
        """The devices of a resource that are ill or were so just now, as the host's record has them."""
        host = self.ledger.host_state(HOST).record
        inventory = host.resources.get(resource) if host is not None else None
        unwell = inventory.unwell or {} if inventory is not None else {}
        return {name for name, lent in unwell.items() if lent is None or lent > self.now}

    def groups(self, resource: str, amount: int, asked: Clauses, *, healthy: bool = True) -> list[set[str]]:
        """The largest sets of devices of which all that a worker gets may be, each device by one name."""
        shown = self.shows(resource, healthy=healthy, asked=asked)
        if not asked.same or amount < 2:
            return [shown]
        named: dict[tuple[object, ...], set[str]] = {}
        for device in self.ledger.host_state(HOST).devices.inventory(resource).devices:
            for values in product(*[clauses.common_values(device.properties, name) for name in asked.same]):
                named.setdefault(values, set()).add(one_name(device.id))
        times = REPLICAS if self.how(resource) == "replica" and self.rules.specs[resource].replicas_same_device else 1
        return [group for each in named.values() if len(group := each & shown) * times >= amount]

    def cordoned(self) -> set[str]:
        """The names of all devices that some order in effect takes out, as far as drivers or the host's record connect
        names."""
        host_state = self.ledger.host_state(HOST)
        inventories = host_state.devices.inventories
        recorded = host_state.record.resources if host_state.record is not None else {}
        groups = [set(names) for inventory in inventories.values() for names in inventory.names]
        for resource, entry in recorded.items():
            if resource not in inventories or not inventories[resource].reported:
                groups += map(set, entry.names or [])
        out: set[str] = set()
        for order, cordon in host_state.cordons.items():
            if cordon.device:
                out |= {cordon.device} | self.names_of.get((order, cordon.device), set())
                continue
            for resource, inventory in inventories.items():
                if not cordon.resource or cordon.resource == resource:
                    out.update(inventory.names_of_all)
            entry = recorded.get(cordon.resource) if cordon.resource else None
            if entry is not None and not host_state.devices.inventory(cordon.resource).reported:
                out.update(device.id for device in entry.devices)
                out.update(entry.known or [])
                out.update(name for names in entry.names or [] for name in names)
        while joined := [names for names in groups if not names.isdisjoint(out) and not names <= out]:
            out.update(*joined)
        related = [(_joined(part, groups), _joined(whole, groups)) for part, whole in self._parts()]
        related += [(whole, part) for part, whole in related]
        return out.union(*[other for one, other in related if not one.isdisjoint(out)])

    def _note_names(self) -> None:
        """Note the names of devices that orders name, as the committed host's record connects them."""
        host_state = self.ledger.host_state(HOST)
        recorded = host_state.record.resources.values() if host_state.record is not None else ()
        groups = [set(names) for entry in recorded for names in entry.names or []]
        named = [(order, cordon.device) for order, cordon in host_state.cordons.items() if cordon.device]
        self.names_of = {each: self.names_of.get(each, set()) | {each[1]} for each in named}
        for names in self.names_of.values():
            while joined := [group for group in groups if not group.isdisjoint(names) and not group <= names]:
                names.update(*joined)

    def _check_orders(self) -> None:
        """At rest each order is in effect while it stands, and the host's devices say so."""
        host_state = self.ledger.host_state(HOST)
        for name, order in self.orders.items():
            # whoever sets the clock back brings back no order whose time was over when it was read
            stands, counts = order.stands(self.now), name in host_state.cordons
            assert counts == stands or (order.until and not counts), f"{order} is not as it should be"
        out = self.cordoned()
        for resource, inventory in host_state.devices.inventories.items():
            marked = {device.id for device in inventory.devices if device.cordon is not None}
            assert marked == {device.id for device in inventory.devices if device.id in out}, resource
            assert marked == set(inventory.cordoned)
            entry = host_state.record.resources.get(resource) if host_state.record is not None else None
            if entry is not None and inventory.reported and len(entry.devices) == len(inventory.devices):
                assert {device.id for device in entry.devices if device.cordon} == marked, resource
                assert (entry.cordoned or 0) == len(marked)

    def how(self, resource: str) -> str:
        """How a worker gets devices of a resource."""
        spec, inventory = self.rules.specs[resource], self.ledger.host_state(HOST).devices.inventory(resource)
        return "shared" if spec.shared else "replica" if inventory.replicas > 1 else "alone"

    def wants(self, record: Allocation) -> list[Use]:
        """The devices that could serve a request, and how."""
        asked = chosen(record.request)
        return [
            Use(name, self.how(resource))
            for resource, amount in record.request.amounts.items()
            for name in sorted(set().union(*self.groups(resource, amount, asked.get(resource, m.NO_CLAUSES))))
        ]

    def can_be_had(
        self, record: Allocation, *, taken: Sequence[Use] = (), wanted: Sequence[Use] = (), healthy: bool = True
    ) -> bool:
        """Whether there are enough devices beside what others have, and what earlier waiters want."""
        amounts, asked = record.request.amounts, chosen(record.request)
        room = Room(self.parts(), taken, wanted, self.rules.specs["half"].replicas_same_device)
        mine: dict[str, list[list[Use]]] = {}
        for resource, amount in amounts.items():
            groups = self.groups(resource, amount, asked.get(resource, m.NO_CLAUSES), healthy=healthy)
            uses = [[Use(name, self.how(resource)) for name in sorted(group)] for group in groups]
            if not self.rules.specs[resource].shared:
                mine[resource] = uses
            elif not any(sum(map(room.has, group)) >= amount for group in uses):
                return False
        own = {resource: amounts[resource] for resource in mine}
        return any(room.fits(dict(zip(mine, picked, strict=True)), own) for picked in product(*mine.values()))

    def is_being_asked(self, record: Allocation) -> bool:
        return any(
            self.ledger.host_state(HOST).devices.inventory(resource).asking for resource in record.request.amounts
        )

    def feasible(self, record: Allocation, *, although_asking: bool = False) -> bool:
        """It could be served with the devices there are, if nobody held or claimed any."""
        for resource, amount in record.request.amounts.items():
            spec = self.rules.specs.get(resource)
            if spec is None:
                return False
            inventory = self.ledger.host_state(HOST).devices.inventory(resource)
            if spec.state != m.SpecState.OK or not inventory.reported or not inventory.serves(amount):
                return False
        return self.can_be_had(record) and (although_asking or not self.is_being_asked(record))

    def _check_nothing_stalls(self) -> None:
        """At rest nobody waits who could be served with what is free and no earlier waiter wants, nor who never can."""
        live = list(self.ledger.allocations.values())
        taken = [use for record in live for use in uses_of(held_by(record))]
        wanted: list[Use] = []
        for _, _, key in self.ledger.host_state(HOST).waiters.queue:
            record = self.ledger.allocations[key]
            self._check_hope(record)
            if not self.feasible(record, although_asking=True):
                continue
            # one whose driver is being asked may keep its place, or may have none yet
            if not self.is_being_asked(record):
                could = self.can_be_had(record, taken=taken, wanted=wanted)
                assert not could, f"{key} could be served and is not: {record.reason}"
            wanted += self.wants(record)

    def is_out_of_sight(self, key: str) -> bool:
        """Whether the devices of a record wait for processes that the manager does not see."""
        record = self.ledger.allocations.get(key)
        return record is not None and delays.is_out_of_sight(record, self.rules.sees)

    def _check_releases(self) -> None:
        """At rest somebody takes devices back, or waits for processes that nobody here sees."""
        asked = {command.allocation for command in self.commands if isinstance(command, m.Unprepare)}
        for key, record in self.ledger.allocations.items():
            if record.state == AllocationState.RELEASING:
                assert key in asked or self.is_out_of_sight(key), f"nobody takes back the devices of {key}"

    def _check_held_back(self) -> None:
        """At rest a device is held back only while somebody holds one that its driver, or no driver, names."""
        inventories = self.ledger.host_state(HOST).devices.inventories
        named = {name: set(inventory.names_of_all) for name, inventory in inventories.items()}
        held = [
            (resource, {info["id"], *(record.aliases or {}).get(info["id"], ())})
            for record in self.ledger.allocations.values()
            if record.state in HOLDING_STATES
            for resource, infos in record.resources.items()
            for info in infos
        ]
        for resource, inventory in inventories.items():
            if inventory.held_back:
                assert any(
                    (
                        names.isdisjoint(named[resource])
                        and (own == resource or not names.isdisjoint(inventory.known or ()))
                    )
                    or all(names.isdisjoint(others) for others in named.values())
                    for own, names in held
                ), f"{resource} is held back for nothing"

    def _check_hope(self, record: Allocation) -> None:
        """A waiter may be served one day: there are the devices, or their drivers have yet to say so; and they are
        enough for its operators."""
        host_state = self.ledger.host_state(HOST)
        for resource, amount in record.request.amounts.items():
            spec = self.rules.specs.get(resource)
            assert spec is not None, f"{record.key} waits for {resource}, which is not configured"
            operators = (record.request.operators or {}).values()
            named = [wanted[resource].amount for wanted in operators if resource in wanted]
            enough = sum(named) <= amount or (spec.shared and max(named) <= amount)
            assert enough, f"{record.key} waits for {amount} {resource}, its operators named {named}"
        for resource, amount in record.request.amounts.items():
            spec, inventory = self.rules.specs[resource], host_state.devices.inventory(resource)
            if spec.on_demand or spec.on_failure != m.OnFailure.FAIL_WORKER:
                return
            if not inventory.reported or not inventory.serves(amount):
                return
        assert self.can_be_had(record, healthy=False), f"{record.key} waits for what there never is"

    def _check_time(self) -> None:
        """Whatever the clock did: nobody waits, or is remembered, for longer than from now on it could be."""
        soon = self.now + timedelta(seconds=2)
        for key, record in self.ledger.allocations.items():
            if record.state in FINAL_STATES:
                age = self.now - record.since
                assert timedelta(seconds=-2) <= age <= timedelta(seconds=self.rules.retention_s + 1), f"{key}: {age}"
            elif record.state == AllocationState.PENDING and record.wait_until is not None:
                wait_s = record.request.wait_s
                assert wait_s is not None
                assert record.wait_until <= soon + timedelta(seconds=wait_s), f"{key} waits too long"
                assert self.now < record.wait_until or self._is_unanswered(record), f"{key} waits too long"

    def _check_recovery(self) -> None:
        """At rest no device that has been well for long enough is kept back. Where the clock was set back, a time may
        be too long until the driver reports again."""
        host_state = self.ledger.host_state(HOST)
        for resource, inventory in host_state.devices.inventories.items():
            ends = [lent for lent in inventory.unwell.values() if lent is not None]
            assert all(self.now < lent for lent in ends), f"{resource}: {ends}"

    def _is_unanswered(self, record: Allocation) -> bool:
        """A driver has yet to answer."""
        host_state = self.ledger.host_state(HOST)
        return self.is_being_asked(record) or any(
            not host_state.devices.inventory(resource).reported
            and host_state.devices.inventory(resource).failure is None
            for resource in record.request.amounts
        )

    def pass_time(self, seconds: float) -> None:
        """One batch has one time: what was decided is committed before."""
        self.commit()
        self.now += timedelta(seconds=seconds)
        self._tick()

    def _tick(self) -> None:
        """What a manager does four times a second."""
        if is_due(self.ledger, self.rules, HOST, self.now):
            self.say(m.Tick(host=HOST))
