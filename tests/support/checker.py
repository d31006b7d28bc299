"""Checks the promises on what was committed, whoever wrote it and however often it died meanwhile.

It knows the wire contract and nothing of the code: plain JSON, the states, who holds when. `read` fetches all four
topics of one partition; `check` walks through every prefix of them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from outfitter_proto.bus import Bus, Message

HOLDING = {"preparing", "allocated", "releasing"}
FINAL = {"ended", "failed"}
STEPS = {
    (None, "pending"), (None, "preparing"), (None, "allocated"), (None, "failed"), (None, "ended"),
    ("pending", "preparing"), ("pending", "allocated"), ("pending", "failed"), ("pending", "ended"),
    ("preparing", "allocated"), ("preparing", "releasing"),
    ("allocated", "releasing"), ("allocated", "ended"),
    ("releasing", "ended"), ("releasing", "failed"), ("failed", "ended"),
}  # fmt: skip
"""The steps that there are, and first records. A failed worker that deregisters is over."""


class Wire(NamedTuple):
    """Everything in one partition of the four topics, in order."""

    registrations: list[Message]
    ledger: list[Message]
    history: list[Message]
    dead_letters: list[Message]


class Report(NamedTuple):
    """What was found. `violations` must be empty; the counts say how much there was to find it in."""

    violations: list[str]
    counts: Counter[str]
    last: dict[str, dict[str, Any]]
    """The last record of every worker's incarnation, by key."""


async def read(bus: Bus, cluster: str = "outfitter", partition: int = 0) -> Wire:
    """All that is committed now. Run it where nothing has been compacted or deleted yet."""
    found = []
    for topic in ("registrations", "allocations", "history", "dead-letters"):
        name = f"{cluster}.{topic}"
        end = await bus.stable_end(name, partition)
        messages: list[Message] = []
        reader = await bus.open_reader(name, partition, start=None, committed=topic != "registrations")
        async with reader:
            while reader.position < end:
                messages += await reader.fetch(max_records=5000, timeout=1.0)
        found.append(messages)
    return Wire(*found)


def check(wire: Wire, host: str) -> Report:
    """Check `host`'s part of it."""
    walk = _Walk(host)
    walk.ledger(wire.ledger)
    walk.history(wire.history)
    walk.answers(wire.registrations, wire.dead_letters)
    return Report(walk.violations, walk.counts, walk.last)


