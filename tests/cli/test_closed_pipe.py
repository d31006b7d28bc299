"""Whatever a command prints, a reader that has gone is no defect: one exit code, and no word. What cannot be written
for another reason is an error that names standard output."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from outfitter_service.cli import COMMANDS
from support.managers.process import OUTFITTER, Manager, files_config
from support.processes.standard_error import redirected

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
    "cordon": ["cordon", "--help"],
    "uncordon": ["uncordon", "--help"],
    "orders": ["orders", "--help"],
    "doctor": ["doctor"],
    "config": ["config", "show"],
    "schema": ["schema"],
    "completion": ["completion", "bash"],
    "kubernetes": ["kubernetes", "--help"],
    "yarn": ["yarn", "resources"],
    "demo": ["demo"],
    "register": ["register", "--help"],
    "deregister": ["deregister", "--help"],
    "nvidia": ["nvidia", "--help"],
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
WHOLE: dict[str, list[str]] = {
    "register": ["register", "--worker", "w", "--lease", "none"],
    "deregister": ["deregister", "--worker", "nobody-{}", "--wait", "0"],
    "hold": ["hold", "--worker", "w-{}", "--no-stdin"],
    "history": ["history", "--follow"],
    "top": ["top"],
    "backup": ["backup", "--out", "{}.backup"],
    "orders": ["orders", "--json"],
    "pod-template": ["kubernetes", "pod-template", "{}.yaml"],
    "version": ["--version"],
    "help": ["--help"],
}
"""What they print when they have done their work."""
FOLLOWING = (
    ["watch", "--host", "nobody"],
    ["history", "--follow", "--host", "nobody"],
    ["dead-letters", "--follow"],
)
"""They wait for what there is to print."""
MUTE = ("/dev/full", "closed")
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


@contextmanager
def broken(kind: str) -> Iterator[tuple[str, int]]:
    """A shell's redirection and a descriptor, for a standard output that takes nothing."""
    reader, writer = os.pipe() if kind == "pipe" else (None, os.open("/dev/full", os.O_WRONLY))
    if reader is not None:
        os.close(reader)
    try:
        yield ">&-" if kind == "closed" else "", writer
    finally:
        os.close(writer)


def ended(
    manager: Manager, arguments: list[str], kind: str = "pipe", program: Sequence[str] = OUTFITTER
) -> tuple[int, str]:
    """The exit code and standard error of a command whose output nobody takes."""
    environment = {**manager.environment, "OUTFITTER_CONFIG": str(manager.config)}
    with broken(kind) as (redirection, writer):
        command = redirected([*program, *arguments], redirection)
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=writer, stderr=subprocess.PIPE, env=environment,
            cwd=manager.folder, timeout=100,
        )  # fmt: skip
    return done.returncode, done.stderr.decode()


def refused(manager: Manager, name: str, arguments: list[str], kind: str) -> None:
    """The command ends with its code for failures, and with one sentence that names standard output."""
    code, words = ended(manager, arguments, kind)
    failure = COMMANDS[name].failure if name in COMMANDS else 1
    assert code == failure, words
    why = "standard output is closed" if kind == "closed" else "standard output: No space left on device"
    assert words.count(why) == 1, words
    assert words.splitlines()[-1].startswith("outfitter: "), words
    assert "Traceback" not in words
    assert "defect" not in words


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


@pytest.mark.parametrize("kind", MUTE)
@pytest.mark.parametrize("name", PRINTING)
def test_what_takes_nothing_is_an_error_that_names_standard_output(manager: Manager, name: str, kind: str) -> None:
    refused(manager, name, PRINTING[name], kind)


@pytest.mark.parametrize("kind", MUTE)
@pytest.mark.parametrize("name", WHOLE)
def test_so_it_is_for_what_is_printed_after_the_work(manager: Manager, name: str, kind: str) -> None:
    (manager.folder / f"{kind[-4:]}.yaml").write_text("kind: Pod\nspec: {containers: [{name: flink-main-container}]}\n")
    refused(manager, name, [word.format(kind[-4:]) for word in WHOLE[name]], kind)


@pytest.mark.parametrize("arguments", FOLLOWING, ids=" ".join)
def test_what_waits_for_something_to_print_does_not_begin_without_standard_output(
    manager: Manager, arguments: list[str]
) -> None:
    refused(manager, arguments[0], arguments, "closed")


@pytest.mark.parametrize("kind", ["pipe", *MUTE])
def test_what_hold_could_not_tell_its_owner_of_is_given_back(manager: Manager, kind: str) -> None:
    worker = f"untold-{kind[-4:]}"
    code, words = ended(manager, ["hold", "--worker", worker, "--resource", "gpu=1", "--no-stdin"], kind)
    assert code == (141 if kind == "pipe" else 125), words
    record = manager.record(worker)
    assert record is None or manager.wait_for_state(worker, "ended")["reason_code"] in {"deregistered", "withdrawn"}


@pytest.mark.parametrize("kind", ["pipe", *MUTE])
def test_run_does_not_mind_what_its_command_does_not_print(manager: Manager, kind: str) -> None:
    code, words = ended(manager, ["run", "--worker", f"run-{kind[-4:]}", "--", "true"], kind)
    waited = re.compile(r"outfitter: (.*: waits for .*|has gpu: \d after \d+s)")  # for an earlier test's worker
    assert (code, [line for line in words.splitlines() if not waited.fullmatch(line)]) == (0, [])


@pytest.mark.parametrize("kind", ["pipe", *MUTE])
def test_the_checker_alone_says_so_too_and_reports_no_violation(manager: Manager, kind: str) -> None:
    program = (sys.executable, "-m", "outfitter_verify")
    code, words = ended(manager, [manager.bus_url, manager.cluster], kind, program)
    assert code == 2, words
    assert words.startswith("outfitter_verify: standard output: ")
