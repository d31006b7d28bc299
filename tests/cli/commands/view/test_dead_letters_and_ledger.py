"""`outfitter dead-letters` and `outfitter ledger forget`, and what `outfitter status` says of lost messages."""

from __future__ import annotations

import json
import os
import pty
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import anyio
import pytest
from msgspec import structs

from outfitter_proto import names
from outfitter_proto.bus import Entry, connect
from outfitter_proto.records import DeadLetter, MessageSource
from outfitter_service.cli.commands.view import dead_letters
from outfitter_service.cli.commands.view.status import MOST_UNSERVED
from outfitter_service.query.letters import shown
from support.managers.process import OUTFITTER, Manager, StartManager, files_config

pytestmark = pytest.mark.slow

SAID = {
    b"no json": "{",
    b"no such worker": '{"type":"heartbeat","host":"HOST","worker":"gone","incarnation":"1"}',
    b"no text": b"\xff\xfe",
    b"half a character": '{"type":"register","host":"HOST","worker":"half","incarnation":"1","labels":{"a":"\\ud800"}}',
    b"no key": '{"type":"heartbeat","host":"HOST","worker":"keyless","incarnation":"1"}',
}


def publish(url: str, topic: str, *entries: Entry) -> None:
    async def say() -> None:
        async with connect(url) as bus:
            for entry in entries:
                await bus.publish(topic, 0, entry)

    anyio.run(say)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Manager]:
    """A manager that was told some things that it could not understand or obey."""
    folder = tmp_path_factory.mktemp("letters")
    manager = Manager(folder, files_config(folder / "gpus", gpus=1))
    manager.start()
    try:
        for about, body in SAID.items():
            value = body if isinstance(body, bytes) else body.replace("HOST", manager.host).encode()
            key = None if about == b"no key" else manager.host.encode()
            publish(manager.bus_url, names.topics().registrations, Entry(key, value))
        manager.wait_for(lambda: len(letters(manager)) == len(SAID))
        yield manager
    finally:
        manager.kill9()


