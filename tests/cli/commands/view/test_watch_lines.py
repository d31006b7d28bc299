"""The lines of `outfitter watch` for records that it has no text for: nothing that changes is passed over."""

from __future__ import annotations

import msgspec
import pytest

from outfitter_proto.bus import Message
from outfitter_service.cli.commands.view.watch import _Words
from outfitter_service.query.ledger_view import RecordChange, decode


class Cordon(msgspec.Struct, tag_field="type", tag="cordon"):
    """A kind of record that was added without a text."""

    host: str


def message(value: bytes | None) -> Message:
    return Message("allocations", 0, 0, b"@device/h/gpu0", value, 0)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (RecordChange(message(b"{}"), Cordon(host="h")), "has a new record of type cordon"),  # type: ignore[arg-type]
        (decode(message(b'{"type":"of-next-year"}')), "has a record that this version cannot read"),
    ],
    ids=["of a kind without a text", "of a later version"],
)
def test_a_record_without_a_text_of_its_own_has_a_line_with_its_key(
    change: RecordChange, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _Words().show(None, change)
    assert capsys.readouterr().out.endswith(f"  @device/h/gpu0  {line}\n")


def test_a_deleted_record_that_was_not_shown_before_has_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    _Words().show(None, decode(message(None)))
    assert capsys.readouterr().out == ""
