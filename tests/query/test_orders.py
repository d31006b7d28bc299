"""What an order is called, what it is about, and which orders are about what somebody names."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from outfitter_proto.names import is_name
from outfitter_proto.records import Cordon, CordonOrder, InventoryDevice, ResourceInventory
from outfitter_service.query import orders as reading
from outfitter_service.query.ledger_view import LedgerView
from outfitter_service.query.orders import Orders, OrderState
from support import orders
from support.api import change

MOMENTS = st.datetimes(datetime(2020, 1, 1), datetime(2900, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001


def ledger(*records: object) -> LedgerView:
    view = LedgerView()
    for record in (orders.host(), orders.holder("GPU-1"), *records):
        view.put(change(record))
    return view


def order(name: str = "1", **more: object) -> CordonOrder:
    values: dict[str, Any] = {"host": orders.HOST, "author": "ada@ops-1", "reason": "XID 79", "at": orders.AT} | more
    return CordonOrder(id=name, **values)


@given(first=MOMENTS, later=MOMENTS)
def test_ids_are_names_that_sort_by_time(first: datetime, later: datetime) -> None:
    one, two = reading.new_id(first), reading.new_id(later)
    assert is_name(one)
    assert len(one) == len(two) == 12
    if abs(later - first) >= timedelta(seconds=1):
        assert (one < two) == (first < later)


def test_an_id_is_given_once(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = iter([5, 5, 6])
    monkeypatch.setattr(secrets, "randbits", lambda _bits: next(drawn))
    first = reading.new_id(orders.AT)
    second = reading.new_id(orders.AT, [first])
    assert (first[-4:], second[-4:]) == ("0005", "0006")


@pytest.mark.parametrize(
    ("asked", "about", "has", "meets"),
    [
        ((None, None), (None, None), True, True),
        ((None, None), ("gpu", None), True, True),
        ((None, None), (None, "GPU-1"), True, True),
        (("gpu", None), (None, None), False, True),
        (("gpu", None), ("gpu", None), True, True),
        (("gpu", None), ("nic", None), False, False),
        (("gpu", None), ("gpu", "GPU-1"), True, True),
        (("gpu", None), (None, "0000:3b:00.0"), True, True),
        (("gpu", None), (None, "NIC-0"), False, False),
        ((None, "GPU-1"), (None, None), False, True),
        ((None, "GPU-1"), ("gpu", None), False, True),
        ((None, "GPU-1"), ("nic", None), False, False),
        ((None, "GPU-1"), (None, "0000:3b:00.0"), True, True),
        (("gpu", "GPU-1"), (None, "GPU-1"), True, True),
        ((None, "GPU-1"), (None, "GPU-0"), False, False),
        ((None, "gone"), (None, "gone"), True, True),
        (("gone", None), ("gone", None), True, True),
    ],
    ids=str,
)
def test_an_order_is_a_part_of_what_is_named_or_meets_it(
    asked: tuple[str | None, str | None], about: tuple[str | None, str | None], has: bool, meets: bool
) -> None:
    view = ledger()
    selection = reading.selected(view, orders.HOST, *asked)
    found = Orders({"1": order(resource=about[0], device=about[1]), "2": order("2", host="elsewhere")}, 0)
    line, other = reading.lines_of(found, view, orders.AT)
    assert (selection.has(line), selection.meets(line)) == (has, meets)
    assert (selection.has(other), selection.meets(other)) == (False, False)


def test_an_order_for_a_device_takes_it_out_of_each_resource_that_shows_it() -> None:
    names = [["GPU-0", "card0"]]
    view = LedgerView()
    view.put(
        change(orders.host(gpu=orders.inventory("GPU-0", names=names), drm=orders.inventory("card0", names=names)))
    )
    for name in ("GPU-0", "card0"):
        covered = reading.covered(view, reading.selected(view, orders.HOST, "gpu", name))
        assert sorted(entry.resource for entry in covered) == ["drm", "gpu"]


def test_an_order_may_name_what_devices_are_parts_of_although_that_is_no_device() -> None:
    """A GPU in MIG mode."""
    gpus = orders.inventory("MIG-0", "MIG-1", "GPU-1", parts={"pci:0000:1b:00.0": ["MIG-0", "MIG-1"]})
    view = LedgerView()
    view.put(change(orders.host(gpu=gpus)))
    assert reading.what_is_missing(view, orders.HOST, None, "pci:0000:1b:00.0") is None
    selection = reading.selected(view, orders.HOST, None, "pci:0000:1b:00.0")
    assert [entry.id for entry in reading.covered(view, selection)] == ["MIG-0", "MIG-1"]
    (line,) = reading.lines_of(Orders({"1": order(device="pci:0000:1b:00.0")}, 0), view, orders.AT)
    assert selection.has(line)
    of_resource = reading.selected(view, orders.HOST, "gpu", None)
    assert (of_resource.has(line), of_resource.is_all_of(line)) == (True, False)


def test_a_device_for_which_the_record_has_no_room_is_not_called_unknown() -> None:
    view = LedgerView()
    many = ResourceInventory(state="reported", devices=[InventoryDevice(id="GPU-0")], total=300)
    view.put(change(orders.host(gpu=many, nic=orders.inventory("NIC-0"))))
    assert reading.what_is_missing(view, orders.HOST, None, "GPU-299") is None
    assert reading.what_is_missing(view, orders.HOST, "nic", "GPU-299") is not None


@pytest.mark.parametrize(
    ("given", "in_effect", "state"),
    [
        (order(), False, OrderState.NOT_TAKEN),
        (order(), True, OrderState.IN_EFFECT),
        (order(until=orders.AT + timedelta(hours=1)), True, OrderState.IN_EFFECT),
        (order(until=orders.AT), True, OrderState.ENDING),
        (order(until=orders.AT), False, OrderState.ENDED),
        (order(ended_at=orders.AT), True, OrderState.ENDING),
        (order(ended_at=orders.AT), False, OrderState.ENDED),
        (None, True, OrderState.LOST),
    ],
)
def test_the_topic_and_the_ledger_say_what_has_become_of_an_order(
    given: CordonOrder | None, in_effect: bool, state: OrderState
) -> None:
    view = ledger(*([orders.cordon(given or order())] if in_effect else []))
    [line] = reading.lines_of(Orders({} if given is None else {"1": given}, 0), view, orders.AT)
    assert (line.state, line.stands) == (state, state not in {OrderState.ENDING, OrderState.ENDED})
    assert (line.since is not None) == in_effect


def test_an_end_says_again_all_that_the_order_said() -> None:
    until = orders.AT + timedelta(hours=1)
    cordon = Cordon(
        host=orders.HOST, order="7", author="ada@ops-1", reason="XID 79", since=orders.AT, resource="gpu",
        device="GPU-1", until=until,
    )  # fmt: skip
    [lost] = reading.lines_of(Orders({}, 0), ledger(cordon), orders.AT)
    assert lost.ended("bob@ops-2", orders.AT) == order(
        "7", resource="gpu", device="GPU-1", until=until, ended_at=orders.AT, ended_by="bob@ops-2"
    )
    [plain] = reading.lines_of(Orders({"1": order(resource=UNSET)}, 0), ledger(), orders.AT)
    assert not plain.ended("bob@ops-2", orders.AT).stands(orders.AT)
