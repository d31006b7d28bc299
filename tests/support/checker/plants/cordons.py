"""Plants in operators' orders: what is lent although it is taken out, orders that are lifted or passed over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from support.checker.plants import planted
from support.checker.streams import DEVICES, HOST, World

LISTED = [{"id": one} for one in DEVICES]


def _take(world: World, order: str, **fields: Any) -> str:
    """A manager takes an order."""
    world.order(order, **fields)
    key = world.cordon(order, **fields)
    world.commit()
    return key


def _grant(world: World, device: str, **fields: Any) -> None:
    world.commit(world.allocation("e", "allocated", devices=[device], **fields))


# --- what is taken out is lent ---


@planted("orders", says="gets GPU-2 of gpu, which order k takes out")
def a_device_is_lent_that_is_taken_out(world: World) -> None:
    _take(world, "k", device="GPU-2")
    _grant(world, "GPU-2")


@planted("orders", says="gets GPU-2 of gpu, which order k takes out")
def a_device_of_a_host_is_lent_that_is_taken_out(world: World) -> None:
    _take(world, "k")
    _grant(world, "GPU-2")


@planted("orders", says="gets GPU-2 of gpu, which order k takes out")
def a_device_of_a_resource_is_lent_that_is_taken_out(world: World) -> None:
    _take(world, "k", resource="gpu")
    _grant(world, "GPU-2")


@planted("orders", says="gets card2 of card, which order k takes out")
def a_device_is_lent_under_its_other_name(world: World) -> None:
    world.inventory(_cards())
    _take(world, "k", device="GPU-2")
    _grant(world, "card2", resource="card")


@planted("orders", says="gets card2 of card, which order k takes out")
def a_device_is_lent_as_another_resource(world: World) -> None:
    world.inventory(_cards())
    _take(world, "k", resource="gpu")
    _grant(world, "card2", resource="card")


@planted("orders", says="gets GPU-2 of gpu, which order k takes out")
def a_device_is_lent_that_is_taken_out_by_a_name_that_only_its_grant_has(world: World) -> None:
    _take(world, "k", device="0000:01:00.0")
    _grant(world, "GPU-2", aliases={"GPU-2": ["0000:01:00.0"]})


@planted("orders", says="gets GPU-2 of gpu, which order k takes out")
def a_device_is_lent_while_one_of_two_orders_is_in_effect(world: World) -> None:
    _take(world, "k", device="GPU-2")
    other = _take(world, "l", device="GPU-2")
    world.end_order("l", device="GPU-2")
    world.commit(other)
    _grant(world, "GPU-2")


@planted("orders", says="gets GPU-2 of gpu, which order k takes out")
def a_waiting_worker_gets_what_is_taken_out(world: World) -> None:
    world.commit(world.allocation("e", "pending", reason_code="cordoned"))
    _take(world, "k", device="GPU-2")
    _grant(world, "GPU-2", reason_code=None)


def _cards() -> Mapping[str, Any]:
    """Another resource shows `GPU-2` under a name of its own."""
    cards = {"state": "reported", "devices": [{"id": "card2"}], "names": [["GPU-2", "card2"]]}
    return {"gpu": {"state": "reported", "devices": LISTED}, "card": cards}


# --- what was read is not in effect ---


@planted("orders", says="order k to host gpu-3 was read, and is not in effect")
def an_order_is_read_and_not_taken(world: World) -> None:
    world.order("k", device="GPU-2")
    for _ in range(5):
        world.commit()


@planted("orders", says="order o2 to host gpu-3 was read, and is not in effect")
def an_order_is_forgotten_in_silence(world: World) -> None:
    """…without a tombstone, as where a ledger begins anew."""
    records = world.allocations.records
    records[:] = [record for record in records if record.key != f"@cordon/{HOST}/o2".encode()]
    for _ in range(5):
        world.commit()


@planted("orders", says="order o2 to host gpu-3 is in effect otherwise than it says")
def a_change_of_an_order_is_not_taken(world: World) -> None:
    world.order("o2", device="GPU-2")
    world.commit()


@planted("orders", says="order o2 is still in effect, although its end was read")
def the_end_of_an_order_is_not_taken(world: World) -> None:
    world.end_order("o2", device="GPU-21")
    world.commit()


# --- what is in effect vanishes ---


@planted("orders", says="order o2 of host gpu-3 is no longer in effect, and nobody has ended it")
def an_order_is_lifted_by_the_end_of_another_one(world: World) -> None:
    key = _take(world, "k", device="GPU-21")
    world.end_order("k", device="GPU-21")
    world.commit(key, f"@cordon/{HOST}/o2")


@planted("orders", says="order o2 of host gpu-3 is no longer in effect, and nobody has ended it")
def an_order_is_lifted_before_its_time(world: World) -> None:
    world.commit(f"@cordon/{HOST}/o2", at="2098-12-31T23:59:59Z")


@planted("orders", says="order o2 of host gpu-3 is no longer in effect, and nobody has ended it")
def an_order_is_lifted_by_its_tombstone(world: World) -> None:
    world.control.append("o2", None)
    world.commit(f"@cordon/{HOST}/o2")


# --- how far orders were read ---


@planted("orders", says="it has read orders to 1, but to 3 before")
def orders_are_read_again(world: World) -> None:
    world.commit(orders={"topic_id": world.control_id, "to": 1})


@planted("orders", says="it has read orders to 99, but they end at 3")
def orders_are_read_beyond_their_end(world: World) -> None:
    world.commit(orders={"topic_id": world.control_id, "to": 99})


# --- who may go on ---


@planted("orders", says="a manager that knows no orders would work on it")
def a_ledger_with_orders_is_open_to_managers_that_know_none(world: World) -> None:
    world.needs.clear()
    world.commit()


@planted("orders", says="a manager that knows no orders would work on it")
def a_ledger_that_had_orders_is_open_to_managers_that_know_none(world: World) -> None:
    world.end_order("o2", device="GPU-21")
    world.commit(f"@cordon/{HOST}/o2")
    world.needs.clear()
    world.commit()
