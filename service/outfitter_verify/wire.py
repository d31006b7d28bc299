"""The checker's own implementation of the wire contract (JSON), written from its documentation alone: proto/README.md.

It duplicates the manager's code on purpose, so that both cannot share a mistake.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple, NoReturn

HOLDING = frozenset({"preparing", "allocated", "releasing"})
FINAL = frozenset({"ended", "failed"})
STATES = HOLDING | FINAL | {"pending"}

STEPS = frozenset({
    (None, "pending"), (None, "preparing"), (None, "allocated"), (None, "failed"), (None, "ended"),
    ("pending", "preparing"), ("pending", "allocated"), ("pending", "failed"), ("pending", "ended"),
    ("preparing", "allocated"), ("preparing", "releasing"),
    ("allocated", "releasing"), ("allocated", "ended"),
    ("releasing", "ended"), ("releasing", "failed"),
})  # fmt: skip
"""Single steps, as in history."""

LEAPS = STEPS | {
    (None, "releasing"), ("pending", "releasing"), ("preparing", "ended"), ("preparing", "failed"),
}  # fmt: skip
"""State changes in the ledger from one commit to the next: it has only the last of a commit's steps."""

UNSEEN = -1
"""`source.offset` of an allocation whose deregistration came before its registration."""

_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
"""JSON's notation of half a character (a lone surrogate)."""
_INTEGERS = range(-(2**63), 2**63)
LONGEST_INTEGER = 4300
"""Digits of a number that Python reads as an integer (`sys.set_int_max_str_digits`)."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
_MASK = 0xFFFFFFFF


class DamagedError(ValueError):
    """The bytes violate the contract; the message says why."""


def is_name(value: object) -> bool:
    """Whether `value` may name a host, worker, incarnation, operator or resource."""
    return isinstance(value, str) and _NAME.fullmatch(value) is not None


def partition_of(host: str, partitions: int) -> int:
    """Java's default partition of a key: `toPositive(murmur2(UTF-8 bytes)) % partitions`; murmur2 as published, with
    Kafka's seed."""
    data = host.encode()
    h = 0x9747B28C ^ len(data)
    for word in range(len(data) // 4):
        k = int.from_bytes(data[4 * word : 4 * word + 4], "little") * 0x5BD1E995 & _MASK
        h = (h * 0x5BD1E995 & _MASK) ^ ((k ^ (k >> 24)) * 0x5BD1E995 & _MASK)
    rest = data[len(data) // 4 * 4 :]
    if rest:
        h = (h ^ int.from_bytes(rest, "little")) * 0x5BD1E995 & _MASK
    h = (h ^ (h >> 13)) * 0x5BD1E995 & _MASK
    return ((h ^ (h >> 15)) & 0x7FFFFFFF) % partitions


def had_place(host: str, partition: int, partitions: int) -> bool:
    """Whether this is the host's partition, or was before partitions were added."""
    return partition >= 0 and any(partition_of(host, count) == partition for count in range(partitions, partition, -1))


def parse(value: bytes, *, finite: bool = True) -> Any:
    """Parse JSON in UTF-8; raises `DamagedError`. `finite` False: a number above the range becomes infinite and is no
    error."""
    number = _finite if finite else float
    try:
        body = json.loads(value.decode(), parse_constant=_no_constant, parse_float=number, parse_int=_integer)
        if _HALF.search(value):
            json.dumps(body, ensure_ascii=False).encode()
        return body
    except RecursionError:
        raise DamagedError("it is nested too deeply") from None
    except ValueError as error:
        raise DamagedError(f"it is no JSON: {error}") from None


def _integer(digits: str) -> int:
    """Parse an integer. A longer number is valid JSON, too: its first digits already exceed every limit."""
    return int(digits[:LONGEST_INTEGER])


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:40]} is beyond all numbers")
    return number


class Choice(NamedTuple):
    """Which devices of a resource a worker takes: a clause on each property of `where`, which is a value, a list of
    values, or one of these by each word; and the properties that its devices have in common."""

    where: Mapping[str, Any]
    same: Sequence[str]


@dataclass(frozen=True, slots=True)
class WorkerRequest:
    """A worker's request in its record. `lease_s` None: no lease, or the manager's default. `waits_for_survivors`: its
    devices are free only after the manager has looked for processes that it left behind. `choices`: which devices it
    takes, by resource."""

    amounts: Mapping[str, int]
    choices: Mapping[str, Choice]
    priority: int
    lease_s: float | None
    has_owner: bool
    waits_for_survivors: bool


