"""A process that ends with the one that it works for: `ends_with`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest
from msgspec import structs

import outfitter
from operators.conftest import HOST, WorkerSetup
from outfitter.lifetimes.orphans import EXIT_CODE
from outfitter.testing import FakeOutfitter
from outfitter_proto.records import Owner
from outfitter_proto.support.processes import process_owner
from support.managers.scripted import ScriptedManager
from support.processes.ending import wait_until_ended

pytestmark = pytest.mark.timeout(60)

HANGING = """
    import atexit, logging, os, sys, threading, outfitter
    class Function: pass
    function = Function()
    other = sys.argv[3] if sys.argv[3] == "java" else int(sys.argv[3])
    outfitter.RuntimeContext({"gpu": 1}, bus=sys.argv[1], host=sys.argv[2], ends_with=other).enter_for(function)
    handler = logging.StreamHandler()
    logging.getLogger().addHandler(handler)

    @atexit.register
    def close():
        with handler.lock:
            logs = threading.Thread(target=logging.error, args=("the connection broke",), daemon=True)
            logs.start()
            print(os.getpid(), flush=True)
            logs.join()
"""
"""A worker of PyFlink that never ends: its main thread holds a handler's lock, and joins a thread that logs."""

JVM = """
    import os, subprocess, sys
    print(os.getpid(), flush=True)
    subprocess.run(["bash", "-c", '"$@"; exit $?', "bash", *sys.argv[1:]])
"""
"""A process `java` that starts bash, which starts the worker."""


@pytest.fixture
def other() -> Iterator[subprocess.Popen[str]]:
    """A process that lasts until a test ends it."""
    with subprocess.Popen(["sleep", "1000"], text=True) as process:
        yield process
        process.kill()


def guards() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "orphan guard"]


@pytest.mark.parametrize("by", ["name", "pid"])
def test_a_worker_whose_main_thread_hangs_ends_with_the_jvm_above_it(
    by: str, url: str, manager: ScriptedManager, tmp_path: Path
) -> None:
    (tmp_path / "java").symlink_to(os.path.realpath(sys.executable))
    (tmp_path / "worker.py").write_text(textwrap.dedent(HANGING))
    worker = [sys.executable, str(tmp_path / "worker.py"), url, HOST]
    start = textwrap.dedent(JVM) if by == "name" else textwrap.dedent(JVM).replace("])", ", str(os.getpid())])")
    command = [str(tmp_path / "java"), "-c", start, *worker, *(["java"] if by == "name" else [])]
    errors = tmp_path / "errors"
    with errors.open("w") as stderr, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as jvm:
        assert jvm.stdout is not None
        assert int(jvm.stdout.readline()) == jvm.pid
        pid = int(jvm.stdout.readline())
        try:
            assert manager.deregistrations == []
            jvm.kill()
            wait_until_ended(pid)
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, SIGKILL)
    assert f"process {jvm.pid}, with which process {pid} was to end, is gone" in errors.read_text()


def test_a_process_ends_with_another_one_and_says_so(
    url: str, manager: ScriptedManager, other: subprocess.Popen[str]
) -> None:
    program = """
        import sys, outfitter
        with outfitter.RuntimeContext({"gpu": 1}, bus=sys.argv[1], host=sys.argv[2], ends_with=int(sys.argv[3])):
            print("entered", flush=True)
            sys.stdin.read()
    """
    command = [sys.executable, "-c", textwrap.dedent(program), url, HOST, str(other.pid)]
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, text=True, **pipes) as worker:
        assert worker.stdout is not None
        assert worker.stderr is not None
        assert worker.stdout.readline() == "entered\n"
        other.kill()
        assert worker.wait(30) == EXIT_CODE
        assert worker.stderr.read().startswith(f"outfitter: process {other.pid}, with which")


@pytest.mark.parametrize("identified", [False, True])
def test_leaving_the_context_ends_the_watch(real: WorkerSetup, other: subprocess.Popen[str], identified: bool) -> None:
    before = set(guards())
    with real.context({"gpu": 1}, ends_with=process_owner(other.pid) if identified else other.pid):
        (guard,) = set(guards()) - before
    guard.join(20)
    assert not guard.is_alive()


