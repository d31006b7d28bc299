"""service/maintenance.md: each runbook, followed to the letter against a real manager. What it prints is on the page.

Host and ids of orders are the test's own, and what depends on the clock may be any other time or age. Blanks and line
ends do not count.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections import deque
from datetime import UTC, datetime

import pytest

from support.documents import ROOT
from support.managers.process import OUTFITTER, Manager, StartManager, add_device

PAGE = (ROOT / "service" / "maintenance.md").read_text()
SHELL, PRINTED = (f"```{language}\n(.*?)```\n" for language in ("sh", "text"))
ADA, BOB = "ada@ops-1", "bob@ops-2"

ID = r"1[0-9a-z]{6}-[0-9a-z]{4}"
VARIABLE = re.compile(rf"(?P<id>{ID})|(?P<time>20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ)|(?P<age>\b\d+[smhd]\b)")
TIME = r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ"
AGE = r"\d+[smhd]"


class Runbook:
    """A section of the page: its blocks of commands with what they print, which are followed in turn."""

    def __init__(self, section: str, manager: Manager) -> None:
        [text] = re.findall(rf"^## {section}\n(.*?)(?=^## )", PAGE, re.MULTILINE | re.DOTALL)
        self._left = deque(re.findall(rf"{SHELL}(?:\n{PRINTED})?", text, re.DOTALL))
        self._manager = manager
        self._orders: dict[str, str] = {}
        """Orders' ids on the page → here."""

    def follow(self, *, author: str = ADA, code: int = 0) -> None:
        """The next block: run its commands, which print what the page has."""
        commands, printed = self._left.popleft()
        self._compare(self._start(commands, author), printed, code)

    def follow_while(self, worker: str) -> None:
        """The next block, which waits: it goes on until this worker ends."""
        commands, printed = self._left.popleft()
        assert "sleep 10" in commands
        process = self._start(commands.replace("sleep 10", "sleep 0.2"), ADA)
        try:
            assert process.poll() is None, "it did not wait for the holder"
            end(self._manager, worker)
            self._compare(process, printed, 0)
        finally:
            process.kill()
            process.communicate()

    def reboot(self) -> None:
        """The next block, which reboots the host: its manager is stopped."""
        assert self._left.popleft() == ("systemctl reboot\n", "")
        assert self._manager.stop() == 0

    def end(self) -> None:
        """Nothing of it may be left."""
        assert not self._left

    def _start(self, commands: str, author: str) -> subprocess.Popen[str]:
        for page, here in {**self._orders, "gpu-3": self._manager.host}.items():
            commands = commands.replace(page, here)
        return subprocess.Popen(
            ["bash", "-c", f'outfitter() {{ {shlex.join(OUTFITTER)} "$@"; }}\n{commands}'], cwd=self._manager.folder,
            env={**self._manager.environment, "OUTFITTER_AUTHOR": author, "COLUMNS": "200", "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def _compare(self, process: subprocess.Popen[str], page: str, code: int) -> None:
        told, _ = process.communicate(timeout=60)
        found = re.fullmatch(self._pattern(page), " ".join(told.split()))
        assert found, f"the page has\n{page}\nand it prints\n{told}"
        for name, order in found.groupdict().items():
            self._orders[name.removeprefix("order_").replace("_", "-")] = order
        assert process.returncode == code, told

    def _pattern(self, page: str) -> str:
        text, pattern, at = " ".join(page.replace("gpu-3", self._manager.host).split()), "", 0
        for found in VARIABLE.finditer(text):
            pattern += re.escape(text[at : found.start()])
            pattern += TIME if found["time"] else AGE if found["age"] else self._order(found[0], pattern)
            at = found.end()
        return pattern + re.escape(text[at:])

    def _order(self, page: str, before: str) -> str:
        """The pattern of an order's id: the one that it has had since it was first printed."""
        name = f"order_{page.replace('-', '_')}"
        if page in self._orders:
            return self._orders[page]
        return f"(?P={name})" if f"(?P<{name}>" in before else f"(?P<{name}>{ID})"


def hold(manager: Manager, *workers: str) -> None:
    """Each gets the next GPU, and keeps it."""
    for worker in workers:
        done = manager.outfitter("register", "--worker", worker, "--lease", "none", "--wait", "20")
        assert done.returncode == 0, done.stderr


def end(manager: Manager, worker: str) -> None:
    done = manager.outfitter("deregister", "--worker", worker)
    assert done.returncode == 0, done.stderr
    manager.wait_for_state(worker, "ended")


@pytest.fixture
def manager(start_manager: StartManager) -> Manager:
    """A manager of a host with four GPUs."""
    manager = start_manager(gpus=4)
    manager.wait_for(lambda: manager.metric("outfitter_devices", state="free") == 4)
    return manager


def test_a_gpu_is_taken_out_while_its_neighbours_are_lent_and_comes_back(manager: Manager) -> None:
    hold(manager, "tm-16", "tm-17")
    runbook = Runbook("Take a GPU out", manager)
    runbook.follow()
    runbook.follow()
    runbook.follow_while("tm-17")
    runbook.follow()
    runbook.follow()
    runbook.end()


def test_of_two_people_each_ends_only_the_own_order_unless_one_names_the_others(manager: Manager) -> None:
    runbook = Runbook("Two people's orders", manager)
    runbook.follow()
    runbook.follow(author=BOB)
    runbook.follow()
    runbook.follow()
    runbook.follow(code=1)
    runbook.follow()
    runbook.end()


def test_a_host_is_rebooted_without_an_alarm_and_lends_nothing_before_somebody_has_looked(manager: Manager) -> None:
    hold(manager, "tm-17")
    runbook = Runbook("Reboot a host", manager)
    runbook.follow()
    runbook.follow_while("tm-17")
    runbook.reboot()
    runbook.follow()
    manager.start()
    runbook.follow()
    runbook.follow()
    runbook.end()


def test_an_ill_device_stays_out_when_it_looks_healthy_in_the_middle_of_its_repair(manager: Manager) -> None:
    hold(manager, "tm-15", "tm-16", "tm-17")
    for worker in ("tm-15", "tm-16"):
        end(manager, worker)
    gpus = manager.folder / "gpus"
    add_device(gpus, 2, health="unhealthy", reason="fell off the bus")
    manager.wait_for(lambda: manager.metric("outfitter_healthy_devices") == 3)
    runbook = Runbook("A device is ill", manager)
    runbook.follow()
    runbook.follow()
    end(manager, "tm-17")
    add_device(gpus, 2)
    manager.wait_for(lambda: manager.metric("outfitter_healthy_devices") == 4)
    runbook.follow()
    runbook.follow()
    runbook.end()


def test_an_order_with_a_time_ends_by_itself_also_where_no_manager_ran_then(manager: Manager) -> None:
    """As the page's table has it."""
    done = manager.outfitter("cordon", manager.host, "--reason", "sleep", "--until", "5s")
    assert done.returncode == 0, done.stderr
    manager.stop()
    until = datetime.now(UTC).timestamp() + 5
    manager.wait_for(lambda: datetime.now(UTC).timestamp() > until)
    manager.start()
    manager.wait_for(lambda: manager.metric("outfitter_devices", state="free") == 4)