class Operator(NamedTuple):
    """An operator's request by resource: a number of own devices (`own`: their ids), or a view of shared ones (`sees`).
    Resources without infos are left out."""

    named: Mapping[str, int]
    own: Mapping[str, list[str]]
    sees: frozenset[str]


class PoolUse(NamedTuple):
    """What a record uses of a device's pool. An empty word agrees with any, and two that are joined with none."""

    amount: int
    total: int
    word: str

    def agrees(self, other: PoolUse) -> bool:
        """Whether both words may be in one pool."""
        return not (self.word and other.word) or (self.word == other.word and "+" not in self.word)


@dataclass(frozen=True, slots=True)
class Allocation:
    """An allocation record. `alone`: all names of its exclusive devices. `together`: all names of its shared ones.
    `uses`: what it says of pools, of its own devices under all of their names."""

    key: str
    host: str
    state: str
    token: int | None
    writer: str
    commit: int
    source_partition: int
    source: int
    since_ms: int
    request: WorkerRequest
    reason_code: str | None
    outcome: str | None
    alone: frozenset[str]
    together: frozenset[str]
    uses: Mapping[str, PoolUse]
    operators: Mapping[str, Operator]
    body: Mapping[str, Any]

    @property
    def holds(self) -> bool:
        """Whether it holds its devices. An unknown state is not final, so it does."""
        return self.state in HOLDING or self.state not in STATES


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A commit's checkpoint."""

    key: str
    writer: str
    instance: str
    cluster: str
    scope: str
    commit: int
    token: int
    topic_id: str
    partition: int
    start: int
    to: int
    base: int
    """Added to an offset, it gives `source.offset`."""
    begin: int
    """The first offset that a host's manager answers; earlier ones are the sweeper's."""
    ahead: Mapping[str, int]
    """Hosts whose messages are read to an offset beyond `to`."""
    at_ms: int
    ledger_id: str | None
    """The id of the topic that its ledger is in; None: an earlier version left it out."""
    moved: bool
    """Its records were decided elsewhere: a backup was restored, or version 0.2 added partitions."""
    unseen: int
    """Version 0.2 has sent some messages before this offset to other partitions."""
    grace_ms: int
    """The writer's leases end no sooner than so long after their time."""
    orders: tuple[str, int] | None
    """The id of the topic of orders, and the offset before which all of them are taken; None: none was read."""
    needs: frozenset[str]
    """What a manager must know to work on this ledger."""

    @property
    def reach(self) -> int:
        """The offset after everything that was read, of any host."""
        return max([self.to, *self.ahead.values()])


def allocation(body: Mapping[str, Any]) -> Allocation:
    """Raises `DamagedError` naming the field."""
    alone: set[str] = set()
    together: set[str] = set()
    shared = _names(_get(body, "shared", list, []), "shared")
    aliases = {device: _names(names, f"aliases.{device}") for device, names in _get(body, "aliases", dict, {}).items()}
    for resource, infos in _get(body, "resources", dict, {}).items():
        for info in infos if isinstance(infos, list) else _fail(f"resources.{resource} is no list"):
            device = _get(info if isinstance(info, dict) else {}, "id", str)
            (together if resource in shared else alone).update((device, *aliases.get(device, ())))
    uses = {pool: _pool_use(use, f"uses.{pool}") for pool, use in _get(body, "uses", dict, {}).items()}
    for device, names in aliases.items():
        said = [uses[name] for name in (device, *names) if name in uses]
        uses.update(dict.fromkeys((device, *names), said[0]) if said else {})
    host, worker, incarnation = (_get(body, name, str) for name in ("host", "worker", "incarnation"))
    source = _get(body, "source", dict)
    return Allocation(
        key=f"{host}/{worker}/{incarnation}",
        host=host,
        state=_get(body, "state", str),
        token=_get(body, "token", int, None),
        writer=_get(body, "writer", str),
        commit=_get(body, "commit", int),
        source_partition=_get(source, "partition", int),
        source=_get(source, "offset", int),
        since_ms=_milliseconds(body, "since"),
        request=_request(_get(body, "request", dict)),
        reason_code=_get(body, "reason_code", str, None),
        outcome=_get(body, "outcome", str, None),
        alone=frozenset(alone),
        together=frozenset(together),
        uses=uses,
        operators=_operators(body, shared),
        body=body,
    )


