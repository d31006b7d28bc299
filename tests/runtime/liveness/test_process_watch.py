"""Watching processes: nobody is taken for dead who may be alive, and descriptors suffice for the others."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest
from msgspec import UNSET, structs

from outfitter_proto.records import Unwatched
from outfitter_proto.support.processes import boot_id, pid_namespace, start_ticks, time_namespace
from outfitter_service.runtime.liveness import descriptors, process_table
from outfitter_service.runtime.liveness.process_watch import ProcessWatch
from support.processes.owners import owner_of, process

__all__ = ["process"]


class Deaths(list[tuple[str, str]]):
    def __call__(self, key: str, detail: str) -> None:
        self.append((key, detail))


def watch(**changes: Any) -> tuple[ProcessWatch, Deaths]:
    died = Deaths()
    fields = {
        "boot_id": boot_id(), "pid_ns": pid_namespace(), "time_ns": time_namespace(), "earlier_boot_id": None,
        "died": died,
    }  # fmt: skip
    return ProcessWatch(**{**fields, **changes}), died


async def test_a_pid_that_belongs_to_another_process_by_now_means_that_the_owner_is_gone() -> None:
    watching, died = watch()
    assert watching.watch("k", owner_of(os.getpid(), start_ticks=1))
    assert "belongs to another process" in died[0][1]
    assert len(watching) == 0


async def test_an_owner_in_another_pid_namespace_is_not_looked_for() -> None:
    watching, died = watch()
    assert not watching.watch("k", owner_of(os.getpid(), pid_ns=1))
    assert died == []


async def test_an_owner_of_another_boot_is_not_looked_for_unless_it_was_this_machines_last() -> None:
    watching, died = watch()
    assert not watching.watch("k", owner_of(os.getpid(), boot_id="another machine's"))
    assert died == []
    watching, died = watch(earlier_boot_id="the boot before")
    assert watching.watch("k", owner_of(os.getpid(), boot_id="the boot before"))
    assert "restart" in died[0][1]


async def test_a_process_that_proc_does_not_show_is_not_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch)
    watching, died = watch()
    assert not watching.watch("k", owner_of(os.getpid(), start_ticks=1))
    assert died == []
    assert watching.reason("k") == Unwatched.HIDDEN
    watching.close()


def hide(monkeypatch: pytest.MonkeyPatch) -> None:
    """As hidepid=2 does with other users' processes."""

    def read(pid: int) -> int:
        raise FileNotFoundError(pid)

    monkeypatch.setattr(process_table, "read_start_ticks", read)


