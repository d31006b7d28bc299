"""Whatever a command prints, a reader that has gone is no defect: one exit code, and no word."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from outfitter_service.cli import COMMANDS
from support.managers.process import OUTFITTER, Manager, files_config

pytestmark = pytest.mark.slow

PRINTING: dict[str, list[str]] = {
    "top": ["top", "--once"],
    "status": ["status"],
    "devices": ["devices"],
    "explain": ["explain", "w"],
    "history": ["history"],
    "replay": ["replay", "--at", "1s"],
    "watch": ["watch"],
    "dead-letters": ["dead-letters", "--help"],
    "discover": ["discover", "gpu"],
    "topics": ["topics", "check"],
    "verify": ["verify"],
    "doctor": ["doctor"],
    "config": ["config", "show"],
    "schema": ["schema"],
    "completion": ["completion", "bash"],
    "kubernetes": ["kubernetes", "--help"],
    "yarn": ["yarn", "resources"],
    "demo": ["demo"],
    "register": ["register", "--help"],
    "deregister": ["deregister", "--help"],
    "ledger": ["ledger", "--help"],
    "backup": ["backup", "--help"],
    "restore": ["restore", "--help"],
    "run": ["run", "--help"],
    "hold": ["hold", "--help"],
    "serve": ["serve", "--help"],
    "api": ["api", "--help"],
    "webhook": ["webhook", "--help"],
}
"""Of each command something that prints."""
AS_JSON = ("status", "devices", "explain", "history", "watch", "discover", "verify", "doctor")


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Manager]:
    """A manager and a worker."""
    folder = tmp_path_factory.mktemp("closed")
    manager = Manager(folder, files_config(folder / "gpus", extra="history = true"))
    manager.start()
    try:
        manager.outfitter("register", "--worker", "w", "--lease", "none", "--wait", "10")
        yield manager
    finally:
        manager.kill9()


def ended(manager: Manager, arguments: list[str]) -> tuple[int, str]:
    """The exit code and standard error of a command whose output nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    environment = {**manager.environment, "OUTFITTER_CONFIG": str(manager.config)}
    try:
        done = subprocess.run(
            [*OUTFITTER, *arguments], stdout=writer, stderr=subprocess.PIPE, env=environment, timeout=100
        )
    finally:
        os.close(writer)
    return done.returncode, done.stderr.decode()


def test_each_command_is_tried() -> None:
    assert set(PRINTING) == set(COMMANDS)


@pytest.mark.parametrize("arguments", PRINTING.values(), ids=" ".join)
def test_a_reader_that_has_gone_ends_a_command_with_the_code_of_sigpipe(manager: Manager, arguments: list[str]) -> None:
    code, words = ended(manager, arguments)
    assert code == 128 + signal.SIGPIPE, words
    assert "defect" not in words
    assert "Traceback" not in words


@pytest.mark.parametrize("command", AS_JSON)
def test_so_it_is_for_json(manager: Manager, command: str) -> None:
    code, words = ended(manager, [*PRINTING[command], "--json"])
    assert code == 128 + signal.SIGPIPE, words
    assert "defect" not in words