class _Walk:
    def __init__(self, host: str) -> None:
        self.host = host
        self.violations: list[str] = []
        self.counts: Counter[str] = Counter()
        self.last: dict[str, dict[str, Any]] = {}
        self.states: dict[str, list[str]] = {}
        self.position = 0

    def wrong(self, where: str, what: str) -> None:
        self.violations.append(f"{where}: {what}")

    # --- the ledger, record by record ---

    def ledger(self, messages: Sequence[Message]) -> None:
        holder: dict[str, str] = {}
        checkpoint: dict[str, Any] | None = None
        since_checkpoint: list[tuple[str, dict[str, Any]]] = []
        token = 0
        for message in messages:
            key = (message.key or b"").decode()
            where = f"ledger offset {message.offset} ({key})"
            if not key.startswith((f"{self.host}/", f"@host/{self.host}", "@checkpoint/")):
                continue
            if message.value is None:
                self.counts["tombstones"] += 1
                before = self.last.get(key)
                if before is None or before["state"] not in FINAL:
                    self.wrong(where, "a tombstone on a record that is not over")
                continue
            record = json.loads(message.value)
            if record["type"] == "allocation":
                token = self._allocation(where, key, record, holder, token)
                since_checkpoint.append((where, record))
            elif record["type"] == "checkpoint" and record["writer"] == f"host/{self.host}":
                self._checkpoint(where, record, checkpoint, token)
                for place, written in since_checkpoint:
                    if written["commit"] > record["commit"]:
                        self.wrong(place, f"says commit {written['commit']}, its checkpoint {record['commit']}")
                    if written["source"]["offset"] >= record["input"]["to"]:
                        self.wrong(place, f"answers what its checkpoint says is yet to be read: {record['input']}")
                since_checkpoint.clear()
                checkpoint = record
                self.position = record["input"]["to"]
        if since_checkpoint:
            self.wrong(since_checkpoint[0][0], "no checkpoint comes after it: half a commit")

    def _allocation(self, where: str, key: str, record: dict[str, Any], holder: dict[str, str], token: int) -> int:
        self.counts["records"] += 1
        before, state = self.last.get(key), record["state"]
        was = before["state"] if before else None
        if f"{record['host']}/{record['worker']}/{record['incarnation']}" != key:
            self.wrong(where, "the body belongs under another key")
        if was in FINAL and record != before and (was, state) != ("failed", "ended"):
            self.wrong(where, f"changed after its end: {was} to {state}")
        devices = {
            info["id"] for name, infos in record["resources"].items() if name not in record["shared"] for info in infos
        }
        for device in [device for device, held_by in holder.items() if held_by == key]:
            if state not in HOLDING or device not in devices:
                del holder[device]
        if state in HOLDING:
            for device in devices:
                other = holder.setdefault(device, key)
                if other != key:
                    self.wrong(where, f"PROMISE 1: {device} is {other}'s")
            if was not in HOLDING:
                self.counts["grants"] += 1
                given = record["token"] or 0
                if given <= token:
                    self.wrong(where, f"PROMISE 3: token {given} after {token}")
                token = max(token, given)
            elif before and record["token"] != before["token"]:
                self.wrong(where, f"the token of a grant changed from {before['token']} to {record['token']}")
        if state != was:
            self.states.setdefault(key, []).append(state)
            if state in FINAL:
                self.counts["finals"] += 1
        self.last[key] = record
        return token

    def _checkpoint(self, where: str, record: dict[str, Any], before: dict[str, Any] | None, token: int) -> None:
        self.counts["commits"] += 1
        if record["token"] < token:
            self.wrong(where, f"its token {record['token']} is below {token}, which was given")
        if before is None:
            return
        if record["commit"] != before["commit"] + 1:
            self.wrong(where, f"commit {record['commit']} after {before['commit']}")
        if record["token"] < before["token"]:
            self.wrong(where, f"the token went back from {before['token']} to {record['token']}")
        if record["instance"] != before["instance"]:
            self.counts["managers"] += 1
        read, old = record["input"], before["input"]
        if read["topic_id"] == old["topic_id"] and not old["to"] <= read["from"] <= read["to"]:
            self.wrong(where, f"read {read['from']} to {read['to']} after {old['to']}")
        if record["instance"] != before["instance"] and read["from"] != old["to"]:
            self.wrong(where, f"PROMISE 2: began at {read['from']} although {old['to']} was next")

    # --- the history beside it ---

    def history(self, messages: Sequence[Message]) -> None:
        chains: dict[str, list[str]] = {}
        records: dict[str, dict[str, Any]] = {}
        for message in messages:
            step = json.loads(message.value or b"{}")
            if step.get("type") != "transition" or step["host"] != self.host:
                continue
            self.counts["transitions"] += 1
            key = f"{step['host']}/{step['worker']}/{step['incarnation']}"
            where = f"history offset {message.offset} ({key})"
            chain = chains.setdefault(key, [])
            was = chain[-1] if chain else None
            if step["from"] != was:
                self.wrong(where, f"goes from {step['from']}, but the last step led to {was}")
            if step["from"] != step["to"] and (step["from"], step["to"]) not in STEPS:
                self.wrong(where, f"no such step: {step['from']} to {step['to']}")
            chain.append(step["to"])
            records[key] = step["record"]
        for key, states in self.states.items():
            steps = iter(chains.get(key, ()))
            if not all(state in steps for state in states):
                self.wrong(key, f"PROMISE 4: the ledger shows {states}, history {chains.get(key)}")
            elif chains[key][-1] != states[-1] or records[key]["token"] != self.last[key]["token"]:
                self.wrong(key, f"PROMISE 4: the ledger ends in {states[-1]}, history in {chains[key][-1]}")

    # --- what was asked ---

    def answers(self, registrations: Sequence[Message], dead_letters: Sequence[Message]) -> None:
        refused = {(message.key or b"").decode() for message in dead_letters}
        self.counts["dead letters"] = len(refused)
        for message in registrations:
            self.counts["messages"] += 1
            if message.key not in (None, self.host.encode()) or message.offset >= self.position:
                continue
            place = f"{message.topic}/{message.partition}/{message.offset}"
            try:
                said = json.loads(message.value or b"")
                asked = f"{said['host']}/{said['worker']}/{said['incarnation']}" if said["type"] == "register" else None
            except (ValueError, KeyError, TypeError, RecursionError):
                if place not in refused:
                    self.wrong(place, "neither understood nor among the dead letters")
                continue
            if asked is not None:
                self.counts["registrations"] += 1
                if asked not in self.last and place not in refused:
                    self.wrong(place, f"PROMISE 2: {asked} registered and has no record")
