"""The lines of devices: their health, and who holds them."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from outfitter_proto.records import Host
from outfitter_service.query.device_lines import NOT_REPORTED, lines_of
from outfitter_service.query.ledger_view import LedgerView
from support.api import allocation, change, cordon, host_record


def health_of(host: Host, *held: dict[str, str]) -> dict[str, tuple[str, str | None, bool]]:
    """Health, reason and `listed` of each device by its id, while a worker holds devices with these infos."""
    ledger = LedgerView()
    ledger.put(change(host))
    ledger.put(change(structs.replace(allocation("a", "w"), resources={"gpu": list(held)})))
    return {line.id: (line.health, line.reason, line.listed) for line in lines_of(ledger, host)}


def long_host(total: int) -> Host:
    """A host whose record lists one GPU of `total`."""
    host = host_record("a", gpus=1)
    inventory: Any = structs.replace(host.resources["gpu"], total=total, healthy=total)
    return structs.replace(host, resources={"gpu": inventory})


def test_a_held_device_for_which_the_hosts_record_has_no_room_has_the_health_that_its_holders_record_says() -> None:
    ill = {"id": "ill", "health": "unhealthy", "health.reason": "XID 79"}
    gone = {"id": "gone", "health": "unknown", "health.reason": "the driver no longer reports this device"}
    assert health_of(long_host(400), {"id": "well"}, ill, gone) == {
        "a-0": ("healthy", None, True),
        "well": ("healthy", None, False),
        "ill": ("unhealthy", "XID 79", False),
        "gone": ("unknown", "the driver no longer reports this device", False),
    }


def test_a_held_device_that_no_complete_record_lists_is_not_reported() -> None:
    assert health_of(long_host(1), {"id": "other"})["other"] == ("unknown", NOT_REPORTED, False)


def test_a_holder_says_whether_it_may_share_the_device() -> None:
    ledger = LedgerView()
    ledger.put(change(host := host_record("a")))
    ledger.put(change(allocation("a", "alone", devices=["a-0"])))
    ledger.put(change(allocation("a", "shares", devices=["a-0"], shared=["gpu"])))
    (line, _) = lines_of(ledger, host)
    assert {holder.worker: holder.shared for holder in line.holders} == {"alone": False, "shares": True}


def test_the_order_of_a_marked_device_is_told_also_while_the_resource_that_it_names_shows_none() -> None:
    """Such as after the driver of that resource has failed: the host's record marks the device under another one."""
    host = host_record("a", gpus=1)
    gpus = host.resources["gpu"]
    marked = structs.replace(gpus, devices=[structs.replace(gpus.devices[0], cordon="k3v9-01")], cordoned=1)
    host = structs.replace(host, resources={"cuda": marked})
    ledger = LedgerView()
    ledger.put(change(host))
    ledger.put(change(cordon("a", "k3v9-01", resource="gpu")))
    [line] = lines_of(ledger, host)
    assert [order.id for order in line.orders] == ["k3v9-01"]
