"""What a script with books has set aside for a worker that got nothing is given back, whoever is killed, and when."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from outfitter_drivers.api import TemporaryDriverError, Worker
from outfitter_drivers.gpu.discovery_script import AllocateReleaseDriver
from support.drivers.gpu_machine import executable
from support.managers.process import Manager, StartManager

BOOKS = '''#!{python}
"""Keeps books of {gpus} GPUs in {folder}, and waits there at the points that a test names in `pause`."""
import fcntl, json, os, pathlib, sys, time
folder = pathlib.Path("{folder}")
verb, amount = sys.argv[1], int(sys.argv[2])
me = os.environ.get("OUTFITTER_WORKER", "-") + "/" + os.environ.get("OUTFITTER_INCARNATION", "-")

def point(name):
    pause = folder / "pause"
    if pause.exists() and pause.read_text() == verb + " " + name + " " + me.split("/")[0]:
        (folder / "paused").touch()
        while pause.exists():
            time.sleep(0.01)

point("before")
with open(folder / "books", "a+") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    file.seek(0)
    books = json.loads(file.read() or "{{}}")
    taken = [gpu for own in books.values() for gpu in own]
    free = [str(gpu) for gpu in range({gpus}) if str(gpu) not in taken]
    out = []
    if verb == "allocate":
        out = (books.get(me, []) + free)[:amount]
        if len(out) < amount:
            sys.exit(1)
        books[me] = out
    else:
        gone = os.environ["OUTFITTER_DEVICES"].split(",")
        left = [gpu for gpu in books.pop(me, []) if gpu not in gone]
        books |= {{me: left}} if left else {{}}
    file.truncate(0)
    file.write(json.dumps(books))
point("after")
print(open(folder / "message").read() if (folder / "message").exists() and verb == "allocate" else ",".join(out))
'''


class Books:
    """A script with books, and what it has in them."""

    def __init__(self, folder: Path, gpus: int = 1) -> None:
        folder.mkdir()
        self.folder = folder
        self.script = executable(folder / "script", "")
        self.script.write_text(BOOKS.format(python=sys.executable, folder=folder, gpus=gpus))

    def entries(self) -> dict[str, list[str]]:
        text = (self.folder / "books").read_text() if (self.folder / "books").exists() else ""
        return json.loads(text or "{}")

    def holders(self) -> list[str]:
        return sorted(key.partition("/")[0] for key in self.entries())

    def pause_at(self, verb: str, point: str, worker: str) -> None:
        whole = self.folder / "pause.new"
        whole.write_text(f"{verb} {point} {worker}")
        whole.rename(self.folder / "pause")

    def go_on(self) -> None:
        (self.folder / "paused").unlink(missing_ok=True)
        (self.folder / "pause").unlink()

    @property
    def is_paused(self) -> bool:
        return (self.folder / "paused").exists()

    def config(self, extra: str = "") -> str:
        return (
            'external-resources = ["gpu"]\n[external-resource.gpu]\namount = 1\ndriver = "gpu"\n'
            f'param.discovery-script.path = "{self.script}"\n'
            f'param.discovery-script.contract = "allocate-release"\n{extra}'
        )


@pytest.fixture
def books(tmp_path: Path) -> Books:
    return Books(tmp_path / "books")


def ask(manager: Manager, worker: str, *more: str) -> None:
    assert manager.outfitter("register", "--worker", worker, "--lease", "none", *more).returncode == 0


def leave(manager: Manager, worker: str) -> None:
    assert manager.outfitter("deregister", "--worker", worker, "--wait", "0").returncode == 0


def only_holder(manager: Manager, books: Books, worker: str) -> None:
    """The worker gets the device, and the script's books have nobody else."""
    assert manager.wait_for_state(worker, "allocated")["reason_code"] != "driver-failed"
    manager.wait_for(lambda: books.holders() == [worker])


def test_a_worker_that_goes_while_the_script_is_asked_leaves_nothing_in_its_books(
    start_manager: StartManager, books: Books
) -> None:
    manager = start_manager(books.config())
    books.pause_at("allocate", "after", "w1")
    ask(manager, "w1")
    manager.wait_for(lambda: books.is_paused)
    leave(manager, "w1")
    manager.wait_for_state("w1", "ended")
    assert books.holders() == ["w1"]
    books.go_on()
    manager.wait_for(lambda: books.holders() == [])
    ask(manager, "w2")
    only_holder(manager, books, "w2")


@pytest.mark.parametrize("point", ["before", "after"])
@pytest.mark.parametrize("leaves", ["before the kill", "while nobody serves", "never"])
def test_a_manager_that_is_killed_while_the_script_is_asked_gives_back_what_nobody_was_granted(
    start_manager: StartManager, books: Books, point: str, leaves: str
) -> None:
    manager = start_manager(books.config())
    books.pause_at("allocate", point, "w1")
    ask(manager, "w1")
    manager.wait_for(lambda: books.is_paused)
    if leaves == "before the kill":
        leave(manager, "w1")
        manager.wait_for_state("w1", "ended")
    manager.kill9()
    books.go_on()
    manager.wait_for(lambda: books.holders() == ["w1"])
    if leaves == "while nobody serves":
        leave(manager, "w1")
    manager.start()
    ask(manager, "w2", "--priority", "9")
    if leaves == "never":
        by_state: dict[str, str] = {}

        def one_waits() -> bool:
            by_state.clear()
            by_state.update({record["state"]: record["worker"] for record in manager.records()})
            return by_state.keys() == {"pending", "allocated"}

        manager.wait_for(one_waits)
        leave(manager, by_state["allocated"])
        only_holder(manager, books, by_state["pending"])
    else:
        only_holder(manager, books, "w2")


