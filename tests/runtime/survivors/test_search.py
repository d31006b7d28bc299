"""The search for a worker's processes, whatever they are doing at that moment."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from outfitter_proto.support.processes import user_namespace
from outfitter_service.runtime.survivors.processes import Mark, open_survivor, search, send

pytestmark = pytest.mark.slow

RUN = secrets.token_hex(4)
MARK = Mark("h", "w", RUN, os.getuid())
NAMES = {"OUTFITTER_HOST": "h", "OUTFITTER_WORKER": "w", "OUTFITTER_INCARNATION": RUN, "PATH": os.environ["PATH"]}
SEARCHES = 100
WITHOUT_MAIN_THREAD = """
import ctypes, threading
threading.Thread(target=threading.Event().wait).start()
print(flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""
"""A program whose main thread ends while another one goes on."""
UNPRIVILEGED = """
import os, subprocess, sys
from outfitter_service.runtime.survivors.processes import Mark, search
if os.geteuid() == 0:  # root is denied nothing: be somebody else
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
process = subprocess.Popen(["/bin/true"])
os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
print(os.getuid() in search([Mark("h", "w", "1", os.getuid())]).refused)
"""


@pytest.fixture
def restless(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that executes its program again and again."""
    program = tmp_path / "restless"
    program.write_text('#!/bin/sh\nexec "$0"\n')
    program.chmod(0o755)
    with subprocess.Popen([program], env=NAMES) as process:
        yield process
        process.kill()


@contextmanager
def sleeping(environment: dict[str, str]) -> Iterator[int]:
    """The pid of a process with this environment."""
    with subprocess.Popen(["/bin/sleep", "1000"], env=environment) as process:
        try:
            yield process.pid
        finally:
            process.kill()


def test_a_process_that_executes_its_program_again_and_again_is_found_each_time(
    restless: subprocess.Popen[bytes],
) -> None:
    for _ in range(SEARCHES):
        result = search({MARK})
        assert [found.pid for found in result.survivors.get(MARK, [])] == [restless.pid] or result.missed


def test_a_process_that_hands_over_to_its_child_and_ends_is_never_taken_for_gone(tmp_path: Path) -> None:
    program = tmp_path / "relay"
    stop = tmp_path / "stop"
    program.write_text(f'#!/bin/sh\n[ -e {stop} ] || "$0" &\n')
    program.chmod(0o755)
    subprocess.run([program], env=NAMES, check=True, timeout=60)
    try:
        for _ in range(SEARCHES):
            result = search({MARK})
            assert result.survivors.get(MARK) or result.missed
    finally:
        stop.touch()
    while (result := search({MARK})).survivors.get(MARK) or result.missed:
        pass


def test_a_process_is_found_also_if_only_threads_of_it_are_left() -> None:
    command = [sys.executable, "-c", WITHOUT_MAIN_THREAD]
    with subprocess.Popen(command, env=NAMES, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        while ") Z " not in Path(f"/proc/{process.pid}/stat").read_text():
            pass
        result = search({MARK})
        send(result.survivors.get(MARK, []), signal.SIGKILL)
        process.kill()
    assert [found.pid for found in result.survivors.get(MARK, [])] == [process.pid]
    assert process.returncode == -signal.SIGKILL


def test_a_process_without_an_environment_leaves_no_doubt() -> None:
    with sleeping({}):
        while (result := search({MARK})).missed:
            pass  # others' processes end while they are read, on a busy machine
        assert result.survivors == {}


def test_a_zombie_counts_as_ended_also_for_those_who_may_not_read_it() -> None:
    done = subprocess.run([sys.executable, "-c", UNPRIVILEGED], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_one_search_finds_the_processes_of_several_workers() -> None:
    other = MARK._replace(worker="v")
    with (
        subprocess.Popen(["sleep", "1000"], env=NAMES) as first,
        subprocess.Popen(["sleep", "1000"], env=NAMES | {"OUTFITTER_WORKER": "v"}) as second,
    ):
        survivors = search({MARK, other}).survivors
        first.kill()
        second.kill()
    assert {mark: [each.pid for each in found] for mark, found in survivors.items()} == {
        MARK: [first.pid], other: [second.pid]
    }  # fmt: skip
    assert {each.command for found in survivors.values() for each in found} == {"sleep"}


@pytest.mark.parametrize("outer", ["h/v/{run}", "g/x/1 h/v/{run}", "junk h/v/{run} a/b/c/d"])
def test_a_process_of_an_allocation_inside_another_one_is_a_survivor_of_both(outer: str) -> None:
    marks = {MARK, MARK._replace(worker="v")}
    with sleeping(NAMES | {"OUTFITTER_OUTER": outer.format(run=RUN)}) as pid:
        survivors = search(marks).survivors
        for mark in marks:
            [found] = survivors[mark]
            assert (found.pid, found.mark) == (pid, mark)
            pidfd = open_survivor(found)
            assert pidfd is not None
            os.close(pidfd)


def test_a_process_is_a_survivor_of_outer_allocations_also_if_it_has_no_allocation_of_its_own() -> None:
    with sleeping({"OUTFITTER_OUTER": f"h/w/{RUN}"}) as pid:
        assert [each.pid for each in search({MARK}).survivors.get(MARK, [])] == [pid]


@pytest.mark.parametrize("outer", ["h/w", "h/w/{run}x", "h/w/{run}/x", "w/h/{run}", ""])
def test_other_outer_allocations_are_no_marks(outer: str) -> None:
    with sleeping({"OUTFITTER_OUTER": outer.format(run=RUN)}):
        assert search({MARK}).survivors == {}


def test_an_outer_allocation_of_another_user_is_no_mark() -> None:
    with sleeping({"OUTFITTER_OUTER": f"h/w/{RUN}"}):
        assert search({MARK._replace(uid=MARK.uid + 1)}).survivors == {}


def test_a_process_in_a_user_namespace_is_known_by_its_user_there_and_here() -> None:
    announced = ["unshare", "--user", "--map-user=4242", "sh", "-c", "echo; exec sleep 1000"]
    with subprocess.Popen(announced, env=NAMES, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        namespace = user_namespace(process.pid)
        there = MARK._replace(uid=4242, user_ns=namespace)
        for mark in (MARK, there):
            [found] = search({mark}).survivors[mark]
            assert found.pid == process.pid
            pidfd = open_survivor(found)
            assert pidfd is not None
            os.close(pidfd)
        nobody = [there._replace(user_ns=None), there._replace(user_ns=user_namespace()), there._replace(uid=4243)]
        assert search(nobody).survivors == {}
        process.kill()


def test_a_process_that_has_ended_is_neither_found_nor_signalled() -> None:
    with subprocess.Popen(["sleep", "1000"], env=NAMES) as process:
        [found] = search({MARK}).survivors[MARK]
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
        assert open_survivor(found) is None
        assert search({MARK}).survivors == {}
        send([found], 9)


def test_a_manager_that_a_worker_has_started_is_no_survivor_of_it() -> None:
    look = (
        "import os; from outfitter_service.runtime.survivors.processes import Mark, search\n"
        f"print(dict(search([Mark('h', 'w', {RUN!r}, os.getuid())]).survivors))"
    )
    done = subprocess.run([sys.executable, "-c", look], env=NAMES, capture_output=True, text=True, check=True)
    assert done.stdout == "{}\n"
