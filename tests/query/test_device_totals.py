"""How many devices of each resource there are, and how many of them can be lent."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from msgspec import structs

from outfitter_proto.records import Host, InventoryDevice
from outfitter_service.core.state.lending import HELD_BACK, Block
from outfitter_service.query.device_lines import MOST_ORDERS, DeviceHolder, DeviceLine, entries_of
from outfitter_service.query.device_totals import DeviceTotals, in_words, totals_in, totals_of
from outfitter_service.query.ledger_view import LedgerView
from support.api import NOW, allocation, change, cordon, host_record, resource_of


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
            device("cordoned", cordon="o-1"),
            device("cordoned and held", cordon="o-1", holder="w"),
            device("cordoned and ill", cordon="o-1", health="unhealthy"),
            device("used by a stranger", used_by="process 7"),
            device("held and used by a stranger", used_by="process 7", holder="w"),
        ],
        waiting=[{"gpu": 1}, {"gpu": 2, "nic": 1}, {}],
        unserved={"unserved"},
    )[:1]
    assert (gpu.resource, gpu.total, gpu.waiting) == ("gpu", 12, 2)
    assert (gpu.healthy, gpu.unhealthy, gpu.unknown, gpu.held_back) == (7, 3, 1, 1)
    assert (gpu.free, gpu.held, gpu.held_ill, gpu.unserved) == (1, 4, 1, 1)
    assert (gpu.cordoned, gpu.held_cordoned, gpu.used_by_stranger) == (3, 1, 2)
    assert gpu.total == gpu.healthy + gpu.unhealthy + gpu.unknown + gpu.held_back
    healthy_and_lent_to_nobody = 2
    assert gpu.healthy == gpu.free + gpu.unserved + gpu.held - gpu.held_ill + healthy_and_lent_to_nobody


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
        (
            DeviceTotals(total=8, healthy=8, free=2, held=5, cordoned=3, held_cordoned=2),
            0,
            "2 of 8 free, 5 held, 3 cordoned (2 of them held)",
        ),
        (
            DeviceTotals(total=2, healthy=2, free=1, used_by_stranger=1),
            0,
            "1 of 2 free, 0 held, 1 used by strangers",
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
        (str(81559 * 1024**2), "79.6 GiB"), (str(80 * 1024**3), "80 GiB"), (str(512 * 1024**2), "512 MiB"),
        ("0", "0 MiB"), ("much", None), ("9" * 99, None),
    ],
)  # fmt: skip
def test_memory_is_in_words(size: str, words: str | None) -> None:
    assert device(properties={"memory.total_bytes": size}).memory == words
    assert device().memory is None


def long_host(*, listed: int = 2, ill: int = 0, **counts: int) -> Host:
    """A host whose record lists only some of its GPUs, the last of them cordoned; `counts` are of all."""
    host = host_record("a", gpus=listed, ill=ill)
    gpus = host.resources["gpu"]
    devices = [*gpus.devices[:-1], structs.replace(gpus.devices[-1], cordon="o-1")]
    return structs.replace(host, resources={"gpu": structs.replace(gpus, devices=devices, **counts)})


@pytest.mark.parametrize(
    ("counts", "free", "cordoned", "unknown"),
    [
        ({"total": 300, "healthy": 300, "cordoned": 1}, 298, 1, 0),
        ({"total": 300, "healthy": 290, "cordoned": 1}, 288, 1, 10),
        ({"total": 300, "healthy": 290, "cordoned": 5}, 284, 5, 10),
        ({"total": 300, "healthy": 290, "cordoned": 300}, 0, 300, 10),
    ],
)
def test_devices_for_which_a_hosts_record_has_no_room_are_counted(
    counts: dict[str, int], free: int, cordoned: int, unknown: int
) -> None:
    ledger = LedgerView()
    ledger.put(change(host := long_host(**counts)))
    ledger.put(change(cordon("a", **({"resource": "gpu"} if cordoned == 300 else {"device": "a-1"}))))
    ledger.put(change(allocation("a", "w", devices=["a-250"])))
    (gpu,) = totals_in(ledger, entries_of(ledger, host), resource=None, model=None, unserved=())
    assert (gpu.total, gpu.healthy, gpu.unknown) == (300, counts["healthy"], unknown)
    assert (gpu.free, gpu.held, gpu.cordoned) == (free, 1, cordoned)


def test_devices_that_are_not_listed_count_for_their_resource_and_for_no_model() -> None:
    ledger = LedgerView()
    ledger.put(change(host := long_host(total=300, healthy=300)))
    devices = entries_of(ledger, host)
    assert totals_in(ledger, devices, resource="gpu", model=None, unserved=())[0].total == 300
    assert totals_in(ledger, devices, resource="gpu", model="A100", unserved=())[0].total == 2
    assert [each.resource for each in totals_in(ledger, [], resource="nic", model=None, unserved=())] == []
    assert totals_in(ledger, devices, resource=None, model=None, unserved={"a"})[0].unserved == 299


@pytest.mark.parametrize(
    ("order", "cordoned"),
    [
        ({"device": "a-1"}, {"a-1"}),
        ({"device": "PCI-1"}, {"a-1"}),
        ({"device": "other"}, set()),
        ({"resource": "gpu"}, {"a-0", "a-1", "a-9"}),
        ({"resource": "mig"}, {"a-0", "m-0"}),
        ({"resource": "nic"}, set()),
        ({}, {"a-0", "a-1", "a-9", "m-0"}),
        ({"device": "PCI-9"}, {"a-9"}),
    ],
)
def test_an_order_takes_a_device_out_under_all_its_names_in_each_resource(
    order: dict[str, str], cordoned: set[str]
) -> None:
    gpus = resource_of([InventoryDevice(id="a-0"), InventoryDevice(id="a-1")])
    gpus = structs.replace(gpus, names=[["a-1", "PCI-1"], ["a-0", "m-0"]])
    migs = resource_of([InventoryDevice(id="m-0")])
    ledger = LedgerView()
    ledger.put(change(host := host_record("a", resources={"gpu": gpus, "mig": migs})))
    held = structs.replace(allocation("a", "w", devices=["a-9"]), aliases={"a-9": ["PCI-9"]})
    ledger.put(change(held))
    ledger.put(change(cordon("a", **order)))
    ledger.put(change(cordon("b")))
    lines = [entry.line() for entry in entries_of(ledger, host)]
    expected = cordoned | ({"m-0"} if "a-0" in cordoned else set())
    assert {line.id for line in lines if line.block is Block.CORDONED} == expected
    assert {line.id for line in lines if line.orders} == expected


def test_a_device_names_all_orders_that_take_it_out_and_at_most_some_of_many() -> None:
    ledger = LedgerView()
    ledger.put(change(host := host_record("a")))
    ledger.put(change(cordon("a", "second", since=NOW + timedelta(minutes=1), until=NOW + timedelta(hours=1))))
    ledger.put(change(cordon("a", "first", author="bob@ops-2", reason="XID 79", device="a-0")))
    first, second = entries_of(ledger, host)
    assert first.cordoned_because == (
        "XID 79 (bob@ops-2, order first); rebooted tonight (ada@ops-1, order second, until 2026-01-31T13:00:00Z)"
    )
    assert [order.id for order in second.orders] == ["second"]
    for number in range(MOST_ORDERS):
        ledger.put(change(cordon("a", f"more-{number}")))
    assert len(entries_of(ledger, host)[0].line().orders) == MOST_ORDERS


def test_a_device_that_a_hosts_record_calls_cordoned_is_cordoned_though_its_order_is_not_known() -> None:
    host = host_record("a", resources={"gpu": resource_of([InventoryDevice(id="a-0", cordon="o-1")])})
    (entry,) = entries_of(LedgerView(), host)
    assert (entry.block, entry.cordoned_because) == (Block.CORDONED, "order o-1")
