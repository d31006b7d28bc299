"""Pages: whatever the names are, the pages of a list together are the list."""

from __future__ import annotations

from datetime import timedelta, timezone
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from outfitter_proto.bus import Message
from outfitter_proto.codec import encode
from outfitter_proto.records import DeadLetter, Host, InventoryDevice, MessageSource, ResourceInventory, Transition
from outfitter_service.api.model.fleet import Fleet
from outfitter_service.api.routes import ROUTES
from outfitter_service.api.typed import Route
from support.api import NOW, allocation, change, checkpoint, fleet_of, follower_of, host_record, message

NAMES = st.sampled_from(["a", "a-", "a-1", "a.", "a.b", "a0", "a_", "b"])
"""Names of which one begins with another. '-' and '.' sort before the '/' of keys, the others behind it."""
IDS = st.sampled_from(["", "/", "0", "-", "a", "\x00"])
LISTS = [route for route in ROUTES if hasattr(route.query, "cursor")]


def host_with(host: str, resources: dict[str, list[str]]) -> Host:
    inventories = {
        name: ResourceInventory(state="reported", amount=1, devices=[InventoryDevice(id=id_) for id_ in ids])
        for name, ids in resources.items()
    }
    return structs.replace(host_record(host), resources=inventories)


hosts = st.builds(host_with, NAMES, st.dictionaries(NAMES, st.lists(IDS, unique=True, max_size=3), max_size=3))
allocations = st.builds(
    allocation,
    NAMES,
    NAMES,
    st.sampled_from(["pending", "pending", "allocated", "ended"]),
    incarnation=NAMES,
    priority=st.integers(-(10**6), 10**6),
    offset=st.integers(0, 3),
)
times = st.builds(
    lambda seconds, hours: (NOW + timedelta(seconds=seconds)).astimezone(timezone(timedelta(hours=hours))),
    st.integers(0, 3),
    st.sampled_from([0, 0, 5, -9]),
)


def fleet_with(records: list[Any], moments: list[Any]) -> Fleet:
    """A model with these records, and with a step of history and a dead letter at each of the moments."""
    fleet = fleet_of(*records)
    for offset, at in enumerate(moments):
        record = allocation("a", "w")
        step = Transition(
            at=at, host="a", worker="w", incarnation="i", event="register", to="allocated", explanation="granted",
            record=record,
        )  # fmt: skip
        fleet.add_step(message(step, key=record.key, offset=offset), step, announce=False)
        letter = DeadLetter(
            at=at, writer="host/a", source=MessageSource(topic="t", partition=0, offset=offset), reason="bad", length=0,
            sha256="0", body=b"",
        )  # fmt: skip
        fleet.add_letter(Message("t", 0, offset, None, encode(letter), 0), letter, announce=False)
    return fleet


fleets = st.builds(
    fleet_with,
    st.lists(hosts | allocations | st.builds(lambda host: checkpoint(f"host/{host}"), NAMES), max_size=10),
    st.lists(times, max_size=3),
)


def pages(fleet: Fleet, route: Route, limit: int) -> list[list[Any]]:
    """The items of each page of a list."""
    found: list[list[Any]] = []
    cursor: str | None = ""
    while cursor is not None:
        query = route.query(limit=limit, cursor=cursor)
        page = route.handler(follower_of(fleet), fleet, query, {"worker": "a"})
        found.append(page.items)
        cursor = page.next
    return found


@given(fleet=fleets, limit=st.integers(1, 3))
def test_the_pages_of_a_list_are_the_list_whatever_the_names(fleet: Fleet, limit: int) -> None:
    fleet.restore([change(allocation("a", "a"))])  # the worker whose explanations are read
    for route in LISTS:
        (whole,) = pages(fleet, route, 1000)
        found = pages(fleet, route, limit)
        assert [item for page in found for item in page] == whole, route.name
        assert all(len(page) == limit for page in found[:-1]), route.name


@given(moments=st.lists(times, max_size=5), since=times, until=times)
def test_history_between_two_times_is_what_happened_between_them(moments: list[Any], since: Any, until: Any) -> None:
    fleet = fleet_with([], moments)
    (route,) = (route for route in LISTS if route.name == "history")
    page = route.handler(follower_of(fleet), fleet, route.query(since=since, until=until, limit=1000), {})
    found = [moments[item["offset"]] for item in page.items]
    assert found == sorted((at for at in moments if since <= at <= until), reverse=True)