def test_a_process_that_is_named_itself_watches_nobody(real: WorkerSetup) -> None:
    name = Path("/proc/self/comm").read_text().rstrip("\n")
    for own in (name, os.getpid()):
        before = guards()
        with real.context({"gpu": 1}, ends_with=own):
            assert guards() == before


def test_one_that_had_the_pid_of_this_process_before_is_gone(real: WorkerSetup) -> None:
    own = process_owner()
    assert own is not None
    with pytest.raises(outfitter.UnwatchableProcessError, match="is gone already"):
        real.context(ends_with=structs.replace(own, start_ticks=own.start_ticks - 1)).__enter__()


def test_a_process_that_has_started_the_named_one_is_nobodys_orphan(real: WorkerSetup, tmp_path: Path) -> None:
    """PyFlink's local execution: the functions run in the Python program that has started the JVM."""
    (tmp_path / "a-jvm-below").symlink_to(shutil.which("sleep") or "")
    before = guards()
    below = subprocess.Popen(["bash", "-c", f"{tmp_path}/a-jvm-below 1000 & echo $!; wait"], stdout=subprocess.PIPE)
    with below:
        assert below.stdout is not None
        pid = int(below.stdout.readline())
        while Path(f"/proc/{pid}/comm").read_text() != "a-jvm-below\n":
            os.sched_yield()  # bash has forked, and not yet executed it
        try:
            with real.context({"gpu": 1}, ends_with="a-jvm-below"):
                assert guards() == before
        finally:
            os.kill(pid, SIGKILL)


def reused(other: Owner) -> Owner:
    return structs.replace(other, start_ticks=other.start_ticks - 1)


def elsewhere(other: Owner) -> Owner:
    return structs.replace(other, pid_ns=other.pid_ns + 1)


@pytest.mark.parametrize(
    ("changed", "why"), [(reused, "is gone already"), (elsewhere, "another boot, machine or namespace")]
)
def test_a_process_that_cannot_be_the_one_is_refused_before_anything_is_registered(
    real: WorkerSetup,
    manager: ScriptedManager,
    other: subprocess.Popen[str],
    changed: Callable[[Owner], Owner],
    why: str,
) -> None:
    identity = process_owner(other.pid)
    assert identity is not None
    with pytest.raises(outfitter.UnwatchableProcessError, match=why), real.context(ends_with=changed(identity)):
        pytest.fail("entered")
    with real.context(worker="next"):
        assert [each.worker for each in manager.registrations] == ["next"]


def test_a_process_that_is_gone_already_is_refused(real: WorkerSetup, other: subprocess.Popen[str]) -> None:
    by_pid, by_identity = real.context(ends_with=other.pid), real.context(ends_with=process_owner(other.pid))
    other.kill()
    other.wait(30)
    for context in (by_pid, by_identity):
        with pytest.raises(outfitter.UnwatchableProcessError, match=f"process {other.pid} is gone already"), context:
            pytest.fail("entered")
    with pytest.raises(outfitter.UnwatchableProcessError, match=f"there is no process {other.pid}"):
        real.context(ends_with=other.pid).__enter__()


def test_a_name_that_no_parent_has_is_refused(real: WorkerSetup) -> None:
    with pytest.raises(outfitter.UnwatchableProcessError, match="no 'no-such-jvm' among the parents of this process"):
        real.context(ends_with="no-such-jvm").__enter__()


def test_a_kernel_without_pidfd_is_named(
    real: WorkerSetup, other: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    with pytest.raises(outfitter.UnwatchableProcessError, match=r"needs Linux 5\.3"):
        real.context(ends_with=other.pid).__enter__()


def test_a_fake_watches_nobody(fake: FakeOutfitter) -> None:
    before = guards()
    with fake.context({"gpu": 1}, ends_with="java"):
        assert guards() == before
