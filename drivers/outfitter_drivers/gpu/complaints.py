"""What nvidia-smi says beside its rows: of which GPU a line complains, and whether that GPU is lost.

nvidia-smi prints rows and complaints in any order, on both outputs, with any exit code: a worn infoROM is a warning
with exit code 14, one lost GPU of four is exit code 15, and the other GPUs compute on. Standard library only, because
`outfitter-gpu-discovery` must start quickly.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import NamedTuple

BUS_ID = re.compile(r"([0-9A-Fa-f]{4,8}):([0-9A-Fa-f]{2}:[0-9A-Fa-f]{2})(?:\.([0-7]))?")
"""A PCI address, as nvidia-smi and the kernel write it: the kernel leaves out the function."""

_UUID = re.compile(r"\b(?:GPU|MIG)-[0-9A-Za-z-]{1,80}", re.IGNORECASE)
_INDEX = re.compile(r"\b(?:GPU|device)[ #\[]{0,2}([0-9]{1,4})\b(?![:.-]?[0-9A-Fa-f]{2}:)", re.IGNORECASE)
_LOSS = re.compile(
    r"unable to|unknown error|\blost\b|fallen off|off the bus|\breset\b|\breboot\b|\bdrain|timeout|timed out|"
    r"not respond|unavailable|not available|inaccessible|not accessible|\bfail|err!",
    re.IGNORECASE,
)
_WARNING = re.compile(r"\W{0,4}warning\b|.{0,200}\binforom\b", re.IGNORECASE)
_LOSS_IN_WARNING = re.compile(
    r"device handle|\blost\b|fallen off|off the bus|requires? (?:a )?reset|err!", re.IGNORECASE
)
_LONGEST_LINE = 1000


class Complaint(NamedTuple):
    """A line that is no row, and the GPUs that it names."""

    text: str
    is_loss: bool
    """They compute no more."""
    is_warning: bool
    """It says that it is none."""
    bus_ids: tuple[str, ...]
    """As Linux writes them."""
    uuids: tuple[str, ...]
    indexes: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The bus ids and the UUIDs in small letters. Only a line that has neither is about an index."""
        return (*self.bus_ids, *map(str.lower, self.uuids)) or self.indexes


class Complaints:
    """The lines of one answer that are no rows."""

    def __init__(self, lines: Iterable[str]) -> None:
        self.all = [_complaint(line.strip()[:_LONGEST_LINE]) for line in lines if line.strip()]
        self.losses = [complaint for complaint in self.all if complaint.is_loss and complaint.names]
        self._by_name: dict[str, Complaint] = {}
        self._by_index: dict[str, Complaint] = {}
        for complaint in sorted(self.all, key=lambda each: not each.is_loss):  # a loss says more than a warning
            for name in complaint.names:
                self._by_name.setdefault(name, complaint)
            for index in complaint.indexes:
                self._by_index.setdefault(index, complaint)

    def about(self, names: Collection[str], index: str | None) -> Complaint | None:
        """The line about a GPU, a loss before a warning. `names`: its bus id and UUID as in `Complaint.names`, or its
        index. In a line with a bus id or a UUID the index counts only for a GPU of which neither is known."""
        found = [self._by_name[name] for name in (*names, index) if name in self._by_name]
        if not found and index in names and index in self._by_index:
            found = [self._by_index[index]]
        return min(found, key=lambda complaint: not complaint.is_loss, default=None)


def linux_bus_id(match: re.Match[str]) -> str:
    """nvidia-smi writes the PCI domain with eight digits in capitals, Linux with four in small letters."""
    return f"{int(match[1], 16):04x}:{match[2].lower()}.{match[3] or '0'}"


def _complaint(line: str) -> Complaint:
    is_warning = _WARNING.match(line) is not None
    is_loss = (_LOSS_IN_WARNING if is_warning else _LOSS).search(line) is not None
    return Complaint(
        line,
        is_loss,
        is_warning and not is_loss,
        tuple(dict.fromkeys(linux_bus_id(match) for match in BUS_ID.finditer(line))),
        tuple(dict.fromkeys(match[0].rstrip("-") for match in _UUID.finditer(line))),
        tuple(dict.fromkeys(str(int(match[1])) for match in _INDEX.finditer(line))),
    )
