"""Streams for the checker, written by hand: commits as they stand on a bus, without any code of the manager.

    world = World()
    world.register("a")
    world.commit(world.allocation("a", "allocated", devices=["GPU-0"]))
    report = world.report()

Each commit appends its history, its dead letters, its ledger batch and a checkpoint, and leaves a marker's hole in each
topic that it wrote to, as Kafka does. Whatever a test wants to be wrong, it changes in what this makes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from outfitter_verify import Control, Log, Partition, Reading, Record, Report, check
from outfitter_verify.wire import partition_of

HOST = "gpu-3"
PARTITIONS = 4
PARTITION = partition_of(HOST, PARTITIONS)
NEIGHBOUR = next(name for name in map("gpu-{}".format, range(4, 99)) if partition_of(name, PARTITIONS) == PARTITION)
"""A host of the same partition."""
TOPIC_ID = "AAAAAAAAAAAAAAAAAAAAAQ"
CONTROL_ID = "OOOOOOOOOOOOOOOOOOOOOQ"
AT = "2026-01-31T12:00:00Z"
AT_MS = 1_769_860_800_000
"""The same, in milliseconds since the epoch. Messages come before it, a millisecond after the other."""
NAMES = {
    "registrations": "registrations",
    "allocations": "allocations",
    "history": "history",
    "letters": "dead-letters",
}


class Stream:
    """One partition of one topic in the making."""

    def __init__(self, topic: str, partition: int = PARTITION) -> None:
        self.topic = f"outfitter.{topic}"
        self.partition = partition
        self.records: list[Record] = []
        self.start = 0
        self.end = 0

    def append(self, key: str | None, value: Any) -> int:
        """Add a record (bytes as they are, None a tombstone, all else as JSON); return its offset."""
        body = value if value is None or isinstance(value, bytes) else json.dumps(value).encode()
        self.records.append(
            Record(self.end, key.encode() if key is not None else None, body, AT_MS - 600_000 + self.end)
        )
        self.end += 1
        return self.end - 1

    def marker(self) -> None:
        self.end += 1

    def body(self, index: int) -> Any:
        return json.loads(self.records[index].value or b"null")

    def change(self, index: int, **fields: Any) -> None:
        """Replace fields of a record's body."""
        record = self.records[index]
        self.records[index] = record._replace(value=json.dumps(self.body(index) | fields).encode())

    def log(self) -> Log:
        return Log(self.topic, self.partition, self.start, self.end, tuple(self.records))


