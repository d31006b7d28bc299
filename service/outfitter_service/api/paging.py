"""Pages of a list. A cursor is the place of the last item in the list's order, and not a number of items.

So a page goes on behind the item that was last, whatever has come and gone before it. Any text is a valid cursor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Generic, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

T = TypeVar("T")
S = TypeVar("S")

MOST = 1000
"""Most items of a page."""
MOST_BYTES = 1024 * 1024
"""A page that has so many bytes has no further item."""

Limit = Annotated[int, Meta(ge=1, le=MOST, description="The most items of the page.")]
Cursor = Annotated[str, Meta(description="The `next` of the page before: the list goes on there.")]


class Paged(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parameters of each list."""

    limit: Limit = 100
    cursor: Cursor | UnsetType = UNSET

    @property
    def start(self) -> str | None:
        """The place behind which the page begins; None: at the list's beginning."""
        return self.cursor or None


class Page(Struct, Generic[T], frozen=True, kw_only=True):
    """A part of a list. `next`: the cursor of the following page; null: this is the last one."""

    items: list[T]
    next: str | None = None


def page(places: Iterable[tuple[str, S]], paged: Paged, show: Callable[[S], T]) -> Page[T]:
    """The first items of a list. `places`: its items behind the cursor with their places, in order."""
    items: list[T] = []
    last, size = "", 0
    for place, value in places:
        if len(items) == paged.limit or size >= MOST_BYTES:
            return Page(items=items, next=last)
        items.append(show(value))
        size += len(msgspec.json.encode(items[-1]))
        last = place
    return Page(items=items)
