"""What cannot be read is passed over with a log line: the read side itself prints nothing."""

from __future__ import annotations

import logging

import pytest

from outfitter_proto.bus import Message
from outfitter_service.query import ledger_view


def test_a_record_that_cannot_be_read_is_logged_and_not_printed(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.WARNING, logger="outfitter.query"):
        change = ledger_view.decode(Message("t", 0, 0, b"h/w/1", b"no JSON", 0))
    assert change.record is None
    assert [record.message.partition(":")[0] for record in caplog.records] == ["skipped a record that cannot be read"]
    assert "skipped" not in capfd.readouterr().out + capfd.readouterr().err
