"""The command line's edge: words and codes instead of tracebacks, in any terminal, pipe and locale."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from outfitter_service.cli import COMMANDS, _guarded, outfitter
from outfitter_service.cli._lib import options
from outfitter_service.cli._lib.errors import describe, leaves
from outfitter_service.cli._lib.lazy import CommandEntry
from outfitter_service.query.errors import OutfitterCliError
from support.processes import command_line


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> dict[str, BaseException | int | None]:
    """Commands `fail` and `guard` that raise (or return) what is put under "with"."""
    outcome: dict[str, BaseException | int | None] = {"with": None}

    @click.command()
    def fail() -> object:
        if isinstance(outcome["with"], BaseException):
            raise outcome["with"]
        return outcome["with"]

    monkeypatch.setattr(sys.modules[__name__], "fail", fail, raising=False)
    here = f"{__name__}:fail"
    entries = {"fail": CommandEntry(here, "Fail."), "guard": CommandEntry(here, "Fail differently.", failure=125)}
    monkeypatch.setattr(outfitter, "entries", entries)
    return outcome


def test_version_and_help_say_what_they_are_asked(tmp_path: Path) -> None:
    version = command_line.outfitter("--version", cwd=tmp_path)
    assert (version.returncode, version.stdout) == (0, "outfitter 0.2.0\n")
    for flag in ("-h", "--help"):
        helped = command_line.outfitter(flag, cwd=tmp_path)
        assert helped.returncode == 0
        assert all(f"  {name} " in helped.stdout for name in COMMANDS)


def test_starting_imports_no_command_and_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys, outfitter_service.cli; heavy = {'rich', 'ruamel', 'msgspec', 'aiohttp', 'structlog', 'anyio', "
        "'aiokafka', 'asyncio', 'outfitter_service.config', 'prometheus_client'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, timeout=60)


def test_a_connection_is_found_without_loading_what_a_manager_needs(tmp_path: Path) -> None:
    (tmp_path / "outfitter.toml").write_text('bus = "kafka://x:1"\n')
    code = (
        "import sys; from outfitter_service.config import connection; assert connection().bus == 'kafka://x:1'; "
        "heavy = {'rich', 'ruamel', 'aiohttp', 'structlog', 'aiokafka', 'asyncio', 'importlib.metadata'} "
        "& set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, timeout=60, env={"HOME": "/"})


def test_a_time_is_the_same_option_in_every_command_that_takes_one() -> None:
    found: dict[str, list[tuple[object, ...]]] = {"since": [], "until": []}
    context = click.Context(outfitter)
    for name in COMMANDS:
        # loading a command completes its options: one that is only imported differs from those that ran before
        command = outfitter.get_command(context, name)
        assert command, name
        for parameter in command.params:
            if isinstance(parameter, click.Option) and parameter.name in found:
                found[parameter.name].append((parameter.metavar, parameter.help, parameter.type, parameter.callback))
    assert [len(found[name]) for name in found] == [3, 1]
    assert [set(each) for each in found.values()] == [{each[0]} for each in found.values()]
    assert found["since"][0][3] is found["until"][0][3] is options.moment


def test_an_unknown_command_is_a_usage_error_with_the_nearest_one(tmp_path: Path) -> None:
    done = command_line.outfitter("statsu", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "outfitter: No such command 'statsu'. Did you mean 'status'? (see `outfitter --help`)\n"


def test_a_group_without_a_command_shows_its_help_on_standard_error(tmp_path: Path) -> None:
    for arguments in ((), ("config",)):
        done = command_line.outfitter(*arguments, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("Usage: outfitter")


def test_a_commands_number_is_the_exit_code(failing: dict[str, object]) -> None:
    for returned, code in ((None, 0), (0, 0), (7, 7)):
        failing["with"] = returned
        assert _guarded(["fail"]) == code


def test_a_known_error_is_one_line_and_its_own_code(
    failing: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    failing["with"] = OutfitterCliError("no such worker; known are a, b")
    assert (_guarded(["fail"]), _guarded(["guard"])) == (1, 125)
    failing["with"] = OutfitterCliError("waited too long", exit_code=124)
    assert _guarded(["guard"]) == 124
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == [
        "outfitter: no such worker; known are a, b",
        "outfitter: no such worker; known are a, b",
        "outfitter: waited too long",
    ]


def test_a_usage_error_of_run_is_not_mistaken_for_its_childs_code(failing: dict[str, object]) -> None:
    assert _guarded(["fail", "--nope"]) == 2
    assert _guarded(["guard", "--nope"]) == 125


def test_a_defect_is_called_one_and_shows_its_traceback_only_with_debug(
    failing: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    failing["with"] = KeyError("x")
    assert _guarded(["fail"]) == 1
    quiet = capsys.readouterr().err
    assert "Traceback" not in quiet
    assert quiet.startswith("outfitter: internal error: KeyError")
    for arguments in (["--debug", "fail"], ["fail", "--debug"]):
        assert _guarded(arguments) == 1
        assert "Traceback" in capsys.readouterr().err


def test_an_interrupt_ends_without_a_word(failing: dict[str, object], capsys: pytest.CaptureFixture[str]) -> None:
    failing["with"] = KeyboardInterrupt()
    assert _guarded(["fail"]) == 130
    assert capsys.readouterr().err == ""


def test_the_causes_in_a_group_are_told_one_by_one() -> None:
    inner = ExceptionGroup("b", [OutfitterCliError("two"), OutfitterCliError("one")])
    group = ExceptionGroup("a", [OutfitterCliError("one"), inner])
    assert [describe(leaf) for leaf in leaves(group)] == ["one", "two"]


def test_an_operating_systems_error_names_the_file() -> None:
    assert describe(FileNotFoundError(2, "No such file or directory", "/x")) == "/x: No such file or directory"


def test_a_missing_extra_is_named() -> None:
    assert "the extra `service`" in describe(ModuleNotFoundError("No module named 'rich'", name="rich"))
    assert "internal error" in describe(
        ModuleNotFoundError("No module named 'outfitter_service.x'", name="outfitter_service.x")
    )


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    code = "from outfitter_service.cli import main; main()"
    for arguments in (["schema"], ["--help"], ["--version"]):
        command = [sys.executable, "-c", code, *arguments]
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, cwd=tmp_path, timeout=60)
        assert (done.returncode, done.stderr) == (128 + 13, b"")
    os.close(writer)


def test_names_that_are_no_text_can_be_printed(tmp_path: Path) -> None:
    done = command_line.outfitter("config", "check", os.fsdecode(b"\xff.toml"), cwd=tmp_path)
    assert done.returncode == 1
    assert "udcff.toml" in done.stdout
    assert "cannot be read" in done.stdout


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    command = f"{sys.executable} -c 'from outfitter_service.cli import main; main()' schema > /dev/full"
    done = subprocess.run(["bash", "-c", command], capture_output=True, cwd=tmp_path, timeout=60)
    assert (done.returncode, done.stderr) == (1, b"outfitter: standard output: No space left on device\n")


@pytest.mark.parametrize(
    "environment",
    [{"LC_ALL": "C"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}, {"PYTHONIOENCODING": "ascii"}, {"NO_COLOR": "1"}],
    ids=str,
)
def test_any_locale_will_do(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "x.yaml").write_text("external-resources: gpu;gpü", encoding="utf-8")
    done = command_line.outfitter("config", "check", "x.yaml", cwd=tmp_path, environment=environment)
    assert done.returncode == 1
    assert "gp" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


LOOKING = (
    ["status"],
    ["devices"],
    ["explain", "w"],
    ["history"],
    ["replay"],
    ["watch"],
    ["dead-letters"],
    ["api"],
    ["verify"],
    ["topics", "check"],
    ["backup", "--out", "file"],
    ["deregister", "--worker", "w"],
    ["register", "--worker", "w"],
    ["orders"],
    ["cordon", "h", "--reason", "x"],
    ["uncordon", "h"],
)


@pytest.mark.parametrize("command", LOOKING, ids=" ".join)
def test_a_command_that_only_looks_makes_no_bus_where_a_path_is_mistyped(tmp_path: Path, command: list[str]) -> None:
    path = tmp_path / "nope" / "bus.db"
    done = command_line.outfitter(*command, cwd=tmp_path, environment={"OUTFITTER_BUS": f"sqlite://{path}"})
    assert done.returncode not in (0, None)
    assert str(path) in done.stderr
    assert "there is no" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [["run", "--", "true"], ["hold", "--no-stdin"]], ids=" ".join)
def test_a_worker_makes_no_directory_where_a_path_is_mistyped(tmp_path: Path, command: list[str]) -> None:
    path = tmp_path / "nope" / "bus.db"
    done = command_line.outfitter(*command, cwd=tmp_path, environment={"OUTFITTER_BUS": f"sqlite://{path}"})
    assert done.returncode == 125
    assert f"there is no bus at {path}" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_topics_create_makes_the_bus(tmp_path: Path) -> None:
    path = tmp_path / "new" / "bus.db"
    done = command_line.outfitter("topics", "create", cwd=tmp_path, environment={"OUTFITTER_BUS": f"sqlite://{path}"})
    assert done.returncode == 0, done.stderr
    assert path.exists()
