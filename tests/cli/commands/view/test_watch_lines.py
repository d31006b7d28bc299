"""The lines of `outfitter watch` for records that it has no text for: nothing that changes is passed over."""

from __future__ import annotations

import msgspec
import pytest
from msgspec import structs

from outfitter_proto.bus import Message
from outfitter_proto.records import InventoryDevice
from outfitter_service.cli.commands.view.watch import _Words
from outfitter_service.query.ledger_view import RecordChange, decode
from support.api import allocation, cordon, deletion, host_record, resource_of
from support.api import change as changed


class Lamp(msgspec.Struct, tag_field="type", tag="lamp"):
    """A kind of record that was added without a text."""

    host: str


def message(value: bytes | None) -> Message:
    return Message("allocations", 0, 0, b"@device/h/gpu0", value, 0)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (RecordChange(message(b"{}"), Lamp(host="h")), "has a new record of type lamp"),  # type: ignore[arg-type]
        (decode(message(b'{"type":"of-next-year"}')), "has a record that this version cannot read"),
    ],
    ids=["of a kind without a text", "of a later version"],
)
def test_a_record_without_a_text_of_its_own_has_a_line_with_its_key(
    change: RecordChange, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _Words().show(None, change)
    assert capsys.readouterr().out.endswith(f"  @device/h/gpu0  {line}\n")


def test_an_order_has_a_line_when_it_comes_into_effect_and_when_it_ends(capsys: pytest.CaptureFixture[str]) -> None:
    words = _Words()
    order = cordon("h", device="GPU-1", reason="XID 79")
    for change in (changed(order), changed(order), deletion(order), deletion(order)):
        words.show(None, change)
    lines = [line.partition("  ")[2] for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        *["h  the device GPU-1 cordoned: XID 79 (ada@ops-1, order k3v9-01)"] * 2,
        "h  the device GPU-1 cordoned no more by order k3v9-01",
    ]


def test_the_line_of_a_host_says_how_many_devices_are_cordoned(capsys: pytest.CaptureFixture[str]) -> None:
    gpus = resource_of([InventoryDevice(id="0"), InventoryDevice(id="1", cordon="k3v9-01")])
    _Words().show(None, changed(host_record("h", resources={"gpu": structs.replace(gpus, cordoned=1)})))
    assert "gpu: 2 devices, 2 healthy, 1 cordoned" in capsys.readouterr().out


def test_the_line_of_a_holder_says_which_of_its_devices_are_ill(capsys: pytest.CaptureFixture[str]) -> None:
    record = allocation("h", "w", devices=["GPU-0", "GPU-1"], token=1)
    ill = {"id": "GPU-1", "index": "1", "health": "unhealthy", "health.reason": "XID 79"}
    _Words().show(None, changed(structs.replace(record, resources={"gpu": [{"id": "GPU-0", "index": "0"}, ill]})))
    assert capsys.readouterr().out.endswith("  h/w  allocated  gpu: 0, 1 (gpu 1 is unhealthy (XID 79))\n")


def test_a_deleted_record_that_was_not_shown_before_has_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    _Words().show(None, decode(message(None)))
    assert capsys.readouterr().out == ""