class World:
    """One host's manager, its partition, and everything it has said."""

    def __init__(self, *, markers: bool = True) -> None:
        self.markers = markers
        self.tells = True
        """Whether history is written: it can be switched off."""
        self.registrations = Stream("registrations")
        self.allocations = Stream("allocations")
        self.history = Stream("history")
        self.letters = Stream("dead-letters")
        self.control = Stream("control", 0)
        self.control_id = CONTROL_ID
        self.writer = f"host/{HOST}"
        self.instance = "first"
        self.ledger_id = "L" * 22
        self.commits = 0
        self.token = 0
        self.position = 0
        self.now: dict[str, dict[str, Any]] = {}
        self.hosts: dict[str, dict[str, Any]] = {}
        """The records of the ledger that are no allocations, by their keys."""
        self.needs: set[str] = set()
        self.sources: dict[str, int] = {}

    # --- what workers say ---

    def say(self, value: Any, key: str | None = HOST) -> int:
        return self.registrations.append(key, value)

    def register(self, worker: str, incarnation: str = "1", *, host: str = HOST, **fields: Any) -> int:
        body = {"type": "register", "host": host, "worker": worker, "incarnation": incarnation, **fields}
        offset = self.say(body, key=host)
        self.sources.setdefault(f"{host}/{worker}/{incarnation}", offset)
        return offset

    def deregister(self, worker: str, incarnation: str = "1") -> int:
        return self.say({"type": "deregister", "host": HOST, "worker": worker, "incarnation": incarnation})

    # --- what operators say ---

    def order(self, order: str, *, host: str = HOST, **fields: Any) -> int:
        """A version of an order, of the whole host unless `fields` says a resource or a device."""
        body = {
            "type": "cordon-order", "id": order, "host": host, "author": "ada@ops", "reason": "it is hot", "at": AT,
            "resource": None,
        }  # fmt: skip
        return self.control.append(order, body | fields)

    def end_order(self, order: str, *, host: str = HOST, **fields: Any) -> int:
        """The end of an order."""
        return self.order(order, host=host, ended_at=AT, ended_by="bob@ops", **fields)

    # --- what the manager says ---

    def allocation(
        self,
        worker: str,
        state: str,
        *,
        devices: Iterable[str] | None = None,
        incarnation: str = "1",
        resource: str = "gpu",
        host: str = HOST,
        **fields: Any,
    ) -> dict[str, Any]:
        """The record of a worker that comes next, with what it had before unless it is replaced."""
        key = f"{host}/{worker}/{incarnation}"
        before = self.now.get(key, {})
        record = {
            "type": "allocation", "host": host, "worker": worker, "incarnation": incarnation,
            "request": {"amounts": {resource: 1}, "owner": {"pid": 1}, "lease_s": 30.0}, "resources": {},
            "token": None, "outcome": None,
            "source": {"partition": PARTITION, "offset": self.sources.get(key, -1)},
            **before, "state": state, "since": AT, "writer": self.writer, "commit": self.commits + 1,
        }  # fmt: skip
        if state == "releasing" or (state == "ended" and before.get("state") != "releasing"):
            record["reason_code"] = "prepare-failed" if fields.get("outcome") == "failed" else "owner-died"
        if devices is not None:
            record["resources"] = {resource: [{"id": device} for device in devices]}
            self.token += 1
            record["token"] = self.token
        if "uses" in fields:
            self.needs.add("parts")
        return record | fields

    def host(self, **names: list[list[str]] | None) -> None:
        """The host's record: of each resource, the names that mean one device each."""
        self.inventory(
            {
                name: {
                    "state": "reported",
                    "devices": [{"id": one} for one in DEVICES],
                    **({"names": told} if told else {}),
                }
                for name, told in names.items()
            }
        )

    def inventory(self, resources: Mapping[str, Any], *, host: str = HOST) -> None:
        """The host's record as it is."""
        body = {"type": "host", "host": host, "manager": {}, "since": AT, "resources": resources}
        self.hosts[f"@host/{host}"] = body
        self.allocations.append(f"@host/{host}", body)
        if self.tells:
            put = {"type": "put", "at": AT, "writer": self.writer, "key": f"@host/{host}", "record": body}
            self.history.append(f"@host/{host}", put)

    def cordon(self, order: str, *, host: str = HOST, **fields: Any) -> str:
        """An order in effect, in the next commit. Returns its key."""
        key = f"@cordon/{host}/{order}"
        known = {
            "type": "cordon",
            "host": host,
            "order": order,
            "author": "ada@ops",
            "reason": "it is hot",
            "since": AT,
        }
        body = self.hosts[key] = known | fields
        self.needs.add("orders")
        self.allocations.append(key, body)
        if self.tells:
            self.history.append(key, {"type": "put", "at": AT, "writer": self.writer, "key": key, "record": body})
        return key

    def refuse(self, offset: int, **fields: Any) -> None:
        """A dead letter for the message at `offset`."""
        message = next(record for record in self.registrations.records if record.offset == offset)
        body = message.value or b""
        source = {"topic": self.registrations.topic, "partition": PARTITION, "offset": offset}
        letter = {
            "type": "dead-letter", "at": AT, "writer": self.writer, "source": source, "reason": "odd",
            "length": len(body), "sha256": hashlib.sha256(body).hexdigest(), "body": "",
        }  # fmt: skip
        self.letters.append(f"{self.registrations.topic}/{PARTITION}/{offset}", letter | fields)

    def commit(
        self,
        *records: Mapping[str, Any] | str,
        to: int | None = None,
        ahead: Mapping[str, int] | None = None,
        tell: bool = True,
        **fields: Any,
    ) -> int:
        """One commit of `records` (a key alone: a tombstone), having read to `to`, and further for the hosts `ahead`;
        return its checkpoint's index in the ledger."""
        if self.commits == 0:
            self.host(gpu=None)
            if self.tells:
                self.snapshot()
        self.commits += 1
        position = self.registrations.end if to is None else to
        ordered = sorted(records, key=lambda record: not isinstance(record, str) and record["state"] in HOLDING)
        for record in ordered:
            if isinstance(record, str):
                self.now.pop(record, None)
                self.hosts.pop(record, None)
                self.allocations.append(record, None)
                continue
            key = f"{record['host']}/{record['worker']}/{record['incarnation']}"
            before = self.now.get(key, {}).get("state")
            if tell and self.tells and before != record["state"]:
                self.tell(record, before)
            elif tell and self.tells:
                self.refresh(record)
            self.now[key] = dict(record)
            self.allocations.append(key, record)
        checkpoint = {
            "type": "checkpoint", "writer": self.writer, "instance": self.instance, "cluster": "outfitter",
            "scope": self.writer.partition("/")[0].replace("partition", "cluster"),
            "commit": self.commits, "token": self.token, "at": AT, "format": 1, "ledger_id": self.ledger_id,
            "input": {"topic_id": TOPIC_ID, "partition": PARTITION, "from": self.position, "to": position},
            "orders": {"topic_id": self.control_id, "to": self.control.end},
        }  # fmt: skip
        if self.needs:
            checkpoint |= {"format": 2, "needs": sorted(self.needs)}
        if ahead:
            checkpoint["input"]["ahead"] = ahead
        self.position = position
        self.allocations.append(f"@checkpoint/{self.writer}", checkpoint | fields)
        dropped = [record for record in ordered if isinstance(record, str)]
        end = {"type": "commit", "writer": self.writer, "checkpoint": checkpoint | fields, "dropped": dropped}
        if self.tells:
            self.history.append(self.writer, end)
        if self.markers:
            for stream in (self.history, self.letters, self.allocations):
                stream.marker()
        return len(self.allocations.records) - 1

    def tell(self, record: Mapping[str, Any], before: str | None, **fields: Any) -> None:
        """The transition to `record`."""
        named = {name: record[name] for name in ("host", "worker", "incarnation")}
        transition = {
            "type": "transition", "at": AT, **named, "event": "x", "explanation": "x",
            "from": before, "to": record["state"], "record": record,
        }  # fmt: skip
        self.history.append("/".join(named.values()), transition | fields)

    def refresh(self, record: Mapping[str, Any]) -> None:
        """What has changed of a record without a step."""
        named = {name: record[name] for name in ("host", "worker", "incarnation")}
        before = self.now["/".join(named.values())]
        changed = {name: value for name, value in record.items() if before.get(name) != value}
        if changed:
            told = {"type": "refresh", "at": AT, **named, "writer": self.writer, "event": "x", "explanation": "x"}
            self.history.append("/".join(named.values()), told | {"changed": changed})

    def snapshot(self) -> None:
        """A snapshot of all records, which begins with the next commit."""
        told = {"type": "snapshot", "writer": self.writer, "begun": self.commits + 1, "part": 0, "last": True}
        self.history.append(self.writer, told | {"records": self.now | self.hosts})

    def restart(self, instance: str, *, tells: bool) -> None:
        """Another manager takes over, which writes history or does not. History begins with a snapshot again."""
        self.instance, self.tells = instance, tells
        if tells:
            self.snapshot()

    # --- disasters ---

    def begin_anew(self) -> None:
        """All topics but history are lost, and managers begin anew."""
        for stream in (self.registrations, self.allocations, self.letters, self.control):
            stream.records.clear()
            stream.end = 0
        self.control_id = "P" * 22
        self.instance = "first"
        self.commits = self.token = self.position = 0
        self.now.clear()
        self.hosts.clear()
        self.needs.clear()
        self.sources.clear()
        self.ledger_id = "M" * 22

    def restore(self) -> None:
        """The ledger is lost, and restored from a backup of its end."""
        self.allocations.records.clear()
        self.allocations.end = 0
        for key, body in {**self.now, **self.hosts}.items():
            self.allocations.append(key, body)
        self.commits += 2**32
        self.token += 2**32
        self.ledger_id = "backup/2026-01-31"
        tells, self.tells, instance, self.instance = self.tells, False, self.instance, "restore"
        for partitions in (0, PARTITIONS):
            self.commit(to=self.position, partitions=partitions)
        self.ledger_id = "M" * 22
        self.restart(instance, tells=tells)

    # --- what the checker says ---

    def reading(self) -> Reading:
        control = Control(self.control.log(), self.control_id)
        logs = Partition(
            self.registrations.log(), self.allocations.log(), self.history.log(), self.letters.log(), control
        )
        return Reading("outfitter", PARTITIONS, TOPIC_ID, self.markers, [logs])

    def report(self) -> Report:
        return check(self.reading())

    def violated(self) -> set[str]:
        """The checks that found something."""
        return {violation.check for violation in self.report().violations}


