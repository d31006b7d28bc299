"""Whatever somebody writes into the topics, or does to their records, the checker judges it: it never breaks off."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from outfitter_verify import Control, Partition, Reading, check
from support.checker.streams import HOST, Stream, World, lived_in

DEEP = "how deep a value is nested: "
ODD: tuple[Any, ...] = (
    None, True, 0, -1, 2**63, 10**400, 0.5, -1e300, float("inf"), "", "x", "x/y/z", "\ud800", "0001-01-01T00:00:00Z",
    "9999-12-31T23:59:59-14:00", "partition/" + "9" * 5000, [], [1], [[]], [None], ["\ud800"], {}, {"": None},
    {"id": 1}, {"gpu": [1]}, {"gpu": [{"id": 1}]}, {"gpu": [{"id": "GPU-0"}]}, {"gpu": "x"}, {"gpu": {"gpu": []}},
    {"\ud800": 1}, {"amounts": {"gpu": "1"}}, {"amounts": 1, "lease_s": "x", "priority": "x"},
    HOST, "pending", "allocated", "GPU-0", "2026", 1, 5, 2**70, {"gpu": 1}, {"gpu": [{"id": []}]},
)  # fmt: skip
"""What no field may be, or what few may be. `inf` is written as 1e999, which is JSON."""

Path = tuple[str | int, ...]


def eventful() -> World:
    """A world with a worker that waits, one that has been silent for long, one whose lease is over, and all of what
    `lived_in` has."""
    world = lived_in()
    waits = world.allocation("e", "pending", reason_code="busy", queue_position=1)
    world.commit(waits | {"request": {"amounts": {"gpu": 1}, "lease_s": 30.0, "priority": -3}})
    world.register("f")
    request = {"amounts": {"gpu": 1}, "lease_s": 0.1, "owner": None, "priority": 1}
    held = world.allocation("f", "allocated", devices=["GPU-2"], request=request, aliases={"GPU-2": ["two"]})
    world.commit(held | {"shared": []})
    world.commit(world.allocation("f", "ended", reason_code="lease-expired"))
    world.host(gpu=[["GPU-0", "zero"]])
    world.register("g")
    silent = world.allocation("g", "allocated", devices=["GPU-1"], request=request)
    world.commit(silent, ahead={HOST: world.registrations.end}, to=world.position)
    for minute in range(10, 50, 5):
        world.commit(at=f"2026-01-31T12:{minute}:00Z")
    return world


def streams(world: World) -> tuple[Stream, ...]:
    return world.registrations, world.allocations, world.history, world.letters, world.control


def paths(node: Any, here: Path = ()) -> Iterator[Path]:
    """The places of all nodes of a JSON value, its own first."""
    yield here
    inner = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for name, child in inner:
        yield from paths(child, (*here, name))


WORLD = eventful()


def nodes() -> list[tuple[int, int, Path]]:
    """Every node of every record of every topic: the topic's number, the record's, and the place."""
    return [
        (topic, index, path)
        for topic, stream in enumerate(streams(WORLD))
        for index, record in enumerate(stream.records)
        if record.value is not None and record.value.startswith(b"{")
        for path in paths(stream.body(index))
    ]


def replaced(body: Any, path: Path, value: Any) -> Any:
    """The value with another one at `path`."""
    if not path:
        return value
    body = copy.deepcopy(body)
    node = body
    for name in path[:-1]:
        node = node[name]
    node[path[-1]] = value
    return body


def written(body: Any) -> bytes:
    """The value as JSON, with infinity and deep nesting."""
    text = json.dumps(body).replace("Infinity", "1e999")
    return re.sub(f'"{DEEP}(\\d+)"', lambda found: "[" * int(found[1]) + "]" * int(found[1]), text).encode()


def forged(where: tuple[int, int, Path], value: Any) -> Reading:
    """The reading with one node of one record replaced."""
    topic, index, path = where
    logs = [stream.log() for stream in streams(WORLD)]
    record = logs[topic].records[index]
    records = list(logs[topic].records)
    records[index] = record._replace(value=written(replaced(json.loads(record.value or b""), path, value)))
    logs[topic] = logs[topic]._replace(records=records)
    registrations, allocations, history, letters, orders = logs
    control = Control(orders, WORLD.control_id)
    return WORLD.reading()._replace(logs=[Partition(registrations, allocations, history, letters, control)])


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
deep = st.integers(100, 2000).map(lambda depth: f"{DEEP}{depth}")


@settings(max_examples=300, deadline=None)
@given(where=st.sampled_from(nodes()), value=st.sampled_from(ODD) | anything | deep)
@example(where=(1, 2, ("request",)), value="x")
@example(where=(1, 2, ("writer",)), value="host/another")
@example(where=(1, 2, ("source", "partition")), value=-1)
def test_no_forged_record_ends_the_checker(where: tuple[int, int, Path], value: Any) -> None:
    str(check(forged(where, value))).encode()


def test_a_forged_request_is_told() -> None:
    [violation] = [
        violation for violation in check(forged((1, 2, ("request",)), "x")).violations if violation.check == "writers"
    ]
    assert "its field 'request' is 'x'" in violation.what


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
            path = draw(st.sampled_from(list(paths(body))))
            value = written(replaced(body, path, draw(st.sampled_from(ODD) | anything)))
            stream.records[index] = record._replace(value=value)
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


@settings(max_examples=300, deadline=None)
@given(st.data(), st.booleans())
def test_no_harm_to_several_records_ends_the_checker(data: st.DataObject, markers: bool) -> None:
    world = lived_in(markers=markers)
    for _ in range(data.draw(st.integers(1, 4))):
        harm(data.draw, data.draw(st.sampled_from(streams(world))))
    str(world.report()).encode()