def letters(manager: Manager, *arguments: str) -> list[dict[str, object]]:
    done = manager.outfitter("dead-letters", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_each_says_why_where_and_what_it_was(host: Manager) -> None:
    found = {letter["text"] if letter["text"] is not None else letter["base64"]: letter for letter in letters(host)}
    gone = found[SAID[b"no such worker"].replace("HOST", host.host)]  # type: ignore[arg-type]
    assert "not registered here" in str(gone["reason"])
    assert (gone["key"], gone["code"], gone["field"]) == (host.host, None, None)
    assert gone["source"].keys() == {"topic", "partition", "offset"}  # type: ignore[attr-defined]
    assert found["//4="]["text"] is None
    keyless = found[SAID[b"no key"].replace("HOST", host.host)]  # type: ignore[arg-type]
    assert (keyless["key"], keyless["code"]) == (None, "no-key")


def test_half_a_character_harms_no_reader(host: Manager) -> None:
    (letter,) = letters(host, "--reason", "half of a character")
    assert letter["text"] == SAID[b"half a character"].replace("HOST", host.host)  # type: ignore[arg-type]
    assert "\\ud800 is half of a character" in str(letter["reason"])
    for command in ("status", "devices", "history", "replay", "dead-letters", "verify"):
        for more in ((), ("--json",)):
            done = host.outfitter(command, *more)
            assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
            assert "\ufffd" not in done.stdout
    assert "outfitter_dead_letters_total" in host.metrics()
    assert "there is no worker 'half'" in host.outfitter("explain", "half").stderr


def test_a_code_that_does_not_exist_is_refused_with_those_that_do(host: Manager) -> None:
    done = host.outfitter("dead-letters", "--code", "foo")
    assert (done.returncode, done.stdout) == (2, "")
    assert "'foo' is not one of 'no-key', 'unreadable', 'bad-key', 'wrong-partition', 'no-manager'" in done.stderr


def test_they_are_narrowed_by_host_code_reason_and_number(host: Manager) -> None:
    assert len(letters(host, "--host", host.host)) == len(SAID) - 1
    assert [letter["code"] for letter in letters(host, "--code", "no-key")] == ["no-key"]
    assert len(letters(host, "--reason", "NOT REGISTERED")) == 1
    assert len(letters(host, "--limit", "2")) == 2
    assert letters(host, "--since", "2099-01-01T00:00:00Z") == []


def test_for_people_they_are_text(host: Manager) -> None:
    done = host.outfitter("dead-letters", "--limit", "3")
    assert "the last 3 of 5: --limit shows more" in done.stderr
    done = host.outfitter("dead-letters", "--reason", "not registered here")
    headline, reason, body = done.stdout.splitlines()
    assert f"outfitter.registrations/0 at 1  key {host.host}" in headline
    assert reason.startswith("  heartbeat from")
    assert json.loads(body)["worker"] == "gone"


def test_following_goes_on_with_what_comes(host: Manager) -> None:
    with host.popen("dead-letters", "--json", "--follow", "--reason", "gone-too") as process:
        assert process.stdout is not None
        assert host.outfitter("deregister", "--worker", "gone-too").returncode == 1
        line = process.stdout.readline()
        process.kill()
    assert json.loads(json.loads(line)["text"])["worker"] == "gone-too"


def test_status_counts_what_reached_no_manager(host: Manager) -> None:
    said = host.outfitter("status").stderr
    assert "messages that reached no manager within the last hour: no-key: 1" in said
    assert "outfitter dead-letters --code no-key" in said
    assert "reached no manager" not in host.outfitter("status", "--host", host.host).stderr, "it names no host"


def test_status_names_a_host_that_is_asked_for_until_a_manager_serves_it(
    start_manager: StartManager, tmp_path: Path
) -> None:
    manager = start_manager()
    assert manager.outfitter("register", "--host", "nowhere", "--worker", "w", "--wait", "30").returncode == 1
    for narrowed, told in (([], True), (["--host", "nowhere"], True), (["--host", manager.host], False)):
        said = manager.outfitter("status", *narrowed).stderr
        assert ("no manager serves host 'nowhere': 1 of its messages" in said) == told
    for number in range(MOST_UNSERVED):
        done = manager.outfitter("register", "--host", f"nowhere-{number}", "--worker", "w", "--wait", "30")
        assert done.returncode == 1
    told = manager.outfitter("status").stderr
    assert told.count("no manager serves host 'nowhere") == MOST_UNSERVED
    assert "more hosts without a manager: 1; `outfitter dead-letters --code no-manager` shows them" in told
    start_manager(bus=manager.bus_url, host="nowhere")
    assert "no manager serves host 'nowhere':" not in manager.outfitter("status").stderr


def test_a_message_of_which_the_end_was_cut_within_a_character_is_text() -> None:
    letter = DeadLetter(
        at=datetime.now(UTC), source=MessageSource(topic="t", partition=0, offset=0), message_key="h", reason="",
        body="long é".encode()[:-1], length=4711, sha256="", writer="host/h",
    )  # fmt: skip
    assert shown(letter).text == "long "
    whole = structs.replace(letter, length=len(letter.body))
    assert (shown(whole).text, shown(whole).base64) == (None, letter.body)


@pytest.fixture
def damaged(start_manager: StartManager) -> tuple[Manager, str]:
    """A stopped manager that would refuse its ledger, and the key of the record that is damaged."""
    manager = start_manager(gpus=1)
    done = manager.outfitter("register", "--worker", "w", "--lease", "none", "--wait", "10", "--json")
    key = f"{manager.host}/w/{json.loads(done.stdout)['incarnation']}"
    manager.stop()
    publish(manager.bus_url, names.topics().allocations, Entry(key.encode(), b"{"))
    return manager, key


def test_a_damaged_record_is_forgotten_and_its_manager_starts_again(damaged: tuple[Manager, str]) -> None:
    manager, key = damaged
    manager.start(ready=False)
    assert manager.wait() != 0
    assert f"`outfitter ledger forget {key}`" in manager.log_tail()
    done = manager.outfitter("ledger", "forget", key, "--yes")
    assert (done.returncode, done.stdout) == (0, f"{key}  forgotten\n")
    manager.start()
    assert manager.outfitter("register", "--worker", "v", "--wait", "10").returncode == 0


def test_it_says_what_it_needs_and_asks(damaged: tuple[Manager, str]) -> None:
    manager, key = damaged
    done = manager.outfitter("ledger", "forget", key)
    assert (done.returncode, done.stdout) == (1, "")
    for words in (
        f"manager of {manager.host}",
        "It stopped at",
        "worker is dead",
        "outfitter verify",
        "no terminal to ask",
    ):
        assert words in done.stderr
    for answer, code, ending in ((b"n\n", 1, "nothing was deleted"), (b"y\n", 0, "forgotten")):
        ours, theirs = pty.openpty()
        os.write(ours, answer)
        asked = subprocess.run(
            [*OUTFITTER, "ledger", "forget", key], env=manager.environment, stdin=theirs, capture_output=True,
            text=True, timeout=60,
        )  # fmt: skip
        os.close(ours)
        os.close(theirs)
        assert asked.returncode == code
        assert "Delete it?" in asked.stderr
        assert ending in asked.stdout + asked.stderr


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("HOST/w/none", "has no record under"),
        ("gibberish", "is no key of the ledger"),
        ("@checkpoint/host/HOST", "must not be deleted"),
        ("", "is no key of the ledger"),
    ],
)
def test_what_cannot_be_forgotten_is_said(host: Manager, key: str, words: str) -> None:
    done = host.outfitter("ledger", "forget", key.replace("HOST", host.host), "--yes")
    assert (done.returncode, done.stdout) == (1, "")
    assert words in done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_is_told_how_to_complete(tmp_path: Path, shell: str) -> None:
    run = subprocess.run([*OUTFITTER, "completion", shell], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert (run.returncode, run.stderr) == (0, "")
    assert f"_OUTFITTER_COMPLETE={shell}_complete" in run.stdout


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["sta"], {"status"}),
        (["topics", ""], {"create", "check"}),
        (["status", "--st"], {"--state"}),
        (["status", "--state", "all"], {"allocated"}),
    ],
)  # fmt: skip
def test_completion_knows_commands_options_and_values(tmp_path: Path, words: list[str], offered: set[str]) -> None:
    asked = {
        "_OUTFITTER_COMPLETE": "bash_complete",
        "COMP_WORDS": " ".join(["outfitter", *words]),
        "COMP_CWORD": str(len(words)),
    }
    run = subprocess.run(
        OUTFITTER, env={**os.environ, **asked}, capture_output=True, text=True, cwd=tmp_path, timeout=60
    )
    assert run.stderr == ""
    assert {line.partition(",")[2] for line in run.stdout.splitlines()} == offered


