"""`outfitter top` with a real manager, from its bus and from an API, printed once and live in a terminal."""

from __future__ import annotations

import os
import signal
import termios
from pathlib import Path

import pytest

from support.kafka.broker import KafkaBroker
from support.managers.api import running
from support.managers.process import OUTFITTER, Manager, StartManager, serving_on
from support.processes.terminal import terminal

pytestmark = pytest.mark.slow


@pytest.fixture
def busy(start_manager: StartManager) -> Manager:
    """A manager of one device, which one worker has and another one waits for."""
    manager = start_manager(gpus=1)
    occupy(manager)
    return manager


def occupy(manager: Manager) -> None:
    manager.outfitter("register", "--worker", "first", "--lease", "none")
    manager.wait_for_state("first", "allocated")
    manager.outfitter("register", "--worker", "second", "--lease", "none")
    manager.wait_for_state("second", "pending")


def test_from_the_bus_and_from_an_api_it_prints_the_same_without_a_terminal(busy: Manager, tmp_path: Path) -> None:
    with running(tmp_path, busy.bus_url) as api:
        busy.wait_for(lambda: api.is_ready)
        pictures = [busy.outfitter("top").stdout, busy.outfitter("top", "--url", str(api.url)).stdout]
    for text in pictures:
        assert "hosts: 1  waiting: 1" in text
        assert "gpu: 0 of 1 free, 1 held, 1 worker waits" in text
        assert f"second on {busy.host}  1 gpu: waits for 1 gpu" in text
        assert f"{busy.host}  #  1 wait" in text
        assert "\x1b" not in text


def test_a_host_whose_manager_has_stopped_needs_a_person(busy: Manager) -> None:
    busy.stop()
    said = busy.outfitter("top").stdout
    assert "1 thing needs you now." in said
    assert f"! {busy.host} has no manager" in said


@pytest.mark.kafka
def test_it_shows_all_hosts_of_a_broker_or_one(kafka_broker: KafkaBroker, tmp_path: Path) -> None:
    with serving_on(kafka_broker, tmp_path / "one", cluster="top", host="one") as manager:
        occupy(manager)
        assert "hosts: 1 " in manager.outfitter("top", "--host", "one").stdout
        mistyped = manager.outfitter("top", "--host", "other")
        assert (mistyped.returncode, mistyped.stdout) == (1, "")
        assert "there is no host 'other'" in mistyped.stderr


def test_an_api_with_a_token_shows_nothing_without_it(busy: Manager, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef" * 2)
    with running(tmp_path, busy.bus_url, "--token-file", str(token)) as api:
        url = api.wait_for_url()
        refused = busy.outfitter("top", "--url", url)
        assert (refused.returncode, refused.stdout) == (1, "")
        assert "answers 401" in refused.stderr
        assert "give its token by --token-file" in refused.stderr
        assert "hosts: 1" in busy.outfitter("top", "--url", url, "--token-file", str(token)).stdout


def test_in_a_terminal_it_follows_until_q(busy: Manager) -> None:
    with terminal(busy.environment, *OUTFITTER, "top") as shell:
        shell.until("waiting: 1")
        busy.outfitter("deregister", "--worker", "second")
        shell.until("waiting: 0")
        shell.type("q")
        shell.until("over 0")


def test_a_terminal_is_as_before_when_sigterm_ends_it(busy: Manager) -> None:
    with terminal(busy.environment, *OUTFITTER, "top") as shell:
        shell.until("waiting: 1")
        os.killpg(os.tcgetpgrp(shell.master), signal.SIGTERM)
        shell.until("\x1b[?25h")  # the cursor is shown
        shell.until("\x1b[?1049l")  # the alternate screen is left
        shell.until("over -15")
        assert termios.tcgetattr(shell.master)[3] & termios.ECHO


def test_in_a_terminal_a_picture_that_gets_old_says_so(busy: Manager, tmp_path: Path) -> None:
    with running(tmp_path, busy.bus_url) as api:
        busy.wait_for(lambda: api.is_ready)
        with terminal(busy.environment, *OUTFITTER, "top", "--url", str(api.url)) as shell:
            shell.until("waiting: 1")
            api.stop()
            shell.until("This picture is ")
            shell.until("old: ")
            shell.type("\x03")
            shell.until("over 130")


def test_what_cannot_be_read_is_one_line(shared_manager: Manager, tmp_path: Path) -> None:
    for arguments, said in (
        (("--url", "ftp://x"), "is no address of an API"),
        (("--url", shared_manager.url), "answers 404"),
        (("--url", "http://127.0.0.1:9478", "--token-file", str(tmp_path / "none")), "the token cannot be read"),
        (("--bus", f"sqlite:///{tmp_path}/none.db"), "there is no bus"),
    ):
        done = shared_manager.outfitter("top", *arguments)
        assert done.returncode
        assert said in done.stderr.splitlines()[-1]
        assert done.stdout == ""
