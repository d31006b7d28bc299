"""Whatever stands in the topics, the checker judges it: it never fails itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from support.streams import HOST, Stream, lived_in

NUMBERS = st.sampled_from([-1, 0, 1, 5, 2**70, 0.5])
ODD = st.one_of(
    st.none(), st.booleans(), NUMBERS, st.sampled_from(["", HOST, "pending", "allocated", "GPU-0", "x/y", "2026"]),
    st.sampled_from([[], {}, [None], [[]], [{}], {"gpu": 1}, {"gpu": []}, {"gpu": [{"id": []}]}, {"": None}]),
)  # fmt: skip


def _paths(value: Any, *, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where all values are that `value` is made of."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [above, *(path for name, each in inside for path in _paths(each, above=(*above, name)))]


def _with(value: Any, path: tuple[Any, ...], odd: Any) -> Any:
    if not path:
        return odd
    changed = value.copy()
    changed[path[0]] = _with(value[path[0]], path[1:], odd)
    return changed


def harm(draw: Callable[[st.SearchStrategy[Any]], Any], stream: Stream) -> None:
    """Change, delete, repeat or move one record."""
    index = draw(st.integers(0, len(stream.records) - 1))
    record = stream.records[index]
    match draw(st.sampled_from(["change", "change", "change", "delete", "repeat", "swap", "key", "bytes"])):
        case "change":
            try:
                body = json.loads(record.value or b"null")
            except ValueError:
                return
            path = draw(st.sampled_from(_paths(body)))
            stream.records[index] = record._replace(value=json.dumps(_with(body, path, draw(ODD))).encode())
        case "delete":
            stream.records[index] = record._replace(value=None)
        case "repeat":
            stream.records.append(record._replace(offset=stream.end))
            stream.end += 1
        case "swap":
            other = draw(st.integers(0, len(stream.records) - 1))
            stream.records[index] = stream.records[other]._replace(offset=record.offset)
            stream.records[other] = record._replace(offset=stream.records[other].offset)
        case "key":
            stream.records[index] = record._replace(key=draw(st.sampled_from([None, b"", b"\xff", b"@host/", b"@"])))
        case "bytes":
            stream.records[index] = record._replace(value=draw(st.binary(max_size=8)))


@settings(max_examples=int(__import__("os").environ.get("N", "300")), deadline=None)
@given(st.data(), st.booleans())
def test_the_checker_never_fails(data: st.DataObject, markers: bool) -> None:
    world = lived_in(markers=markers)
    for _ in range(data.draw(st.integers(1, 4))):
        stream = data.draw(st.sampled_from([world.registrations, world.allocations, world.history, world.letters]))
        harm(data.draw, stream)
    assert world.report().checks