def test_bash_completes_with_what_it_was_told(tmp_path: Path) -> None:
    """In a real bash, with an `outfitter` on its PATH."""
    (tmp_path / "outfitter").write_text(f'#!/bin/sh\nexec {" ".join(OUTFITTER)} "$@"\n')
    (tmp_path / "outfitter").chmod(0o755)
    script = (
        'eval "$(outfitter completion bash)"; COMP_WORDS=(outfitter dere); COMP_CWORD=1; '
        '_outfitter_completion outfitter; echo "${COMPREPLY[@]}"'
    )
    run = subprocess.run(
        ["bash", "--norc", "-c", script], env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True, text=True, cwd=tmp_path, timeout=60,
    )  # fmt: skip
    assert (run.stdout.strip(), run.stderr) == ("deregister", "")


def test_completing_after_an_unknown_word_is_no_error(tmp_path: Path) -> None:
    asked = {"_OUTFITTER_COMPLETE": "bash_complete", "COMP_WORDS": "outfitter nonsense ", "COMP_CWORD": "2"}
    run = subprocess.run(
        OUTFITTER, env={**os.environ, **asked}, capture_output=True, text=True, cwd=tmp_path, timeout=60
    )
    assert (run.returncode, run.stderr) == (0, "")


def test_people_are_shown_the_beginning_of_a_long_message_and_of_a_long_key(capsys: pytest.CaptureFixture[str]) -> None:
    letter = DeadLetter(
        at=datetime.now(UTC), source=MessageSource(topic="t", partition=0, offset=0), message_key="k" * 900_000,
        reason="is too long", body=b"\x01" * 48_000, length=900_000, sha256="", writer="host/h",
    )  # fmt: skip
    dead_letters._show(shown(letter), as_json=False)
    said = capsys.readouterr().out
    assert len(said) < 1500
    assert "(900000 bytes in all; --json has more)" in said
    dead_letters._show(shown(letter), as_json=True)
    assert len(capsys.readouterr().out) > 900_000
