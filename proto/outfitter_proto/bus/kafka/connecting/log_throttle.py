"""Limits aiokafka's log lines: while brokers are away, its group coordinator logs up to a hundred a second.

The filter is installed only while the process holds a membership.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

INTERVAL_S = 5.0
"""Each kind of line is logged once in this number of seconds."""
LOGGERS = (
    "aiokafka",
    "aiokafka.conn",
    "aiokafka.consumer.group_coordinator",
    "outfitter_proto.bus.kafka.connecting.connection",
)

_holders = 0


class OncePerInterval(logging.Filter):
    """Passes the first line of each kind (its format string) in `INTERVAL_S` seconds."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        kind = str(record.msg)
        if now - self._last.get(kind, -INTERVAL_S) < INTERVAL_S:
            return False
        self._last[kind] = now
        return True


_filter = OncePerInterval()


def quieten() -> Callable[[], None]:
    """Rate-limit aiokafka's loggers until the returned function is called (more calls do nothing)."""
    global _holders
    _holders += 1
    for name in LOGGERS:
        logging.getLogger(name).addFilter(_filter)
    held = True

    def release() -> None:
        nonlocal held
        global _holders
        if not held:
            return
        held = False
        _holders -= 1
        if _holders == 0:
            for name in LOGGERS:
                logging.getLogger(name).removeFilter(_filter)

    return release
