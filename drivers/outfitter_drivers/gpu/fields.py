"""The fields that the `gpu` driver asks nvidia-smi for, and which of them this machine's nvidia-smi knows.

An nvidia-smi that does not know one field answers with an error, and no row. It is then asked without that field.
"""

from __future__ import annotations

import os
import re
import shutil
import time

import anyio.to_thread

INDEX = ("index",)
BASE = (*INDEX, "uuid", "memory.total", "pci.bus_id", "name")
"""What every nvidia-smi of the last ten years knows."""
RECOVERY_ACTION = "gpu_recovery_action"
MIG_MODE = "mig.mode.current"
NEWER = (RECOVERY_ACTION, MIG_MODE)
"""What only newer ones know. They come after the name, which may contain a comma."""
FIELDS: tuple[str, ...] = (*BASE, *NEWER)

ERROR = re.compile(
    r"\[(?:Unknown Error|Timeout|GPU [^\[\]]*)\]|ERR!|\A(?:Unknown Error|Timeout|GPU (?:is lost|requires reset))\Z",
    re.IGNORECASE,
)
"""What a field has instead of a value if the GPU is ill. Linear cost, because its input is foreign."""
UNSAID = re.compile(r"\[.*\]|N/A", re.IGNORECASE)
"""What a field has where there is no value."""

ASK_ANEW_S = 600.0
"""Seconds after which nvidia-smi is asked again for a field that it did not know."""
_REFUSED = re.compile(r'"?([\w.]*)"? is not a valid field', re.IGNORECASE)
_MODE = re.compile(r"Enabled|Disabled|", re.IGNORECASE)


class KnownFields:
    """The fields that this machine's nvidia-smi knows, as far as it was asked. Another program in its place, as after a
    driver's upgrade, is asked for all of them again, and every program after `ASK_ANEW_S`."""

    def __init__(self) -> None:
        self._known = FIELDS
        self._program: object = None
        self._anew_at = 0.0

    async def current(self) -> tuple[str, ...]:
        """The fields to ask for."""
        program = await anyio.to_thread.run_sync(_program, abandon_on_cancel=True)
        if program != self._program or time.monotonic() >= self._anew_at:
            self._program, self._known = program, FIELDS
        return self._known

    def keep(self, fields: tuple[str, ...]) -> None:
        """Ask for these only from now on."""
        if fields != self._known:
            self._anew_at = time.monotonic() + ASK_ANEW_S
        self._known = fields


def refuses(printed: str) -> bool:
    """Whether nvidia-smi says that it does not know a field."""
    return _REFUSED.search(printed) is not None or any(field in printed for field in NEWER)


def without_refused(fields: tuple[str, ...], printed: str) -> tuple[str, ...]:
    """The fields to ask for after an answer without any GPU: without those newer ones that nvidia-smi names, else
    without all newer ones, and at last the index alone, as Flink's own script does."""
    newer = [field for field in fields if field in NEWER]
    named = [field for field in newer if field in printed] or newer
    if not newer or any(match[1] in BASE for match in _REFUSED.finditer(printed)):
        return INDEX
    return tuple(field for field in fields if field not in named)


def row_values(line: str, fields: tuple[str, ...]) -> dict[str, str]:
    """The values in a row, by field. A row may have fewer than were asked for."""
    words = [word.strip() for word in line.split(",", len(BASE) - 1)]
    newer = [field for field in fields if field in NEWER]
    told: dict[str, str] = {}
    if newer and len(words) == len(BASE):
        name, *last = (word.strip() for word in words[-1].rsplit(",", len(newer)))
        if len(last) == len(newer) and (newer[-1] != MIG_MODE or _is_mode(last[-1])):
            told = dict(zip(newer, last, strict=True))
            words[-1] = name
    return dict(zip(BASE, words, strict=False)) | told


def _is_mode(value: str) -> bool:
    return any(pattern.fullmatch(value) for pattern in (_MODE, UNSAID)) or ERROR.search(value) is not None


def _program() -> tuple[str, int, int, int] | None:
    """What tells one nvidia-smi from another."""
    path = shutil.which("nvidia-smi")
    if path is None:
        return None
    try:
        status = os.stat(path)  # noqa: PTH116
    except OSError:
        return None
    return path, status.st_ino, status.st_mtime_ns, status.st_size
