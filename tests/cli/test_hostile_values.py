"""Whatever stands in an option or an argument of any command, the command says what is wrong with it."""

from __future__ import annotations

import importlib
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import click
import pytest

from outfitter_service.cli import COMMANDS, _guarded
from outfitter_service.cli._lib.overview import live
from outfitter_service.cli._lib.registration_options import Duration

HOSTILE = (
    "", " ", "\udce9", "x\udcffy", "\udcff/b/c", "a/\udcff", "x" * 70_000, "9" * 5000, "-" + "9" * 30,
    "9" * 21, "0", "-1", "1e9", "nan", "inf", "0001-01-01", "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00",
    "9999-12-31T23:59:59Z", "999999999999999d", "\x1b[2J", "a\nb", "\u202e", "=", "gpu=" + "9" * 5000, "x=\udcff", ":",
    "a:gpu=\udcff", "http://x",  "sqlite:///\udcff", "/dev/null", "/", "127.0.0.1:99999",
)  # fmt: skip
SPEAKING = {"serve", "run", "hold", "register", "deregister", "watch", "api"}
"""Commands that would wait for somebody: they are given no bus that there is."""


def leaves(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    if not isinstance(command, click.Group):
        yield name, command
        return
    for child in command.commands.values():
        yield from leaves(f"{name} {child.name}", child)


def commands() -> dict[str, click.Command]:
    """Every command that does something, by its words."""
    found: dict[str, click.Command] = {}
    for name, entry in COMMANDS.items():
        module, attribute = entry.target.split(":")
        found |= leaves(name, getattr(importlib.import_module(module), attribute))
    return found


ALL = commands()


@pytest.fixture(autouse=True)
def _signals_as_before() -> Iterator[None]:
    """`hold` and `run` block signals for good, since their process is about to end. This one goes on."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.fixture(scope="module")
def bus(tmp_path_factory: pytest.TempPathFactory) -> str:
    url = f"sqlite:///{tmp_path_factory.mktemp('bus')}/bus.db"
    assert _guarded(["topics", "create", "--bus", url]) == 0
    return url


def words(command: click.Command, tried: click.Parameter, value: str) -> list[str]:
    """A command line with `value` for one parameter, and something for every other one that must be there."""
    found = ["--no-stdin"] if command.name == "hold" else []  # the tests have no input whose end means something
    for parameter in command.params:
        given = value if parameter is tried else "x" if parameter.required else None
        if given is not None and isinstance(parameter, click.Option):
            found.append(f"{parameter.opts[-1]}={given}")
    given_arguments = [
        value if parameter is tried else "x"
        for parameter in command.params
        if isinstance(parameter, click.Argument) and (parameter is tried or parameter.required)
    ]
    return [*found, "--", *given_arguments] if given_arguments else found


@pytest.mark.parametrize("name", ALL)
def test_no_value_of_any_parameter_is_a_defect(
    name: str, bus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(live, "FIRST_WITHIN_S", 0.0)  # `top` waits for a cluster's first manager
    (tmp_path / "outfitter.toml").write_text("")
    nowhere = "http://x" if name == "serve" else f"sqlite:///{tmp_path}/nowhere/bus.db"
    there = nowhere if name in SPEAKING else bus
    for parameter in ALL[name].params:
        if isinstance(parameter, click.Option) and parameter.is_flag:
            continue
        for value in HOSTILE:
            told = words(ALL[name], parameter, value)
            if parameter.name != "bus" and any(each.name == "bus" for each in ALL[name].params):
                told = ["--bus", there, *told]
            with suppress(SystemExit):
                _guarded([*name.split(), *told])
            said = capsys.readouterr().err
            assert "internal error" not in said, f"{name} {told!a:.300}: {said[:1000]}"


@pytest.mark.parametrize("name", ALL)
def test_no_duration_is_longer_than_any_on_the_wire(name: str) -> None:
    """A timer or a date of a longer one may overflow."""
    for parameter in ALL[name].params:
        if isinstance(parameter.type, Duration):
            assert parameter.type.convert("366d", parameter, None) == 366 * 86_400
            for text in ("8784h1ms", "999999999999999d"):
                with pytest.raises(click.BadParameter, match="is longer than 366d"):
                    parameter.type.convert(text, parameter, None)