def _pool_use(value: object, where: str) -> PoolUse:
    match value:
        case [int(amount), int(total), str(word)] if 0 < amount <= total:
            return PoolUse(amount, total, word)
        case [int(amount), int(total)] if 0 < amount <= total:
            return PoolUse(amount, total, "")
    return _fail(f"{where} is {value!r}")


def _operators(body: Mapping[str, Any], shared: list[str]) -> dict[str, Operator]:
    missing, shares = _get(body, "unavailable", dict, {}), _get(body, "operators", dict, {})
    operators: dict[str, Operator] = {}
    requests = _get(_get(body, "request", dict), "operators", dict, {})
    for name in requests:
        request, share = _get(requests, name, dict), _get(shares, name, dict, {})
        named = {resource: _get(_get(request, resource, dict), "amount", int) for resource in request}
        devices = _get(share, "resources", dict, {})
        own = {resource: _names(ids, f"operators.{name}.{resource}") for resource, ids in devices.items()}
        operators[name] = Operator(
            named={resource: amount for resource, amount in named.items() if resource not in missing},
            own={resource: ids for resource, ids in own.items() if resource not in shared},
            # records of earlier versions list shared devices in each share
            sees=frozenset(shared).intersection((*own, *_names(_get(share, "shared", list, []), f"operators.{name}"))),
        )
    return operators


def _request(body: Mapping[str, Any]) -> WorkerRequest:
    amounts, choices = _get(body, "amounts", dict, {}), _get(body, "choices", dict, {})
    lease_s = None if body.get("lease_s") is None else _seconds(body, "lease_s")
    has_owner = _get(body, "owner", dict, None) is not None
    return WorkerRequest(
        amounts={name: _get(amounts, name, int) for name in amounts},
        choices={name: _choice(choice, f"request.choices.{name}") for name, choice in choices.items()},
        priority=_get(body, "priority", int, 0),
        lease_s=lease_s,
        has_owner=has_owner,
        waits_for_survivors=has_owner and _get(body, "survivors", dict, None) is not None,
    )


def _choice(body: object, where: str) -> Choice:
    if not isinstance(body, dict):
        _fail(f"{where} is {body!r}")
    clauses = _get(body, "where", dict, {})
    for name, clause in clauses.items():
        for value in clause.values() if isinstance(clause, dict) else [clause]:
            values = value if isinstance(value, list) else [value]
            if not all(isinstance(one, str | int | float) for one in values):
                _fail(f"{where}.where.{name} is {clause!r}")
    return Choice(clauses, _names(_get(body, "same", list, []), f"{where}.same"))


@dataclass(frozen=True, slots=True)
class HostInventory:
    """One resource in a host's record: its listed devices, whether each is healthy (`whole`: the list is complete), and
    the names of each device (`names_left_out`: not of all, in records of version 0.2). `cordoned`: the listed devices
    that an order takes out. `used`: those that a process uses to which they were not lent. `parts`: pairs of a part and
    its whole. `replicas`: to how many workers each device is lent at once."""

    state: str
    healthy: Mapping[str, bool]
    properties: Mapping[str, Mapping[str, Any]]
    cordoned: frozenset[str]
    used: frozenset[str]
    whole: bool
    exclusive: bool
    on_demand: bool
    connected: tuple[frozenset[str], ...]
    parts: tuple[tuple[str, str], ...]
    replicas: int
    names_left_out: bool

    def names(self, device: str) -> frozenset[str]:
        """All names of a device in this resource."""
        return frozenset({device}).union(*(names for names in self.connected if device in names))


def inventories(body: Mapping[str, Any]) -> dict[str, HostInventory]:
    """The resources in a host's record; raises `DamagedError`."""
    return {
        name: _inventory(resource, f"resources.{name}") for name, resource in _get(body, "resources", dict, {}).items()
    }


