"""Workers' words in log lines: so much of each value, and so many lines a second."""

from __future__ import annotations

import json
import logging
from functools import partial

import pytest
import structlog

from outfitter_service import logs
from outfitter_service.runtime.processor.reporting import reporter
from runtime.conftest import Serve
from support.managers.in_process import deregister, register, static


def test_a_value_of_a_line_is_cut_at_a_thousand_characters(capfd: pytest.CaptureFixture[str]) -> None:
    logs.configure("json", "info")
    structlog.get_logger("outfitter.test").info("said", reason="x" * 60_000, short="y" * 1000)
    logging.getLogger("somebody.else").warning("z" * 5000)
    ours, others = map(json.loads, capfd.readouterr().err.splitlines())
    assert ours["reason"] == f"{'x' * 1000}… (60000 characters)"
    assert ours["short"] == "y" * 1000
    assert others["event"] == f"{'z' * 1000}… (5000 characters)"


class SpeechlessError(Exception):
    """An exception whose message ends the process."""

    def __str__(self) -> str:
        raise SystemExit("no words")


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_traceback_shows_no_values_and_needs_no_message(capfd: pytest.CaptureFixture[str], log_format: str) -> None:
    logs.configure(log_format, "info")
    password = "hun" + "ter2"
    try:
        raise SpeechlessError(password)
    except SpeechlessError:
        structlog.get_logger("outfitter.test").exception("failed")
    said = capfd.readouterr().err
    assert "SpeechlessError" in said
    assert "test_log_bounds.py" in said
    assert password not in said


def test_beyond_so_many_lines_a_second_none_is_given_out() -> None:
    now = 7.0
    lines = reporter.LineLimiter(lambda: now)
    assert [lines.allow(20) for _ in range(4)] == [20, 20, 10, 0]
    now = 8.0
    assert lines.allow(20) == 20


async def test_what_has_no_line_of_its_own_is_counted(
    serve: Serve, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporter, "LINES_A_SECOND", 10)
    second = 1.0
    lines_of_second = partial(reporter.LineLimiter, lambda: second)  # the event loop's time goes on
    monkeypatch.setattr(reporter, "LineLimiter", lines_of_second)
    async with serve(static(2)) as manager:
        for number in range(20):
            await manager.say(register(f"w{number}", gpu=1), deregister(f"w{number}"))
        await manager.state("w19", "ended")
        await manager.reported()
        second = 2.0
        await manager.say(register("last", gpu=1))
        await manager.state("last", "allocated")
        await manager.reported()
    lines = capsys.readouterr().out.splitlines()
    told = [line for line in lines if "explanation=" in line]
    counted = [int(line.partition("more=")[2].split()[0]) for line in lines if "and more transitions" in line]
    assert len(told) + sum(counted) == 41
    assert len([line for line in told if "worker=last" not in line]) <= 10
