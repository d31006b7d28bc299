"""`exec outfitter run` in a process that has children already, such as a script: its command did not leave them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from cli.commands.worker.conftest import finish, line_of
from support.managers.process import OUTFITTER, Manager
from support.processes.ending import has_ended, wait_until_ended

HAVING = """
import os, subprocess, sys
lines = "sleep 1000 >/dev/null 2>&1 & echo $!; exec sleep 1000 >/dev/null 2>&1"
child = subprocess.Popen(["sh", "-c", lines], stdout=subprocess.PIPE, text=True)
print(child.pid, child.stdout.readline(), end="", flush=True)
os.execvpe(sys.argv[1], sys.argv[1:], {**os.environ, "CHILD": str(child.pid)})
"""
"""Starts a child and a grandchild, prints their pids, and becomes another program."""
LEAVE = "sleep 1000 >/dev/null 2>&1 & echo $!"
"""Leaves a process behind."""


@contextmanager
def run_with_children(manager: Manager, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], int, int]]:
    """`outfitter run` in a process that had a child and a grandchild before; their pids."""
    with subprocess.Popen(
        [sys.executable, "-c", HAVING, *OUTFITTER, "run", "--worker", "w", *arguments],
        env=manager.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        child, grandchild = map(int, line_of(process).split())
        watched = [os.pidfd_open(pid) for pid in (child, grandchild)]
        try:
            yield process, child, grandchild
        finally:
            process.kill()
            for pidfd in watched:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                os.close(pidfd)


@pytest.mark.parametrize("options", [[], ["--kill-survivors"]])
def test_children_from_before_are_neither_waited_for_nor_ended(one_gpu: Manager, options: list[str]) -> None:
    with run_with_children(one_gpu, *options, "--", "true") as (process, child, grandchild):
        assert finish(process) == (0, "", "")
        assert not has_ended(child)
        assert not has_ended(grandchild)
    one_gpu.wait_for_state("w", "ended")


@pytest.mark.parametrize("options", [[], ["--kill-survivors"]])
def test_a_grandchild_from_before_whose_parent_ends_is_not_left_behind(one_gpu: Manager, options: list[str]) -> None:
    with run_with_children(one_gpu, *options, "--", "sh", "-c", "kill $CHILD") as (process, child, grandchild):
        assert finish(process) == (0, "", "")
        assert has_ended(child)
        assert not has_ended(grandchild)


def test_only_what_the_command_left_behind_is_named_and_ended(one_gpu: Manager) -> None:
    with run_with_children(one_gpu, "--", "sh", "-c", LEAVE) as (process, child, grandchild):
        survivor = int(line_of(process))
        assert process.stderr is not None
        assert process.stderr.readline().endswith(
            f"until what it left behind has ended, too: {survivor} (sleep 1000) (Ctrl-C or SIGTERM ends it)\n"
        )
        process.send_signal(signal.SIGTERM)
        assert finish(process)[0] == 0
        wait_until_ended(survivor)
        assert not has_ended(child)
        assert not has_ended(grandchild)


def test_a_lost_allocation_ends_no_children_from_before(one_gpu: Manager) -> None:
    with run_with_children(one_gpu, "--", "sh", "-c", "echo ready; exec sleep 1000") as (process, child, grandchild):
        assert line_of(process) == "ready"
        assert one_gpu.outfitter("deregister", "--worker", "w").returncode == 0
        assert finish(process)[0] == -signal.SIGTERM
        assert not has_ended(child)
        assert not has_ended(grandchild)


def test_a_script_whose_output_goes_through_a_child_ends(one_gpu: Manager) -> None:
    """The child ends only when `outfitter run` has closed its output."""
    script = 'mkfifo pipe; cat <pipe & exec >pipe; exec "$@"'
    done = subprocess.run(
        ["sh", "-c", script, "sh", *OUTFITTER, "run", "--", "echo", "done"],
        env=one_gpu.environment, cwd=one_gpu.folder, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