HOLDING = {"preparing", "allocated", "releasing"}


def lived_in(world: World | None = None, *, markers: bool = True) -> World:
    """A world in which something of everything has happened, and nothing is wrong."""
    world = world or World(markers=markers)
    world.commit()
    world.register("a")
    operators = {"infer": {"gpu": {"amount": 1}}, "load": {"net": {"amount": 1}, "disk": {"amount": 1}}}
    world.commit(
        world.allocation(
            "a",
            "allocated",
            devices=["GPU-0"],
            request={"amounts": {"gpu": 1, "net": 1}, "operators": operators},
            operators={"infer": {"resources": {"gpu": ["GPU-0"]}}, "load": {"resources": {}, "shared": ["net"]}},
            shared=["net"],
            unavailable={"disk": {"code": "no-driver", "reason": "it has no driver"}},
        )
    )
    world.register("b")
    world.order("o1", device="GPU-20")
    world.order("o2", device="GPU-21", until="2099-01-01T00:00:00Z")
    world.cordon("o1", device="GPU-20")
    world.cordon("o2", device="GPU-21", until="2099-01-01T00:00:00Z")
    world.commit(world.allocation("b", "pending"))
    odd = world.say(b"\x00no json")
    world.refuse(odd)
    world.commit()
    world.deregister("a")
    world.end_order("o1", device="GPU-20")
    ended = world.allocation("a", "ended", reason_code="deregistered")
    world.commit(f"@cordon/{HOST}/o1", ended, world.allocation("b", "allocated", devices=["GPU-0"]))
    world.register("c")
    world.register("d", resources={"gpu": {"amount": 1, "where": {"id": "GPU-1"}}})
    chooses = {"amounts": {"gpu": 1}, "choices": {"gpu": {"where": {"id": "GPU-1"}}}}
    world.commit(
        world.allocation("c", "failed"), world.allocation("d", "preparing", devices=["GPU-1"], request=chooses)
    )
    world.instance = "second"
    world.commit()
    world.commit(world.allocation("d", "releasing", outcome="failed"))
    world.commit(world.allocation("d", "failed"))
    world.commit(f"{HOST}/a/1")
    world.register("e")
    return world


