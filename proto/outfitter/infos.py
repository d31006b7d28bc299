"""The infos of one resource for an operator: Flink's `Set<ExternalResourceInfo>`, but ordered by `local_index`.

`local_index` is a device's number for programs that run with the allocation's environment variables.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence, Set
from typing import overload

from outfitter_drivers.api import ExternalResourceInfo


def _ordinal(info: ExternalResourceInfo) -> tuple[int, int]:
    """Numbered devices come first, by number. The others follow in their given order (sorting is stable)."""
    text = info.get_property("local_index") or ""
    return (0, int(text)) if text.isascii() and text.isdigit() else (1, 0)


class ExternalResourceInfos(Set[ExternalResourceInfo], Hashable):
    """An immutable, ordered, indexable set of infos, equal to any set of the same infos.

    `infos[0]` is the device with the lowest `local_index`. A slice is an `ExternalResourceInfos`.
    """

    __slots__ = ("_hashed", "_infos")

    def __init__(self, infos: Iterable[ExternalResourceInfo] = ()) -> None:
        self._infos: Sequence[ExternalResourceInfo] = tuple(sorted(dict.fromkeys(infos), key=_ordinal))
        self._hashed: int | None = None

    def __contains__(self, item: object) -> bool:
        return item in self._infos

    def __iter__(self) -> Iterator[ExternalResourceInfo]:
        return iter(self._infos)

    def __len__(self) -> int:
        return len(self._infos)

    @overload
    def __getitem__(self, index: int) -> ExternalResourceInfo: ...
    @overload
    def __getitem__(self, index: slice) -> ExternalResourceInfos: ...
    def __getitem__(self, index: int | slice) -> ExternalResourceInfo | ExternalResourceInfos:
        if isinstance(index, slice):
            return ExternalResourceInfos(self._infos[index])
        return self._infos[index]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Set):
            return len(self) == len(other) and all(info in other for info in self._infos)
        return NotImplemented

    def __hash__(self) -> int:
        """The hash of a `frozenset` of the same infos, because the two are equal."""
        if self._hashed is None:
            self._hashed = hash(frozenset(self._infos))
        return self._hashed

    def __repr__(self) -> str:
        return f"ExternalResourceInfos({list(self._infos)!r})"
