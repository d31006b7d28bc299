"""Classifies a message of the registrations topic: certainly a registration, certainly none, or in doubt.

The checker does not repeat every rule for every field. For a doubtful field (an amount of 2.5) it requires either an
answer or a dead letter.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outfitter_verify import wire

MAX_BYTES = 64 * 1024
SURELY_SHORT = 1000
"""Characters of requests: the clauses of fewer are surely within their limit of bytes."""


class MessageKind(enum.Enum):
    REGISTER = "register"
    HEARTBEAT = "heartbeat"
    DEREGISTER = "deregister"
    NONE = "none"
    UNSURE = "unsure"


@dataclass(frozen=True, slots=True)
class Classified:
    """A message: its kind, its worker (with host) and allocation if it names them.

    `why`: the reason why it is no message of a worker. `certain`: all fields are certainly valid.
    """

    kind: MessageKind
    allocation: str | None = None
    why: str = ""
    worker: str = ""
    certain: bool = False


def classify(key: bytes | None, value: bytes | None) -> Classified:
    """Classify `value` under `key`."""
    if value is None or len(value) > MAX_BYTES:
        return Classified(MessageKind.NONE, why="no body" if value is None else "too long")
    try:
        body = wire.parse(value, finite=False)  # numbers in unknown fields do not matter
    except wire.DamagedError as error:
        return Classified(MessageKind.NONE, why=str(error))
    if not isinstance(body, dict) or body.get("type") not in ("register", "heartbeat", "deregister"):
        return Classified(MessageKind.NONE, why="unknown type")
    kind = MessageKind(body["type"])
    host, worker, incarnation = body.get("host"), body.get("worker"), body.get("incarnation")
    if not (wire.is_name(host) and wire.is_name(worker)):
        return Classified(MessageKind.NONE, why="host or worker is no name")
    if not wire.is_name(incarnation) and not (kind is MessageKind.DEREGISTER and incarnation is None):
        return Classified(MessageKind.NONE, why="incarnation is no name")
    if key != str(host).encode():
        return Classified(MessageKind.NONE, why="its key is not its host")
    name = f"{host}/{worker}"
    allocation = f"{name}/{incarnation}" if incarnation is not None else None
    if kind is MessageKind.REGISTER:
        certain = _is_certain(body)
        return Classified(
            MessageKind.REGISTER if certain else MessageKind.UNSURE, allocation, worker=name, certain=certain
        )
    return Classified(kind, allocation, worker=name, certain=isinstance(body.get("reason"), str | None))


def _is_certain(body: Mapping[str, Any]) -> bool:
    """Whether every field is certainly valid."""
    priority, labels = body.get("priority", 0), body.get("labels", {})
    owner = body.get("owner")
    return (
        (body.get("resources") is None or _requests(body["resources"]))
        and _operators(body.get("operators"))
        and (body.get("lease_s") is None or _seconds(body["lease_s"], least=1e-6))
        and (body.get("wait_s") is None or _seconds(body["wait_s"], least=0))
        and _whole(priority, -1_000_000, 1_000_000)
        and isinstance(labels, dict)
        and all(isinstance(value, str) for value in labels.values())
        and (owner is None or _owner(owner))
        and (body.get("survivors") is None or _survivors(body["survivors"]))
        and isinstance(body.get("heartbeats", True), bool)
    )  # fmt: skip


def _operators(value: object) -> bool:
    return value is None or (
        isinstance(value, dict) and all(map(wire.is_name, value)) and all(map(_requests, value.values()))
    )


def _requests(value: object) -> bool:
    return isinstance(value, dict) and all(
        wire.is_name(name)
        and isinstance(request, dict)
        and _whole(request.get("amount"), 1, 2**63 - 1)
        and (request.keys().isdisjoint(("where", "same")) or len(str(value)) < SURELY_SHORT)
        and _clauses(request.get("where"))
        and _texts(request.get("same"))
        for name, request in value.items()
    )


def _clauses(value: object) -> bool:
    """Whether `where` is certainly valid."""
    return value is None or (isinstance(value, dict) and all(map(_is_clause, value.values())))


def _is_clause(value: object) -> bool:
    if not isinstance(value, dict):
        return _values(value)
    return all(
        (word in ("is", "not") and _values(said))
        or (word in ("min", "max") and _one(said))
        or (word == "exists" and isinstance(said, bool))
        for word, said in value.items()
    )


def _values(value: object) -> bool:
    return all(map(_one, value)) if isinstance(value, list) else _one(value)


def _one(value: object) -> bool:
    return isinstance(value, str) or _whole(value, -(2**63), 2**63 - 1)


def _texts(value: object) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(one, str) for one in value))


def _owner(value: object) -> bool:
    return (
        isinstance(value, dict)
        and _whole(value.get("pid"), 1, 2**31)
        and _whole(value.get("start_ticks"), 0, 2**62)
        and _whole(value.get("pid_ns"), 0, 2**62)
        and isinstance(value.get("boot_id"), str)
        and (value.get("time_ns") is None or _whole(value["time_ns"], 0, 2**62))
    )


def _survivors(value: object) -> bool:
    return (
        isinstance(value, dict)
        and _whole(value.get("uid"), 0, 2**32 - 1)
        and (value.get("kill_after_s") is None or _seconds(value["kill_after_s"], least=1e-6))
        and (value.get("user_ns") is None or _whole(value["user_ns"], 0, 2**32 - 1))
    )


def _whole(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _seconds(value: object, *, least: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= 366 * 86_400
