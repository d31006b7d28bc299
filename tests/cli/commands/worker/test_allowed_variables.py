"""A variable of a record that neither selects devices nor is allowed: no command begins with or without it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cli.commands.worker.conftest import PATIENCE
from cli.commands.worker.holding import read_line
from outfitter.testing import FakeOutfitter
from support.managers.process import OUTFITTER, environment
from support.managers.scripted import ScriptedManager

LINE = "set OUTFITTER_ALLOW_ENV=LICENCE_FILE in its environment"
Outfitter = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def outfitter(tmp_path: Path) -> Iterator[Outfitter]:
    """Starts a command of a worker whose devices set LICENCE_FILE."""
    fake = FakeOutfitter({"gpu": [{"id": "a"}]}, env={"CUDA_VISIBLE_DEVICES": "a", "LICENCE_FILE": "/etc/licences/a"})
    url = f"sqlite://{tmp_path}/bus/bus.db?synchronous=NORMAL"

    def start(command: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*OUTFITTER, command, "--bus", url, "--host", "h", *arguments], env=environment(**variables),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    with ScriptedManager(url, "h", fake):
        yield start


def test_run_does_not_begin_and_says_what_to_add(outfitter: Outfitter, tmp_path: Path) -> None:
    out, err = outfitter("run", "--", "touch", f"{tmp_path}/begun").communicate(timeout=PATIENCE)
    assert out == ""
    assert LINE in err
    assert not (tmp_path / "begun").exists()


@pytest.mark.parametrize("way", ["option", "variable"])
def test_run_begins_with_a_variable_that_is_allowed_and_its_contexts_know(outfitter: Outfitter, way: str) -> None:
    show = (
        "import json, os; from outfitter import RuntimeContext\n"
        "with RuntimeContext() as context: print(json.dumps([os.environ['LICENCE_FILE'], context.env['LICENCE_FILE']]))"
    )
    arguments = ["--allow-env", "LICENCE_FILE"] if way == "option" else []
    variables = {} if way == "option" else {"OUTFITTER_ALLOW_ENV": "OTHER,LICENCE_FILE"}
    process = outfitter("run", *arguments, "--", sys.executable, "-c", show, **variables)
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, json.loads(out or "0")) == (0, ["/etc/licences/a"] * 2), err


def test_run_exits_as_outfitter_that_failed(outfitter: Outfitter) -> None:
    process = outfitter("run", "--", "true")
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 125


def test_hold_prints_no_devices_and_gives_them_back(outfitter: Outfitter) -> None:
    with outfitter("hold", "--worker", "w") as process:
        line = read_line(process)
        assert (line["type"], line["code"]) == ("error", "variable-not-allowed")
        assert LINE in line["reason"]
        process.communicate(timeout=PATIENCE)
    assert process.returncode == 125
    out, err = outfitter("status", "--all", "--json").communicate(timeout=PATIENCE)
    assert [allocation["state"] for allocation in json.loads(out)] == ["ended"], err


def test_hold_prints_a_variable_that_is_allowed(outfitter: Outfitter) -> None:
    with outfitter("hold", "--worker", "w", "--allow-env", "LICENCE_FILE") as process:
        assert read_line(process)["env"]["LICENCE_FILE"] == "/etc/licences/a"
        process.communicate(timeout=PATIENCE)


def test_the_option_adds_to_what_the_environment_allows(outfitter: Outfitter) -> None:
    """In either place may stand what the devices set; the command and its contexts get both."""
    for option, variable in (("LICENCE_FILE", "OTHER"), ("OTHER", "MORE, LICENCE_FILE")):
        show = "import os; print(os.environ['LICENCE_FILE'], os.environ['OUTFITTER_ALLOW_ENV'])"
        command = ("run", "--allow-env", option, "--", sys.executable, "-c", show)
        process = outfitter(*command, OUTFITTER_ALLOW_ENV=variable)
        out, err = process.communicate(timeout=PATIENCE)
        allowed = {option, *variable.replace(",", " ").split()}
        assert (process.returncode, out.split()) == (0, ["/etc/licences/a", ",".join(sorted(allowed))]), err
        with outfitter("hold", "--worker", option, "--allow-env", option, OUTFITTER_ALLOW_ENV=variable) as holding:
            assert read_line(holding)["env"]["LICENCE_FILE"] == "/etc/licences/a"
            holding.communicate(timeout=PATIENCE)


@pytest.mark.parametrize("command", [("run", "--", "true"), ("hold",)])
def test_the_variable_is_named_if_it_has_what_cannot_be_allowed(outfitter: Outfitter, command: tuple[str, ...]) -> None:
    process = outfitter(command[0], "--allow-env", "OTHER", *command[1:], OUTFITTER_ALLOW_ENV="LD_PRELOAD")
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 125
    assert "for OUTFITTER_ALLOW_ENV: 'LD_PRELOAD' cannot be allowed to any record" in err


@pytest.mark.parametrize("command", [("run", "--", "true"), ("hold",)])
def test_what_decides_about_code_cannot_be_allowed(outfitter: Outfitter, command: tuple[str, ...]) -> None:
    process = outfitter(command[0], "--allow-env", "LD_PRELOAD", *command[1:])
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 125
    assert "'LD_PRELOAD' cannot be allowed to any record: it can decide which code a process runs" in err
