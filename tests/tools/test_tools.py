"""A tool is where a variable says, on the PATH or in `.cache`; a kind runs if it is asked for, with all its tools."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.documents import ROOT
from support.kinds import TESTS, kinds_of
from tools import KINDS, MissingToolError, table, tool
from tools.ways import by_hand

CONSOLE = "tests/console/test_keys.py"
PLAIN = "tests/wire/test_golden.py"


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty `.cache`, and the tool `thing` that a way puts there."""

    def way(folder: Path) -> None:
        (folder / "bin").mkdir()
        (folder / "bin" / "thing").write_text("new")

    monkeypatch.setattr(table, "CACHE", tmp_path / "cache")
    monkeypatch.setitem(table.TOOLS, "thing", table.Tool(way, "thing-1", "bin/thing", ("thing-of-nobody",)))
    monkeypatch.delenv("THING", raising=False)
    return tmp_path / "cache"


def test_a_tool_that_is_nowhere_is_named_with_the_command_that_fetches_it(cache: Path) -> None:
    with pytest.raises(MissingToolError, match=r"there is no thing: run `.* -m tools thing`"):
        tool("thing")


def test_a_fetched_tool_is_found_and_not_fetched_again(cache: Path) -> None:
    here = table.fetch("thing")
    assert here == cache / "thing-1" / "bin" / "thing"
    here.write_text("kept")
    assert table.fetch("thing").read_text() == "kept"
    assert [path.name for path in cache.iterdir()] == ["thing-1"]


def test_a_tool_is_there_whole_or_not_at_all(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(folder: Path) -> None:
        (folder / "bin").mkdir()
        (folder / "bin" / "thing").touch()
        raise OSError("no room")

    monkeypatch.setitem(table.TOOLS, "thing", table.TOOLS["thing"]._replace(way=breaks))
    with pytest.raises(OSError, match="no room"):
        table.fetch("thing")
    assert list(cache.iterdir()) == []


def test_a_variable_comes_first_and_then_the_path(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    table.fetch("thing")
    program = tmp_path / "thing-of-nobody"
    program.touch(mode=0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert tool("thing") == program
    monkeypatch.setenv("THING", "/opt/thing")
    assert tool("thing") == Path("/opt/thing")


def test_what_nothing_fetches_says_what_to_do(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(table.TOOLS, "thing", table.Tool(by_hand("install it")))
    with pytest.raises(SystemExit, match="install it"):
        table.fetch("thing")


def test_makefile_marks_files_and_table_have_the_same_kinds() -> None:
    (named,) = re.findall("^KINDS := (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    marks = {mark.partition(":")[0] for mark in settings["markers"]}
    said = {kind for file in TESTS.rglob("test_*.py") for kind in kinds_of(file)}
    assert set(named.split()) == set(KINDS) == said == marks - {"kafka", "slow"}
    assert {name for names in KINDS.values() for name in names} <= table.TOOLS.keys()


def test_a_file_says_its_kind_for_all_its_tests() -> None:
    """A mark at a single test would not keep the file from being imported."""
    for file in TESTS.rglob("test_*.py"):
        said = set(re.findall(r"pytest\.mark\.(\w+)", file.read_text())) & KINDS.keys()
        assert said == kinds_of(file) or file == Path(__file__), file


def collected(*arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    """What pytest would run, of two files."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "--quiet", "-p", "no:cacheprovider", *arguments]
    env = {"PATH": path, "PYTHONDONTWRITEBYTECODE": "1"} if path is not None else None
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)


@pytest.mark.parametrize("arguments", [[CONSOLE], ["tests/console"], ["-m", "console"], [PLAIN, CONSOLE]], ids=str)
def test_whoever_asks_for_a_kind_without_its_tools_hears_which_are_missing(
    arguments: Sequence[str], tmp_path: Path
) -> None:
    """On a PATH without Node.js, in whatever state `.cache` is."""
    done = collected(*arguments, path=str(tmp_path))
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "console needs node" in done.stderr
    assert "-m tools console" in done.stderr


@pytest.mark.parametrize("marks", ["not slow", "not console"])
def test_a_kind_that_the_marks_leave_out_is_not_even_imported(marks: str, tmp_path: Path) -> None:
    """A folder's files, that is: pytest imports a file that is named, whatever it is told."""
    done = collected("tests/console", "-m", marks, path=str(tmp_path))
    assert "no tests" in done.stdout, done.stdout + done.stderr
    assert done.returncode in {pytest.ExitCode.NO_TESTS_COLLECTED, pytest.ExitCode.OK}


def test_a_run_of_everything_has_no_other_kinds() -> None:
    """`tests` is no path below `tests`. Most folders are left out here, to be quick."""
    done = collected("tests", "--ignore-glob=*/test_[!gk]*", "--ignore-glob=*/[!wct]*/test_*")
    assert "tests/wire/test_golden.py" in done.stdout, done.stdout + done.stderr
    assert CONSOLE not in done.stdout
