"""What workers and drivers wrote reaches a terminal as text: it moves no cursor, sets no title, forges no line."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import outfitter_service
from outfitter_proto.support.printable import printable, printable_json
from outfitter_service.cli._lib import output
from outfitter_service.cli._lib.errors import print_error, warn
from outfitter_service.query.errors import OutfitterCliError
from support.managers.process import Manager, files_config

EVIL = "\x1b]0;PWNED\x07\x1b[2J\r\nh1  fake  allocated\x9b31m\u202egnp.exe\u2028and\x7f"
FORBIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")

anything = st.text(st.characters(), max_size=30)


@given(anything)
@example(EVIL)
@example("\ud800")
def test_any_text_becomes_one_line_of_what_can_be_printed(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert printable(shown) == shown


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


@given(st.dictionaries(text, text | st.lists(text), max_size=3))
@example({"reason": EVIL, "\U000e0001": "\U0001f600 ü"})
def test_json_says_the_same_with_nothing_in_it_that_cannot_be_printed(value: object) -> None:
    for indent in (None, 2):
        document = printable_json(json.dumps(value, ensure_ascii=False, indent=indent))
        assert json.loads(document) == value
        assert document.replace("\n", "").isprintable()


def test_letters_of_any_script_stay() -> None:
    assert printable("gpü-3 東京 Ω [bold] \\x1b") == "gpü-3 東京 Ω [bold] \\x1b"


def test_no_message_of_ours_can_hold_a_second_line(capsys: pytest.CaptureFixture[str]) -> None:
    output.say(f"a {EVIL}")
    output.print_table(["host", "reason"], [["h", EVIL]])
    output.print_json({"reason": EVIL})
    warn(EVIL)
    printed = capsys.readouterr()
    assert [len(text.splitlines()) for text in printed] == [4, 1]
    assert not FORBIDDEN.search("".join(printed))


def test_further_lines_of_an_error_are_indented(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(OutfitterCliError(f"one\noutfitter: two {EVIL}"), debug=False)
    first, *more = capsys.readouterr().err.splitlines()
    assert first == "outfitter: one"
    assert all(line.startswith("  ") for line in more)
    assert not FORBIDDEN.search("".join(more))


@pytest.fixture(scope="module")
def harmed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Manager]:
    """A host where a worker has deregistered for a reason of its own, and a device is ill for a reason of its own."""
    folder = tmp_path_factory.mktemp("harmed")
    manager = Manager(folder, files_config(folder / "gpus", gpus=1))
    manager.start()
    try:
        label = f"job={EVIL}"
        done = manager.outfitter("register", "--worker", "w", "--lease", "none", "--wait", "10", "--label", label)
        assert done.returncode == 0
        assert manager.outfitter("deregister", "--worker", "w", "--reason", EVIL).returncode == 0
        yield manager
    finally:
        manager.kill9()


@pytest.mark.parametrize(
    "arguments",
    ["status --all", "explain w", "history", "replay", "devices", "history --json", "status --json"],
)
def test_commands_show_escapes_and_line_breaks_as_text(harmed: Manager, arguments: str) -> None:
    done = harmed.outfitter(*arguments.split())
    assert done.returncode == 0, done.stderr
    assert not FORBIDDEN.search(done.stdout + done.stderr)
    assert not re.search(r"^h1 +fake", done.stdout, re.MULTILINE)
    if arguments != "devices":
        assert "PWNED" in done.stdout


def test_watch_shows_them_as_text(harmed: Manager) -> None:
    process = harmed.popen("watch", preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    assert process.stdout is not None
    assert "gpu" in process.stdout.readline()
    harmed.outfitter("register", "--worker", "v", "--lease", "none", "--wait", "10")
    harmed.outfitter("deregister", "--worker", "v", "--reason", EVIL)
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "PWNED" in line:
            break
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert not FORBIDDEN.search("".join(lines))
    assert "fake" in lines[-1]


def test_only_the_edge_prints() -> None:
    """Code that prints elsewhere forgets what the edge does. Without click there is no edge to print through."""
    prints = re.compile(r"click\.echo\(|(?<![.\w])print\(|sys\.std(out|err)\.write")
    service = Path(outfitter_service.__file__).parent
    found = {file.name for file in service.rglob("*.py") if prints.search(file.read_text())}
    assert found == {"output.py", "errors.py", "demonstration.py"}