def _inventory(body: object, where: str) -> HostInventory:
    if not isinstance(body, dict):
        _fail(f"{where} is {body!r}")
    healthy: dict[str, bool] = {}
    properties: dict[str, Mapping[str, Any]] = {}
    cordoned: set[str] = set()
    used: set[str] = set()
    for item in _get(body, "devices", list, []):
        device = item if isinstance(item, dict) else {}
        healthy[_get(device, "id", str)] = _get(device, "health", str, "healthy") == "healthy"
        properties[device["id"]] = _get(device, "properties", dict, {})
        if _get(device, "cordon", str, None) is not None:
            cordoned.add(device["id"])
        if _get(device, "used_by", str, None) is not None:
            used.add(device["id"])
    connected = [frozenset(_names(names, f"{where}.names")) for names in _get(body, "names", list, [])]
    return HostInventory(
        state=_get(body, "state", str),
        healthy=healthy,
        properties=properties,
        cordoned=frozenset(cordoned),
        used=frozenset(used),
        whole=_get(body, "total", int, len(healthy)) <= len(healthy),
        exclusive=_get(body, "sharing", str, "exclusive") != "shared",
        on_demand=body.get("on_demand") is True,
        connected=tuple(connected),
        parts=tuple(
            [
                (part, whole)
                for whole, parts in _get(body, "parts", dict, {}).items()
                for part in _names(parts, f"{where}.parts.{whole}")
            ]
        ),
        replicas=_get(body, "replicas", int, 1),
        names_left_out=_get(body, "names_left_out", int, 0) > 0,
    )


def devices(body: Mapping[str, Any]) -> dict[str, list[str]]:
    """The ids of an allocation's devices by resource."""
    return {name: [info["id"] for info in infos] for name, infos in (body.get("resources") or {}).items()}


def checkpoint(body: Mapping[str, Any]) -> Checkpoint:
    """Raises `DamagedError` naming the field."""
    read = _get(body, "input", dict)
    ahead = _get(read, "ahead", dict, {})
    writer = _get(body, "writer", str)
    return Checkpoint(
        key=f"@checkpoint/{writer}",
        writer=writer,
        instance=_get(body, "instance", str),
        cluster=_get(body, "cluster", str),
        scope=_get(body, "scope", str),
        commit=_get(body, "commit", int),
        token=_get(body, "token", int),
        topic_id=_get(read, "topic_id", str),
        partition=_get(read, "partition", int),
        start=_get(read, "from", int),
        to=_get(read, "to", int),
        base=_get(read, "base", int, 0),
        begin=_get(read, "begin", int, 0),
        ahead={host: _get(ahead, host, int) for host in ahead},
        at_ms=_milliseconds(body, "at"),
        ledger_id=_get(body, "ledger_id", str, None),
        moved=body.get("partitions") == 0,
        unseen=_get(_get(body, "grown", dict, {}), "until", int, 0),
        grace_ms=round(_seconds(body, "lease_grace_s") * 1000),
        orders=_orders_position(body),
        needs=frozenset(_names(_get(body, "needs", list, []), "needs")),
    )


def _orders_position(body: Mapping[str, Any]) -> tuple[str, int] | None:
    orders = _get(body, "orders", dict, None)
    return None if orders is None else (_get(orders, "topic_id", str), _get(orders, "to", int))


class Cordon(NamedTuple):
    """An order that is in effect, in the ledger. `device` and `resource` None: it applies to all."""

    host: str
    order: str
    resource: str | None
    device: str | None
    until_ms: int | None
    """When it ends by itself, in milliseconds since the epoch; None: it does not."""

    @property
    def key(self) -> str:
        return f"@cordon/{self.host}/{self.order}"


class CordonOrder(NamedTuple):
    """One version of an operator's order: what it takes out, and whether somebody has ended it."""

    cordon: Cordon
    ended: bool

    def stands(self, at_ms: int) -> bool:
        """Whether it has not ended at this time, in milliseconds since the epoch."""
        until_ms = self.cordon.until_ms
        return not self.ended and (until_ms is None or at_ms < until_ms)


def cordon(body: Mapping[str, Any]) -> Cordon:
    """Raises `DamagedError` naming the field."""
    return _cordon(body, "order")


def cordon_order(body: Mapping[str, Any], key: str) -> CordonOrder:
    """A record of the topic of orders; raises `DamagedError` for one that managers do not understand."""
    if _get(body, "type", str) != "cordon-order":
        _fail(f"a record of type {body['type']!r}")
    order = CordonOrder(_cordon(body, "id"), body.get("ended_at") is not None)
    for name in ("host", "id"):
        if not is_name(body[name]):
            _fail(f"its field {name!r} is {body[name]!r}")
    if key != body["id"]:
        _fail(f"its body belongs under the key {body['id']!r}")
    for name in ("author", "reason"):
        _get(body, name, str)
    _get(body, "ended_by", str, None)
    for name in ("at", *(("ended_at",) if order.ended else ())):
        _milliseconds(body, name)
    return order


