"""The service's log on standard error: text in a terminal, JSON otherwise.

Libraries log the same way, so that a JSON log has only JSON. A thread writes the lines, so that a reader that
hangs stops nobody (standard_error.py).
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog

from outfitter_service import standard_error

LONGEST_VALUE = 1000
"""Most characters of one value in a line: it may be text of a worker. A manager's own words, with a command and a few
brokers' addresses, have some 400."""


def _shortened(_logger: object, _method: str, event: dict[str, Any]) -> dict[str, Any]:
    for name, value in event.items():
        if type(value) is str and len(value) > LONGEST_VALUE:
            event[name] = f"{value[:LONGEST_VALUE]}… ({len(value)} characters)"
    return event


LIBRARIES = frozenset({"aiokafka"})
"""Libraries that log each failed attempt, at the level of an error."""


def configure(log_format: str, level: str) -> None:
    """Set up structlog and the standard library's logging. `log_format`: `auto`, `text` or `json`."""
    json = log_format == "json" or (log_format == "auto" and not sys.stderr.isatty())
    threshold = logging.getLevelNamesMapping()[level.upper()]
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        _shortened,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True) if json else structlog.processors.TimeStamper("%H:%M:%S"),
    ]
    renderer: list[Any] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
        if json
        # structlog's own choice, rich, shows the values of variables, and fails where an exception's message does
        else [
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty() and _colours(), exception_formatter=structlog.dev.plain_traceback
            )
        ]
    )
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_Libraries(threshold))
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer]
        )
    )
    standard_error.go_background(lambda count: _loss(handler, count))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(threshold, logging.WARNING))
    logging.getLogger("outfitter").setLevel(threshold)


def _loss(handler: logging.Handler, count: int) -> str:
    """A log line that says how many others were dropped."""
    about = {"name": "outfitter.service", "levelno": logging.WARNING, "levelname": "WARNING"}
    return handler.format(logging.makeLogRecord({**about, "msg": f"{count} log lines were dropped"})) + "\n"


class _Libraries(logging.Filter):
    """Lowers the level of libraries' lines to DEBUG, because they only help to find defects.

    `outfitter.bus` logs the errors that need action.
    """

    def __init__(self, threshold: int) -> None:
        super().__init__()
        self._threshold = threshold

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name.partition(".")[0] in LIBRARIES:
            record.levelno, record.levelname = logging.DEBUG, "DEBUG"
            return self._threshold <= logging.DEBUG
        return True


def _colours() -> bool:
    import os

    return not os.environ.get("NO_COLOR")
