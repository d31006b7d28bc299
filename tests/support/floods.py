"""Packed floods of messages that cost their sender little: each is well-formed, and says nearly the same as others.

`FLOODS` has by name how many messages there are, and what the n-th one says. Texts that look random are the same in
each run.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from support.managers.in_process import deregister, heartbeat, register

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
_random = random.Random(1)


def _text(length: int) -> str:
    return "".join(_random.choices(_LETTERS, k=length))


LABELS = [_text(3900) for _ in range(9)]
"""Together more than gzip's window."""
NAMES = [_text(120) for _ in range(300)]
OPERATORS = [{_text(200): {} for _ in range(19)} for _ in range(9)]
SHORT = [_text(200) for _ in range(170)]
OWNER = {"pid": 7, "start_ticks": 1, "pid_ns": 4026531836, "boot_id": "0197a1b2-0000-7000-8000-000000000000"}


def compact(body: dict[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


def run(n: int, workers: int = 500, **fields: Any) -> dict[str, Any]:
    """Another run of one of so many workers."""
    return register(f"w{n % workers}", f"{n}", resources={}, **fields)


def pair(n: int) -> dict[str, Any]:
    """A new worker registers, and then it deregisters."""
    if n % 2:
        return deregister(f"w{n // 2}")
    return register(f"w{n // 2}", resources={}, lease_s=None)


def _interleaved(n: int, labels: list[str], workers: int) -> dict[str, Any]:
    """Workers register in the order of their labels, and end in turn, so that no label comes again soon."""
    each = workers // len(labels)
    if n < workers:
        return register(f"w{n}", resources={}, lease_s=None, labels={"l": labels[n // each % len(labels)]})
    n -= workers
    return deregister(f"w{n % len(labels) * each + n // len(labels)}")


FLOODS: dict[str, tuple[int, Callable[[int], dict[str, Any]]]] = {
    "new workers": (3000, lambda n: register(f"w{n}", resources={})),
    "new workers, and their ends": (3000, pair),
    "runs of many workers": (3000, run),
    "runs of one worker": (3000, lambda n: register("w", f"{n}", resources={})),
    "runs of one worker that wait": (3000, lambda n: register("w", f"{n}", gpu=2)),
    "runs that fail": (3000, lambda n: register("w", f"{n}", gpu=9)),
    "deregistrations of unseen runs": (3000, lambda n: deregister(f"w{n}")),
    "heartbeats of nobody": (3000, lambda n: heartbeat(f"w{n}")),
    "heartbeats from the future": (3000, lambda n: heartbeat(f"w{n % 50}", "2999-12-31T23:59:59Z")),
    "one long label": (1000, lambda n: run(n, labels={"l": LABELS[0]})),
    "long labels in turn": (1000, lambda n: run(n, labels={"l": LABELS[n % 9]})),
    "many labels": (3000, lambda n: run(n, labels={f"label-{each}": "the same value " * 2 for each in range(20)})),
    "long labels, and their ends in turn": (3000, lambda n: _interleaved(n, LABELS, 1530)),
    "short labels, and their ends in turn": (3400, lambda n: _interleaved(n, SHORT, 1700)),
    "operators": (1000, lambda n: run(n, operators={f"operator-{each}": {} for each in range(100)})),
    "operators' names in turn": (1000, lambda n: run(n, operators=OPERATORS[n % 9])),
    "workers' names in turn": (3000, lambda n: register(NAMES[n % 300], f"{n}", resources={})),
    "incarnations in turn": (3000, lambda n: register(f"w{n}", NAMES[n % 300], resources={})),
    "reasons in turn": (3000, lambda n: deregister(f"w{n}") | {"reason": NAMES[n % 300]}),
    "long reasons in turn": (1000, lambda n: deregister(f"w{n}") | {"reason": LABELS[n % 9]}),
    "unknown fields in turn": (3000, lambda n: run(n) | {NAMES[n % 300]: 1}),
    "owners in turn": (3000, lambda n: run(n, owner=OWNER | {"boot_id": NAMES[n % 300][:60]})),
    "what nobody understands, in turn": (1000, lambda n: register("w", f"{n}") | {"resources": LABELS[n % 9]}),
}  # fmt: skip