# --- worlds by chance ----------------------------------------------------------------------------------

DEVICES = ("GPU-0", "GPU-1", "GPU-2")


class Player:
    """Plays worker and manager at random and never breaks a promise. `choose(n)` gives a number below n."""

    def __init__(self, world: World, choose: Callable[[int], int]) -> None:
        self.world = world
        self.choose = choose
        self.runs = 0
        self.heard: list[tuple[str, str]] = []
        self.left: list[str] = []
        """The keys that the snapshot under way has not written yet."""
        self.piece: dict[str, Any] = {}
        """The newest piece of the snapshot, with the records under `keys`."""
        self.keys: list[str] = []
        self.orders: dict[str, dict[str, Any]] = {}
        """The newest version of each order that stands."""
        self.ordered = 0
        self.read = 0
        """How far the manager says that it has read orders."""

    def play(self, turns: int) -> World:
        self.world.commit()
        for _ in range(turns):
            for _ in range(self.choose(4)):
                self._say()
            if self.choose(3) == 0:
                self._order()
            self._commit()
        return self.world

    def _say(self) -> None:
        world = self.world
        known = sorted(world.sources)
        match self.choose(6):
            case 0 | 1:
                self.runs += 1
                world.register(f"w{self.runs % 4}", str(self.runs))
            case 2 if known:
                _, worker, incarnation = known[self.choose(len(known))].split("/")
                world.register(worker, incarnation)
            case 3 if known:
                _, worker, incarnation = known[self.choose(len(known))].split("/")
                world.deregister(worker, incarnation)
            case 4:
                world.say({"type": "heartbeat", "host": "gpu-4", "worker": "w", "incarnation": "1"}, "gpu-4")
            case _:
                world.say(b"odd")

    def _order(self) -> None:
        """An operator gives an order, changes it, or ends it."""
        known = sorted(self.orders)
        what = ({"device": DEVICES[0]}, {"device": "zero"}, {"device": DEVICES[1]}, {"resource": "gpu"}, {})
        match self.choose(3):
            case 0 if known:
                order = known[self.choose(len(known))]
                self.world.end_order(order, **self.orders.pop(order))
            case 1 if known:
                self._give(known[self.choose(len(known))], what[self.choose(len(what))])
            case _:
                self.ordered += 1
                self._give(f"k{self.ordered}", what[self.choose(len(what))])

    def _give(self, order: str, what: dict[str, Any]) -> None:
        self.orders[order] = what
        self.world.order(order, **what)

    def _take_orders(self) -> list[str]:
        """Put what stands into the ledger; return the keys of what does not."""
        world = self.world
        known = {key.rpartition("/")[2]: key for key in world.hosts if key.startswith("@cordon/")}
        for order, what in sorted(self.orders.items()):
            before = world.hosts.get(known.get(order, ""), {})
            if order not in known or {name: before[name] for name in ("device", "resource") if name in before} != what:
                world.cordon(order, **what)
        return [key for order, key in known.items() if order not in self.orders]

    def _is_taken_out(self, device: str) -> bool:
        return any(what.get("device") in (None, "zero", device) for what in self.orders.values())

    def _commit(self) -> None:
        """Read on, answer, let something happen, and commit it all."""
        world = self.world
        end = world.position + self.choose(world.registrations.end - world.position + 1)
        self._snapshot()
        # what the manager decided within the commit; the ledger gets the last of each key, history all of it
        changed: dict[str, dict[str, Any]] = {}
        for record in world.registrations.records:
            if world.position <= record.offset < end:
                self._read(record, changed)
        over = [key for key, record in world.now.items() if record["state"] not in (*HOLDING, "pending")]
        gone = [key for key in over if key not in changed and self.choose(4) == 0]
        ended = self._take_orders()
        for key in sorted({**world.now, **changed}):
            if key not in gone and self.choose(3) == 0:
                self._happen(key, changed)
        if self.choose(6) == 0:
            world.instance = f"instance-{world.commits}"
        if self.choose(6) == 0:
            world.host(gpu=[["GPU-0", "zero"]] if self.choose(2) else None)
        for key in gone:
            world.sources.pop(key, None)
        self.read = world.control.end if self.choose(4) else self.read  # what it has read, it may say later
        orders = {"topic_id": world.control_id, "to": self.read}
        world.commit(*gone, *ended, *changed.values(), to=end, tell=False, orders=orders)

    def _snapshot(self) -> None:
        """Write the next piece of a snapshot, which may end or begin here. A later piece may come twice, as the records
        are then."""
        world = self.world
        if not self.left and self.choose(4):
            return
        if not self.left:
            self.left = sorted(world.now | world.hosts)
            self.piece = {"type": "snapshot", "writer": world.writer, "begun": world.commits + 1, "part": -1}
        current = world.now | world.hosts
        if self.piece["part"] < 1 or self.choose(4):
            self.keys, self.left = self.left[:2], self.left[2:]
            self.piece = self.piece | {"part": self.piece["part"] + 1, "last": not self.left}
        self.piece["records"] = {key: current[key] for key in self.keys if key in current}
        world.history.append(world.writer, self.piece)

    def _read(self, record: Record, changed: dict[str, dict[str, Any]]) -> None:
        world = self.world
        if record.value == b"odd":
            world.refuse(record.offset)
            return
        said = json.loads(record.value or b"")
        key = f"{said['host']}/{said['worker']}/{said['incarnation']}"
        known = changed.get(key) or world.now.get(key)
        if said["type"] == "register":
            if known is not None:
                changed.setdefault(key, known)  # published again
            else:
                world.sources[key] = record.offset
                self._become(key, "pending", changed)
        elif said["type"] == "deregister":
            if known is None:
                world.sources[key] = -1
                self._become(key, "ended", changed)
            elif known["state"] in ("pending", "allocated"):
                self._become(key, "ended", changed)
            elif known["state"] == "preparing":
                self._become(key, "releasing", changed, outcome="ended")

    def _happen(self, key: str, changed: dict[str, dict[str, Any]]) -> None:
        record = changed.get(key) or self.world.now[key]
        taken = {
            info["id"]
            for other in {**self.world.now, **changed}.values()
            if other["state"] in HOLDING
            for info in other["resources"].get("gpu", ())
        }
        match record["state"]:
            case "pending":
                free = [device for device in DEVICES if device not in taken and not self._is_taken_out(device)]
                if free and self.choose(3):
                    self._become(key, ("allocated", "preparing")[self.choose(2)], changed, devices=free[:1])
                elif self.choose(2):
                    self._become(key, "failed", changed)
                elif key not in changed:
                    changed[key] = record | {"queue_position": 7, "commit": self.world.commits + 1}
                    self.world.refresh(changed[key])
            case "preparing":
                if self.choose(2):
                    self._become(key, "allocated", changed)
                else:
                    self._become(key, "releasing", changed, outcome="failed")
            case "allocated":
                outcome = "ended"
                if self.choose(2):
                    self._become(key, "releasing", changed, outcome=outcome)
                else:
                    self._become(key, "ended", changed)
            case "releasing":
                self._become(key, record["outcome"], changed)

    def _become(self, key: str, state: str, changed: dict[str, dict[str, Any]], **fields: Any) -> None:
        world = self.world
        _, worker, incarnation = key.split("/")
        before = changed.get(key) or world.now.get(key)
        record = {**(before or {}), **world.allocation(worker, state, incarnation=incarnation, **fields)}
        if before is not None and "devices" not in fields:
            record = {**record, "token": before["token"], "resources": before["resources"], "source": before["source"]}
        world.tell(record, before["state"] if before else None)
        changed[key] = record


def compact(stream: Stream, upto: int, *, drop_tombstones: bool = True) -> None:
    """What a log cleaner leaves of a stream when it has cleaned the offsets below `upto`.

    Kafka's cleans whole record batches, and a commit's records are one: `upto` must be the end of a commit there.
    """
    newest = {record.key: record.offset for record in stream.records if record.offset < upto}
    stream.records = [
        record
        for record in stream.records
        if record.offset >= upto
        or (newest[record.key] == record.offset and not (drop_tombstones and record.value is None))
    ]


def expire(stream: Stream, start: int) -> None:
    """What retention leaves of a stream."""
    stream.start = min(start, stream.end)
    stream.records = [record for record in stream.records if record.offset >= stream.start]
