"""How results look."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import termios
from datetime import UTC, datetime
from pathlib import Path

import click
import pytest

from outfitter_service.cli._lib import options, output

AGES = {0: "0s", 0.4: "0s", 59.9: "59s", 60: "1m", 3_599: "59m", 3_600: "1h", 86_399: "23h", 172_800: "2d"}


@pytest.mark.parametrize("seconds", AGES)
def test_an_age_is_one_number_and_one_unit(seconds: float) -> None:
    assert output.age(seconds) == AGES[seconds]


def test_a_table_in_a_pipe_has_no_borders_and_cuts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_table(["worker", "state"], [["tm-1", "allocated"], ["x" * 300, None], ["[bold]", "ü"]])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["WORKER", "STATE"]
    assert [line.split() for line in lines[1:]] == [["tm-1", "allocated"], ["x" * 300, "-"], ["[bold]", "ü"]]


def test_one_very_long_name_widens_no_row_but_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_table(["worker", "state"], [["tm-1", "allocated"], ["x" * 253, "pending"], ["サーバ", "ended"]])
    assert capsys.readouterr().out.splitlines() == [
        "WORKER  STATE",
        "tm-1    allocated",
        "x" * 253 + "  pending",
        "サーバ  ended",
    ]
    output.print_table(["x" * 100], [["y" * 100]])
    assert capsys.readouterr().out.splitlines() == ["X" * 100, "y" * 100]


def test_many_rows_are_printed_without_what_wraps_them(tmp_path: Path) -> None:
    code = (
        "import sys; from outfitter_service.cli._lib.output import print_table;"
        "print_table(['worker'], [[str(row)] for row in range(6000)]); assert 'rich' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines() == ["WORKER", *map(str, range(6000))]
    code = f"from outfitter_service.cli._lib import output; output.MOST_WRAPPED = 0; {TABLE}"
    assert len(in_a_terminal(tmp_path, code, 50)) == 2


@pytest.mark.parametrize("no_color", [None, "1"])
def test_a_terminal_gets_no_escapes_when_told_no_color(tmp_path: Path, no_color: str | None) -> None:
    ours, theirs = pty.openpty()
    environment = {"PATH": os.environ["PATH"], "TERM": "xterm-256color"} | ({"NO_COLOR": no_color} if no_color else {})
    code = "from outfitter_service.cli._lib.output import print_table; print_table(['worker'], [['tm-1']])"
    subprocess.run([sys.executable, "-c", code], stdout=theirs, env=environment, cwd=tmp_path, check=True, timeout=60)
    os.close(theirs)
    shown = os.read(ours, 4_096)
    os.close(ours)
    assert b"WORKER" in shown
    assert (b"\x1b" in shown) == (no_color is None)


def test_json_has_plain_numbers_and_utc_times(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_json({"at": datetime(2026, 1, 2, tzinfo=UTC), "n": 1.5})
    assert capsys.readouterr().out == '{"at":"2026-01-02T00:00:00Z","n":1.5}\n'


def test_only_what_stands_on_the_command_line_counts_as_given(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[dict[str, str]] = []

    @click.command()
    @options.connection
    @click.pass_context
    def command(ctx: click.Context, **_values: str | None) -> None:
        found.append(options.given(ctx))

    monkeypatch.setenv("OUTFITTER_BUS", "kafka://x:1")
    command.main(["--host", "gpu-3"], standalone_mode=False)
    assert found == [{"host": "gpu-3"}]
    with pytest.raises(click.BadParameter, match="not a valid name"):
        command.main(["--cluster", "a/b"], standalone_mode=False)


def in_a_terminal(folder: Path, code: str, columns: int) -> list[str]:
    """What `code` shows in a terminal that is so wide."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (50, columns))
    environment = {"PATH": os.environ["PATH"], "TERM": "xterm", "NO_COLOR": "1"}
    subprocess.run([sys.executable, "-c", code], stdout=theirs, env=environment, cwd=folder, check=True, timeout=60)
    os.close(theirs)
    shown = os.read(ours, 65_536).decode()
    os.close(ours)
    return [line.rstrip() for line in shown.splitlines()]


TABLE = (
    "from outfitter_service.cli._lib.output import print_table;"
    "print_table(['worker', 'state', 'reason'], [['worker-13529-ddf41d', 'allocated', 'waits for 1 gpu: 0 of 1 free']])"
)


def test_a_table_is_wrapped_between_words_and_no_word_is_broken(tmp_path: Path) -> None:
    assert len(in_a_terminal(tmp_path, TABLE, 80)) == 2
    narrower = in_a_terminal(tmp_path, TABLE, 50)
    assert len(narrower) > 2
    assert all(len(line) <= 50 for line in narrower)
    for columns in (30, 10):  # no room for the words: the terminal breaks the lines as it likes
        lines = in_a_terminal(tmp_path, TABLE, columns)
        assert lines == [
            "WORKER               STATE      REASON",
            "worker-13529-ddf41d  allocated  waits for 1 gpu: 0 of 1 free",
        ]


def test_a_long_line_goes_on_indented(tmp_path: Path) -> None:
    code = "from outfitter_service.cli._lib.output import say_wrapped; say_wrapped('word ' * 30)"
    first, *more = in_a_terminal(tmp_path, code, 60)
    assert len(first) <= 60
    assert all(line.startswith("    word") and len(line) <= 60 for line in more)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert len(done.stdout.splitlines()) == 1
