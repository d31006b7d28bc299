"""The table of `outfitter devices`."""

from __future__ import annotations

import pytest
from msgspec import structs

from outfitter_proto.records import InventoryDevice
from outfitter_service.cli.commands.view.devices import _print_table
from outfitter_service.core.state.pools import ALONE, PART
from outfitter_service.query.device_lines import entries_of
from outfitter_service.query.ledger_view import LedgerView
from support.api import allocation, change, host_record, resource_of


def test_a_mig_instance_is_told_from_a_gpu_by_its_profile(capsys: pytest.CaptureFixture[str]) -> None:
    properties = {"model": "NVIDIA H100", "memory.total_bytes": str(40448 * 1024**2)}
    gpus = [
        InventoryDevice(id="MIG-5c6f", properties={"index": "0:0", "mig.profile": "3g.40gb", **properties}),
        InventoryDevice(id="GPU-8a56", properties={"index": "1", **properties}),
    ]
    host = host_record("h", resources={"gpu": resource_of(gpus)})
    _print_table([entry.line() for entry in entries_of(LedgerView(), host)])
    heading, *rows = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    assert [word.strip() for word in heading if word][:7] == [
        "HOST", "RESOURCE", "INDEX", "DEVICE", "MODEL", "MIG", "MEMORY",
    ]  # fmt: skip
    assert {tuple(word.strip() for word in row if word)[3:7] for row in rows} == {
        ("MIG-5c6f", "NVIDIA H100", "3g.40gb", "39.5 GiB"), ("GPU-8a56", "NVIDIA H100", "-", "39.5 GiB"),
    }  # fmt: skip


def test_a_device_says_who_keeps_it_by_what_it_is_a_part_of(capsys: pytest.CaptureFixture[str]) -> None:
    gpus = [InventoryDevice(id=name, properties={"index": name}) for name in ("GPU-8a56", "MIG-5c6f", "MIG-5c70")]
    inventory = structs.replace(resource_of(gpus), parts={"GPU-8a56": ["MIG-5c6f", "MIG-5c70"]})
    host, ledger = host_record("h", resources={"gpu": inventory}), LedgerView()
    holder = allocation("h", "w", devices=["MIG-5c6f"], uses={"MIG-5c6f": ALONE, "GPU-8a56": PART})
    for record in (host, holder):
        ledger.put(change(record))
    _print_table([entry.line() for entry in entries_of(ledger, host)])
    rows = {row.split()[3]: row for row in capsys.readouterr().out.splitlines()[1:]}
    assert "healthy, kept by w" in rows["GPU-8a56"]
    assert "kept by" not in rows["MIG-5c6f"]
    assert "kept by" not in rows["MIG-5c70"]