def _cordon(body: Mapping[str, Any], order: str) -> Cordon:
    return Cordon(
        host=_get(body, "host", str),
        order=_get(body, order, str),
        # an empty name is none
        resource=_get(body, "resource", str, None) or None,
        device=_get(body, "device", str, None) or None,
        until_ms=None if body.get("until") is None else _milliseconds(body, "until"),
    )


_NEEDED = object()
"""The default of a field that must be there."""


def _get(body: Mapping[str, Any], name: str, kind: type | tuple[type, ...], default: Any = _NEEDED) -> Any:
    value = body.get(name)
    if value is None and default is not _NEEDED:
        return default
    if not isinstance(value, kind) or isinstance(value, bool):
        _fail(f"its field {name!r} is {value!r}")
    if kind is int and value not in _INTEGERS:
        _fail(f"its field {name!r} is a number with more than 64 bits")
    return value


def _seconds(body: Mapping[str, Any], name: str) -> float:
    """A time span; 0 if there is none."""
    value = body.get(name)
    if value is None:
        return 0
    if type(value) not in (int, float) or not 0 <= value < _INTEGERS.stop:
        _fail(f"its {name} is {value!r}")
    return float(value)


def _names(value: object, where: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        _fail(f"{where} has {value!r}")
    return value


def _milliseconds(body: Mapping[str, Any], name: str) -> int:
    """The time in a field, in milliseconds since the epoch."""
    time = _get(body, name, str)
    try:
        return round(datetime.fromisoformat(time).timestamp() * 1000)
    except (ValueError, OverflowError):
        _fail(f"its field {name!r} is {time!r}, which is no time")


def _fail(what: str) -> NoReturn:
    raise DamagedError(what)


def fingerprint(body: Mapping[str, Any]) -> bytes:
    """A digest of the fields that change only with a step.

    Other fields may change without one: a waiter's reason and queue position, or the properties and further names of a
    holder's devices.
    """
    state = body.get("state")
    steady = dict(body)
    if state not in FINAL:
        for name in ("queue_position", "reason", "reason_code"):
            steady.pop(name, None)
    if state == "pending":
        for name in ("request", "unavailable"):
            steady.pop(name, None)
    elif state in HOLDING:
        steady.pop("aliases", None)
        steady["resources"] = devices(body)
    return digest(steady)


_GRANTED = ("resources", "operators", "env", "cdi", "unavailable", "aliases", "common")
"""A record's fields about its grant."""
_SHARES = ("operators", "common")
"""Those of its operators."""
_SAID = ("resources", "operators", "labels", "choices")
"""The fields of a record's request that a manager leaves out where the topics take less by now."""


def is_set_back(after: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Whether `after` equals `before` except for an earlier start.

    A manager whose clock was set back corrects a start in the future. A final record may lose then what was too large
    to be written again: what its registration said with its operators' shares, its devices, the end of its reason.
    """
    try:
        if datetime.fromisoformat(after["since"]) >= datetime.fromisoformat(before["since"]):
            return False
    except (KeyError, TypeError, ValueError):
        return False
    changeable = ["since", "wait_until", "writer", "commit"]
    if after.get("state") in FINAL:
        before = {**before, **_shortened(after, before)}
        if not any(after.get(name) for name in _GRANTED):
            changeable += [*_GRANTED, *(name for name in ("warnings", "delayed_by") if not after.get(name))]
        elif not any(after.get(name) for name in _SHARES):
            changeable += _SHARES
    return fingerprint({**before, **{name: after.get(name) for name in changeable}}) == fingerprint(after)


def _shortened(after: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `before` that `after` has only in part, as they are there."""
    fields: dict[str, Any] = {}
    request, reason = after.get("request"), after.get("reason")
    if isinstance(request, dict) and not any(request.get(name) for name in _SAID):
        fields["request"] = {
            **(before.get("request") or {}),
            **{name: request[name] for name in _SAID if name in request},
        }
    if reason and str(before.get("reason")).startswith(str(reason)):
        fields["reason"] = reason
    return fields


def digest(body: Mapping[str, Any]) -> bytes:
    """A digest that ignores the order of fields, and fields that are null."""
    try:
        text = json.dumps({name: value for name, value in body.items() if value is not None}, sort_keys=True)
    except RecursionError:
        raise DamagedError("it is nested too deeply") from None
    return hashlib.blake2b(text.encode(), digest_size=12).digest()
