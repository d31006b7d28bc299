"""The systemd units, against the command line and each other: a unit with a wrong option fails at the next boot."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest

from outfitter_service.cli import outfitter as command_line
from support.documents import ROOT
from support.processes.command_line import outfitter

FOLDER = ROOT / "deploy" / "systemd"
PROGRAM = "/opt/outfitter/bin/outfitter"
UNITS = sorted(FOLDER.glob("*.service"))

DROP_INS = sorted(FOLDER.glob("kafka*.conf"))

units = pytest.mark.parametrize("unit", UNITS, ids=lambda unit: str(unit.name))


def values(unit: Path, key: str) -> list[str]:
    """What the unit sets `key` to, in its order."""
    return re.findall(rf"^{key}=(.*)$", unit.read_text(), re.MULTILINE)


def command(unit: Path, **specifiers: str) -> list[str]:
    """The arguments of the unit's only command, with systemd's specifiers replaced."""
    (line,) = values(unit, "ExecStart")
    for letter, value in specifiers.items():
        line = line.replace(f"%{letter}", value)
    program, *arguments = shlex.split(line)
    assert program == PROGRAM
    return arguments


@units
def test_the_command_line_understands_the_command_of_each_unit(unit: Path) -> None:
    name, *arguments = command(unit, i="worker-1", d="/run/credentials/x")
    found = command_line.get_command(click.Context(command_line), name)
    assert found is not None
    found.make_parser(click.Context(found)).parse_args(list(arguments))


@units
def test_users_and_groups_of_each_unit_are_made_by_sysusers(unit: Path) -> None:
    made = re.findall(r"^u (\S+)", (FOLDER / "sysusers.conf").read_text(), re.MULTILINE)
    assert {*values(unit, "User"), *values(unit, "Group")} <= {*made}


def test_the_workers_are_in_the_group_of_the_embedded_buss_directory() -> None:
    (kind, path, mode, _user, group, *_) = (FOLDER / "tmpfiles.conf").read_text().splitlines()[-1].split()
    assert (kind, path, mode) == ("d", "/var/lib/outfitter", "2770")
    assert f"m outfitter-worker {group}" in (FOLDER / "sysusers.conf").read_text().splitlines()


@units
def test_the_units_let_the_embedded_bus_make_its_set_group_id_directory(unit: Path) -> None:
    assert values(unit, "RestrictSUIDSGID") in ([], ["no"])


def test_each_credential_that_a_command_reads_is_loaded_and_no_other() -> None:
    for unit in [*UNITS, *DROP_INS]:
        loaded = {value.partition(":")[0] for value in values(unit, "LoadCredential")}
        assert {*re.findall(r"%d/([\w-]+)", unit.read_text())} == loaded


@pytest.mark.parametrize("drop_in", DROP_INS, ids=lambda drop_in: str(drop_in.name))
def test_with_a_drop_in_the_service_logs_in_by_its_own_credential(drop_in: Path, tmp_path: Path) -> None:
    password = tmp_path / "kafka-password"
    password.write_text("secret")
    (tmp_path / "outfitter.toml").write_text(
        'bus = "kafka://broker-1.example:9093"\n[kafka]\nsecurity-protocol = "SASL_SSL"\nsasl-username = "manager"\n'
    )
    given = dict(value.replace("%d", str(tmp_path)).split("=") for value in values(drop_in, "Environment"))
    arguments = ("--config", "outfitter.toml")
    assert outfitter("config", "check", *arguments, cwd=tmp_path).returncode  # the password is not in the file
    assert outfitter("config", "check", *arguments, cwd=tmp_path, environment=given).returncode == 0
    shown = outfitter("config", "show", *arguments, cwd=tmp_path, environment=given).stdout
    assert str(password) in shown
    assert ("worker" in shown) == ("worker" in drop_in.name)


def test_the_page_names_each_file() -> None:
    page = (FOLDER / "README.md").read_text()
    assert [path.name for path in FOLDER.iterdir() if f"({path.name})" not in page] == ["README.md"]


def test_the_managers_command_serves_until_sigterm_as_its_unit_says(tmp_path: Path) -> None:
    config = tmp_path / "outfitter.toml"
    config.write_text(f'bus = "sqlite:///{tmp_path}/bus/bus.db"\nhttp = "127.0.0.1:0"\n')
    arguments = command(FOLDER / "outfitter.service")
    arguments[arguments.index("--config") + 1] = str(config)
    with subprocess.Popen(
        [sys.executable, "-m", "outfitter_service.cli", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ},
    ) as manager:
        assert manager.stderr is not None
        try:
            assert any("metrics at" in line for line in manager.stderr)
        finally:
            manager.send_signal(signal.SIGTERM)
        manager.stderr.read()
    assert manager.returncode == 0