def test_a_manager_that_is_killed_while_it_gives_back_does_so_again(start_manager: StartManager, books: Books) -> None:
    manager = start_manager(books.config())
    books.pause_at("allocate", "after", "w1")
    ask(manager, "w1")
    manager.wait_for(lambda: books.is_paused)
    leave(manager, "w1")
    manager.wait_for_state("w1", "ended")
    books.go_on()
    books.pause_at("release", "before", "w1")
    manager.wait_for(lambda: books.is_paused)
    manager.kill9()
    # this call ends without a word: it was not to be
    (books.folder / "books").rename(books.folder / "kept")
    books.go_on()
    manager.wait_for(lambda: (books.folder / "books").exists() and books.entries() == {})
    (books.folder / "kept").rename(books.folder / "books")
    manager.start()
    ask(manager, "w2")
    only_holder(manager, books, "w2")


@pytest.mark.parametrize("how", ["killed", "message"])
def test_devices_that_nobody_knows_are_given_back_and_nobody_fails_meanwhile(
    start_manager: StartManager, books: Books, how: str
) -> None:
    """The script was killed for its time limit when it had written its books, or it printed a message."""
    manager = start_manager(books.config('param.discovery-script.timeout = "2s"\n'))
    if how == "killed":
        books.pause_at("allocate", "after", "w1")
    else:
        (books.folder / "message").write_text("Failed to initialize NVML\n")
    ask(manager, "w1")
    manager.wait_for(lambda: (manager.record("w1") or {}).get("reason_code") == "driver-failed")
    assert books.holders() == ["w1"]
    leave(manager, "w1")
    ask(manager, "w2")
    manager.wait_for(lambda: (manager.record("w2") or {}).get("reason_code") == "driver-failed")
    assert (manager.record("w2") or {})["state"] == "pending"
    if how == "killed":
        books.go_on()
    else:
        (books.folder / "message").unlink()
    only_holder(manager, books, "w2")


def test_each_worker_is_asked_for_itself_and_gets_what_the_script_named_for_it(
    start_manager: StartManager, tmp_path: Path
) -> None:
    books = Books(tmp_path / "books", gpus=4)
    manager = start_manager(books.config())
    books.pause_at("allocate", "after", "a")
    for worker, amount in (("a", 1), ("b", 3), ("c", 1), ("d", 2)):
        ask(manager, worker, "--resource", f"gpu={amount}")
    manager.wait_for(lambda: books.is_paused)
    books.go_on()

    def states() -> dict[str, str]:
        return {record["worker"]: record["state"] for record in manager.records()}

    def has_each_its_own() -> bool:
        named = {key.partition("/")[0]: gpus for key, gpus in books.entries().items()}
        held = {
            record["worker"]: [info["id"] for info in record["resources"]["gpu"]]
            for record in manager.records()
            if record["state"] == "allocated"
        }
        return all(len(named.get(worker, ())) == len(gpus) for worker, gpus in held.items())

    for first, then in (("a", "b"), ("c", "d")):
        for worker in (first, then):
            manager.wait_for_state(worker, "allocated")
        manager.wait_for(has_each_its_own)
        assert "failed" not in states().values()
        for worker in (first, then):
            leave(manager, worker)
    manager.wait_for(lambda: books.entries() == {})


# --- the driver alone ---

FIRST = Worker(host="h", resource="gpu", worker="w1", incarnation="w1-1")
SECOND = Worker(host="h", resource="gpu", worker="w2", incarnation="w2-1")


async def test_too_few_devices_are_no_verdict_while_an_offer_may_be_outstanding(books: Books) -> None:
    before, driver = AllocateReleaseDriver(str(books.script)), AllocateReleaseDriver(str(books.script))
    await before.retrieve_resource_info(1, FIRST)
    driver.assume_offer(FIRST, 1)
    broken = books.script.read_text().replace('if verb == "allocate":', 'if verb == "release": sys.exit(3)\n    if 1:')
    whole = books.script.read_text()
    books.script.write_text(broken)
    with pytest.raises(TemporaryDriverError, match="worker w1 is about to get some, or has not given them back"):
        await driver.retrieve_resource_info(1, SECOND)
    with pytest.raises(TemporaryDriverError, match="release 1 ended with exit code 3"):
        await driver.withdraw_offer(FIRST)
    books.script.write_text(whole)
    await driver.withdraw_offer(FIRST)
    assert books.holders() == []
    assert [info["index"] for info in await driver.retrieve_resource_info(1, SECOND)] == ["0"]


async def test_an_offer_of_a_waiting_worker_from_before_a_restart_gives_way(books: Books) -> None:
    await AllocateReleaseDriver(str(books.script)).retrieve_resource_info(1, FIRST)
    driver = AllocateReleaseDriver(str(books.script))
    driver.offer_stands = 0.0
    driver.assume_offer(FIRST, 1)
    await driver.retrieve_resource_info(1, SECOND)
    assert books.holders() == ["w2"]
    await driver.aclose()
    assert books.holders() == []