async def test_a_process_that_proc_does_not_show_because_it_ended_is_dead(
    monkeypatch: pytest.MonkeyPatch, process: subprocess.Popen[bytes]
) -> None:
    owner = owner_of(process.pid)
    process.kill()
    # it stays a zombie, so its pid stays its own
    await anyio.to_thread.run_sync(os.waitid, os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    hide(monkeypatch)
    watching, died = watch()
    assert watching.watch("k", owner)
    assert len(died) == 1


async def test_where_the_own_boot_is_not_known_nobody_is_watched() -> None:
    watching, died = watch(boot_id=None)
    assert not watching.watch("k", owner_of(os.getpid()))
    assert died == []


async def test_descriptors_are_given_back(process: subprocess.Popen[bytes]) -> None:
    before = pidfds()
    watching, _ = watch()
    for key in "abc":
        assert watching.watch(key, owner_of(process.pid))
    watching.watch("reused", owner_of(process.pid, start_ticks=1))
    assert pidfds() == before + 1
    for key in "aab":
        watching.forget(key)
    assert pidfds() == before + 1
    watching.close()
    assert pidfds() == before


# --- whose start time cannot be compared ---------------------------------------------------------------------


@pytest.mark.parametrize("said", [UNSET, None, 1, "ours"])
@pytest.mark.parametrize("shifted", [0, 10_000_000, -1])
async def test_an_owner_is_taken_for_dead_by_its_start_time_only_where_one_clock_has_measured_both(
    said: Any, shifted: int
) -> None:
    here = time_namespace()
    watching, died = watch()
    ours = here if said == "ours" else said
    owner = owner_of(os.getpid(), time_ns=ours)
    sure = watching.watch("k", structs.replace(owner, start_ticks=owner.start_ticks + shifted))
    dead = said == "ours" and shifted != 0
    assert bool(died) is dead
    assert sure is (dead or (shifted == 0 and said != 1))
    assert watching.reason("k") == (None if sure else Unwatched.TIME_NAMESPACE)
    watching.close()


async def test_where_the_kernel_has_no_time_namespaces_start_times_are_compared() -> None:
    watching, died = watch(time_ns=None)
    assert watching.watch("k", owner_of(os.getpid(), start_ticks=1, time_ns=UNSET))
    assert len(died) == 1


async def test_a_process_that_may_be_another_one_is_the_owners_end_when_it_ends(
    process: subprocess.Popen[bytes],
) -> None:
    watching, died = watch()
    assert not watching.watch("k", owner_of(process.pid, start_ticks=1, time_ns=1))
    process.kill()
    with anyio.fail_after(20):
        while not died:  # noqa: ASYNC110 - it tells nobody
            await anyio.sleep(0.002)
    assert died == [("k", f"process {process.pid} ended")]
    assert watching.reason("k") is None


async def test_a_thread_is_no_process_that_could_be_watched() -> None:
    threads = [int(path.name) for path in Path("/proc/self/task").iterdir()]
    await anyio.to_thread.run_sync(lambda: threads.append(threading.get_native_id()))
    thread = next(number for number in threads if number != os.getpid())
    watching, died = watch()
    assert not watching.watch("k", owner_of(thread))
    assert (watching.reason("k"), died) == (Unwatched.NO_PROCESS, [])
    # the number was another process's before, which is gone
    assert watching.watch("old", owner_of(thread, start_ticks=1))
    assert [key for key, _ in died] == ["old"]


async def test_the_first_process_and_the_managers_own_are_watched_like_any_other() -> None:
    watching, died = watch()
    assert watching.watch("first", structs.replace(owner_of(os.getpid()), pid=1, start_ticks=start_ticks(1)))
    assert watching.watch("own", owner_of(os.getpid()))
    assert (len(watching), died) == (2, [])
    watching.close()


# --- more processes than descriptors -------------------------------------------------------------------------


@pytest.fixture
def crowd() -> Iterator[list[subprocess.Popen[bytes]]]:
    found = [subprocess.Popen(["sleep", "1000"]) for _ in range(5)]
    yield found
    for each in found:
        each.kill()
        each.wait()


async def test_processes_beyond_the_descriptors_are_looked_at_in_turns(
    monkeypatch: pytest.MonkeyPatch, crowd: list[subprocess.Popen[bytes]]
) -> None:
    monkeypatch.setattr(descriptors, "for_owners", lambda: 2)
    before = pidfds()
    watching, died = watch()
    for each in crowd:
        assert watching.watch(str(each.pid), owner_of(each.pid))
        assert watching.watch(f"{each.pid} once more", owner_of(each.pid))
    assert (len(watching), watching.polled, pidfds() - before) == (5, 3, 2)
    last = crowd[-1]
    last.kill()
    last.wait()
    watching.poll()
    assert sorted(key for key, _ in died) == [str(last.pid), f"{last.pid} once more"]
    assert (len(watching), watching.polled) == (4, 2)
    # where descriptors are free again, they are used
    for key in (str(crowd[0].pid), f"{crowd[0].pid} once more"):
        watching.forget(key)
    watching.poll()
    assert (len(watching), watching.polled, pidfds() - before) == (3, 1, 2)
    watching.close()
    assert (pidfds() - before, watching.must_poll) == (0, False)


async def test_a_pid_that_was_given_away_between_two_looks_means_that_the_owner_is_gone(
    monkeypatch: pytest.MonkeyPatch, crowd: list[subprocess.Popen[bytes]]
) -> None:
    monkeypatch.setattr(descriptors, "for_owners", lambda: 0)
    watching, died = watch()
    watching.watch("k", owner_of(crowd[0].pid))
    watching.poll()
    assert died == []
    monkeypatch.setattr(process_table, "read_start_ticks", lambda _: 2**40)
    watching.poll()
    assert [key for key, _ in died] == ["k"]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
async def test_what_cannot_be_looked_at_for_want_of_descriptors_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, crowd: list[subprocess.Popen[bytes]], number: int
) -> None:
    def refuse(pid: int, flags: int = 0) -> int:
        raise OSError(number, os.strerror(number))

    watching, died = watch()
    with monkeypatch.context() as patched:
        patched.setattr(os, "pidfd_open", refuse)
        assert not any(watching.watch(str(each.pid), owner_of(each.pid)) for each in crowd)
        assert watching.unwatched() == {Unwatched.DESCRIPTORS: 5}
        assert watching.poll() == []
    crowd[0].kill()
    crowd[0].wait()
    assert sorted(watching.poll()) == sorted(str(each.pid) for each in crowd)
    assert ([key for key, _ in died], len(watching), watching.unwatched()) == ([str(crowd[0].pid)], 4, {})
    watching.close()


async def test_what_the_kernel_refuses_to_open_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, flags: int = 0) -> int:
        raise PermissionError(errno.EPERM, "seccomp")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    watching, died = watch()
    assert not watching.watch("k", owner_of(os.getpid()))
    assert (watching.reason("k"), died, watching.must_poll) == (Unwatched.REFUSED, [], False)


def pidfds() -> int:
    links = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
    return sum(link.endswith("anon_inode:[pidfd]") for link in links)
