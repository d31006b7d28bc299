"""The rights that deploy/security.md grants, and principals of a secure broker that have them."""

from __future__ import annotations

import json
import re
import secrets
import shlex
from pathlib import Path
from typing import Any

from confluent_kafka.admin import AclBinding

from outfitter.session.worker_session import WorkerSession
from outfitter_proto import rights
from outfitter_proto.bus import Bus, Right
from outfitter_proto.keys import host_writer, partition_writer
from outfitter_proto.names import managers_group
from outfitter_proto.records import Register, ResourceRequest
from support.bus.committed import committed
from support.documents import ROOT
from support.kafka.secure_broker import SecureBroker, right
from support.managers.secured import HOST

PAGE = ROOT / "deploy" / "security.md"
PAGES_HOST = "gpu-3"


def granted(
    cluster: str = "outfitter", host: str = PAGES_HOST, *, page: Path = PAGE
) -> dict[str, list[tuple[str, str, str, bool]]]:
    """The page's commands, by principal: operation, kind, name of `cluster` and `host`, whether prefixed."""
    found: dict[str, list[tuple[str, str, str, bool]]] = {}
    for line in re.findall(r"^grant (User:.*)$", page.read_text(), re.MULTILINE):
        principal, *words = shlex.split(line)
        options = dict(zip(words[::2], words[1::2], strict=True))
        operation = options.pop("--operation")
        prefixed = options.pop("--resource-pattern-type", "literal") == "prefixed"
        [(kind, name)] = options.items()
        name = name.replace("outfitter", cluster, 1).replace(PAGES_HOST, host)
        found.setdefault(principal.removeprefix("User:"), []).append((operation, kind.lstrip("-"), name, prefixed))
    return found


ROLES = granted()
MANAGER = f"manager-{PAGES_HOST}"
SCOPES = {MANAGER: "host", "manager": "cluster"}


def is_needed(each: tuple[str, str, str, bool]) -> bool:
    """Whether a manager does not start without it."""
    return each[0] != "DescribeConfigs" and "sweeper" not in each[2] and not each[2].endswith((".managers", ".control"))


NEEDED = [each for each in ROLES[MANAGER] if is_needed(each)]


def looked_for(role: str, cluster: str, host: str = HOST) -> list[Right]:
    """What a manager of that role looks for at its start."""
    if SCOPES[role] == "host":
        own = [
            *rights.of_manager(cluster, [host_writer(host)]),
            *rights.of_sweeper(cluster),
            *rights.to_see_sweepers(cluster),
        ]
    else:
        own = rights.of_manager(cluster, [partition_writer(0)], [managers_group(cluster)])
    return [*own, *rights.of_signs_of_life(cluster), *rights.of_orders(cluster)]


def acls(
    broker: SecureBroker, role: str, user: str, cluster: str, leave_out: int | None = None, *, host: str = HOST
) -> list[AclBinding]:
    """Grant `user` what the page grants to `role`, but for one; give what was granted."""
    wanted = granted(cluster, host)[role]
    given = [
        right(f"User:{user}", operation, kind, name, prefixed=prefixed)
        for number, (operation, kind, name, prefixed) in enumerate(wanted)
        if number != leave_out
    ]
    if given:
        broker.allow(*given)
    return given


async def asked(bus: Bus, cluster: str, worker: str = "w") -> WorkerSession:
    """A session of a worker that asks for one device; not entered."""
    body = Register(host=HOST, worker=worker, incarnation="1", resources={"gpu": ResourceRequest(amount=1)})
    return WorkerSession(bus, body, cluster=cluster, manager_patience=None)


def user() -> str:
    return f"u-{secrets.token_hex(4)}"


async def everything(bus: Bus, topic: str) -> list[dict[str, Any]]:
    """All committed values of partition 0, as JSON."""
    return [json.loads(message.value or b"{}") for message in await committed(bus, topic)]
