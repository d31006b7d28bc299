"""How many devices of each resource there are, and how many of them can be lent."""

from __future__ import annotations

from typing import Any

import pytest

from outfitter_proto.records import Host, InventoryDevice
from outfitter_service.core.state.lending import HELD_BACK, Block
from outfitter_service.query.device_lines import DeviceHolder, DeviceLine, entries_of
from outfitter_service.query.device_totals import DeviceTotals, in_words, totals_of
from outfitter_service.query.ledger_view import LedgerView
from support.api import NOW, allocation, change, host_record, resource_of


def device(name: str = "GPU-0", *, host: str = "h", holder: str | None = None, **more: Any) -> DeviceLine:
    holders = []
    if holder is not None:
        held_alone = more.get("sharing") != "shared"
        holders = [
            DeviceHolder(
                worker=holder, incarnation="1", state="allocated", token=1, since=NOW, shared=not held_alone
            )
        ]  # fmt: skip
    more = {"resource": "gpu", "health": "healthy", "sharing": "exclusive", **more}
    return DeviceLine(host=host, id=name, holders=holders, holder_count=len(holders), **more)


def test_each_device_counts_once_by_its_health_and_once_by_who_may_have_it() -> None:
    (gpu,) = totals_of(
        [
            device("free"),
            device("held", holder="w"),
            device("ill", health="unhealthy"),
            device("ill and held", health="unhealthy", holder="w"),
            device("unknown", health="unknown"),
            device("held back", health="unknown", reason=f"{HELD_BACK}w holds old"),
            device("nobody lends it", host="unserved"),
        ],
        waiting=[{"gpu": 1}, {"gpu": 2, "nic": 1}, {}],
        unserved={"unserved"},
    )[:1]
    assert (gpu.resource, gpu.total, gpu.waiting) == ("gpu", 7, 2)
    assert (gpu.healthy, gpu.unhealthy, gpu.unknown, gpu.held_back) == (3, 2, 1, 1)
    assert (gpu.free, gpu.held, gpu.held_ill, gpu.unserved) == (1, 2, 1, 1)
    assert gpu.total == gpu.healthy + gpu.unhealthy + gpu.unknown + gpu.held_back
    assert gpu.healthy == gpu.free + gpu.unserved + gpu.held - gpu.held_ill


@pytest.mark.parametrize("block", Block)
def test_each_reason_why_a_device_is_lent_to_nobody_is_counted(block: Block) -> None:
    assert block.replace("-", "_") in DeviceTotals.__struct_fields__


def test_a_shared_device_that_workers_have_is_free() -> None:
    (gpu,) = totals_of([device(sharing="shared", holder="w"), device("ill", sharing="shared", health="unhealthy")])
    assert (gpu.total, gpu.free, gpu.held) == (2, 1, 0)


def test_a_resource_is_counted_by_itself_and_by_the_models_that_its_driver_names() -> None:
    found = totals_of(
        [
            device("a", properties={"model": "A100"}),
            device("b", properties={"model": "H100"}, holder="w"),
            device("c"),
            device("n", resource="nic"),
        ],
        waiting=[{"fpga": 1}],
    )
    assert [(each.resource, each.total) for each in found] == [("fpga", 0), ("gpu", 3), ("nic", 1)]
    assert {name: (model.total, model.free) for name, model in found[1].models.items()} == {
        "A100": (1, 1),
        "H100": (1, 0),
    }


@pytest.mark.parametrize("kind", ["entries", "lines"])
def test_it_counts_what_a_host_has_by_its_entries_as_by_its_lines(kind: str) -> None:
    ledger = LedgerView()
    ledger.put(change(host := host_record("a", gpus=4, ill=1)))
    ledger.put(change(allocation("a", "w", devices=["a-2", "gone"])))
    entries = entries_of(ledger, host)
    (gpu,) = totals_of(entries if kind == "entries" else [entry.line() for entry in entries])
    assert (gpu.total, gpu.healthy, gpu.free, gpu.held, gpu.held_ill) == (5, 3, 2, 2, 1)


@pytest.mark.parametrize(
    ("totals", "waiting", "words"),
    [
        (DeviceTotals(total=2, healthy=2, free=1, held=1), 0, "1 of 2 free, 1 held"),
        (DeviceTotals(total=1, healthy=1, free=1), 1, "1 of 1 free, 0 held, 1 worker waits"),
        (
            DeviceTotals(total=9, healthy=4, held=2, held_ill=1, unhealthy=3, unknown=1, held_back=1, unserved=3),
            0,
            "0 of 9 free, 4 healthy, 2 held (1 of them ill), 3 unhealthy, 1 unknown, 1 held back, 3 without manager",
        ),
    ],
)  # fmt: skip
def test_the_words_begin_with_what_can_be_had(totals: DeviceTotals, waiting: int, words: str) -> None:
    assert in_words(totals, waiting=waiting) == words


def of_machine(**resources: list[dict[str, str]]) -> Host:
    """A host with devices of these properties, in the driver's order."""
    inventories = {
        name: resource_of([InventoryDevice(id=each["id"], properties=each) for each in devices])
        for name, devices in resources.items()
    }
    return host_record("a", resources=inventories)


@pytest.mark.parametrize(
    ("devices", "order"),
    [
        (
            [
                {"id": "c", "index": "10"},
                {"id": "b", "index": "x"},
                {"id": "a", "index": "2"},
                {"id": "d", "index": "²"},
            ],
            "acbd",
        ),
        ([{"id": "c", "pci.bus_id": "0000:81:00.0"}, {"id": "b", "pci.bus_id": "0000:3b:00.0"}, {"id": "a"}], "bca"),
        ([{"id": "c"}, {"id": "a"}, {"id": "b"}], "cab"),
    ],
)
def test_devices_are_in_the_order_of_the_machine(devices: list[dict[str, str]], order: str) -> None:
    host = of_machine(nic=[{"id": "nic"}], gpu=devices)
    assert [entry.id for entry in entries_of(LedgerView(), host)] == [*order, "nic"]


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (str(81559 * 1024**2), "80 GiB"), (str(512 * 1024**2), "512 MiB"), ("0", "0 MiB"), ("much", None),
        ("9" * 99, None),
    ],
)  # fmt: skip
def test_memory_is_in_words(size: str, words: str | None) -> None:
    assert device(properties={"memory.total_bytes": size}).memory == words
    assert device().memory is None
