"""A worker's programs that outlive it keep its devices: `hold --survivors` and `RuntimeContext(survivors=True)`."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from msgspec import UNSET, to_builtins

from cli.commands.worker.conftest import PATIENCE, line_of
from outfitter import RuntimeContext
from outfitter.errors import InvalidRequestError
from outfitter_proto.records import Survivors
from outfitter_proto.support.processes import process_owner, user_namespace
from support.managers.process import OUTFITTER, Manager, StartManager

pytestmark = pytest.mark.slow

HOLDING = """
import json, os, subprocess, sys
hold = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
record = json.loads(hold.stdout.readline())
names = {f"OUTFITTER_{name.upper()}": record[name] for name in ("host", "worker", "incarnation")}
print(subprocess.Popen(["sleep", "1000"], env={**os.environ, **names}).pid, flush=True)
sys.stdin.read()
"""
IN_A_CONTEXT = """
import os, subprocess, sys
from outfitter import RuntimeContext
with RuntimeContext({"gpu": 1}, worker="w", survivors=True) as context:
    print(subprocess.Popen(["sleep", "1000"], env={**os.environ, **context.child_env}).pid, flush=True)
    sys.stdin.read()
"""
A_CONTEXT_LEAVES_IT = """
import os, subprocess, sys
from outfitter import RuntimeContext
with RuntimeContext({"gpu": 1}, worker="inner", survivors=True) as context:
    program = subprocess.Popen(["sleep", "1000"], env={**os.environ, **context.child_env}, start_new_session=True)
    print(program.pid, flush=True)
    program.wait()
"""
A_RUN_LEAVES_IT = 'setsid sleep 1000 & echo "$!"; wait'
INNER = {
    "run": [*OUTFITTER, "run", "--worker", "inner", "--", "sh", "-c", A_RUN_LEAVES_IT],
    "context": [sys.executable, "-c", A_CONTEXT_LEAVES_IT],
}
WAYS = {
    "hold": [HOLDING, *OUTFITTER, "hold", "--resource", "gpu=1", "--worker", "w", "--survivors"],
    "context": [IN_A_CONTEXT],
}


APART = (
    "unshare", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), "--pid", "--fork", "--kill-child",
    "--mount-proc",
)  # fmt: skip
"""What starts a program in a PID namespace of its own."""


@contextmanager
def worker(manager: Manager, *command: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A worker that has a device and has started a program, and that program's pid."""
    with subprocess.Popen(
        [sys.executable, "-c", *command],
        env=manager.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        try:
            yield process, int(line)
        finally:
            process.kill()
            os.kill(int(line), signal.SIGKILL)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ending", ["killed", "given back"])
def test_a_program_that_outlives_its_worker_keeps_the_device(one_gpu: Manager, way: str, ending: str) -> None:
    with worker(one_gpu, *WAYS[way]) as (process, program):
        if ending == "killed":
            process.kill()
        else:
            assert process.stdin is not None
            process.stdin.close()
        record = one_gpu.wait_for_state("w", "releasing")
        one_gpu.wait_for(lambda: f"{program} (sleep)" in str((one_gpu.record("w") or {}).get("delayed_by")))
        assert record["resources"]["gpu"]
    one_gpu.wait_for_state("w", "ended")


def test_programs_that_a_manager_has_named_keep_the_device_from_one_that_cannot_see_them(
    start_manager: StartManager,
) -> None:
    """As if the manager's container had been made anew. A manager beside the programs looks again."""
    first = start_manager(gpus=1)
    apart = Manager(first.folder, first.config.read_text(), host=first.host, program=[*APART, *OUTFITTER])
    with first.popen("run", "--worker", "w", "--", "sh", "-c", A_RUN_LEAVES_IT) as run:
        program = int(line_of(run))
        try:
            run.kill()
            first.wait_for(lambda: f"{program} (sleep)" in str((first.record("w") or {}).get("delayed_by")))
            first.kill9()
            apart.start()
            apart.outfitter("register", "--worker", "next", "--lease", "none")
            words = "as an earlier manager saw; this one does not see the worker's processes"
            apart.wait_for(lambda: words in str((apart.record("w") or {}).get("delayed_by")))
            assert f"{program} (sleep)" in apart.wait_for_state("w", "releasing")["delayed_by"]
            assert words in apart.outfitter("status").stdout
            assert words in apart.outfitter("explain", "next").stdout
            [command] = re.findall("If these processes have ended: `(.*)`", apart.outfitter("explain", "w").stdout)
            apart.kill9()
            apart.start()
            apart.wait_for_state("next", "pending")
            assert apart.record("w")["delayed_by"].count(words) == 1
            assert apart.outfitter(*shlex.split(command)[1:]).returncode == 0
            apart.wait_for_state("w", "ended")
            apart.wait_for_state("next", "allocated")
        finally:
            apart.kill9()
            os.kill(program, signal.SIGKILL)


def test_survivors_of_nobody_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="survivors needs an owner"):
        RuntimeContext({"gpu": 1}, survivors=True, owner=False)


def test_the_survivors_of_another_users_process_have_its_user(one_gpu: Manager) -> None:
    user = 65534 if os.geteuid() == 0 else os.getuid()
    with subprocess.Popen(["sleep", "1000"], user=user) as other:
        try:
            context = RuntimeContext({"gpu": 1}, owner=process_owner(other.pid) or False, survivors=True)
            survivors = Survivors(uid=user, user_ns=user_namespace() or UNSET)
            assert context._settings.registration.survivors == survivors
            hold = ["hold", "--worker", "w", "--survivors", "--owner-pid", str(other.pid)]
            with one_gpu.popen(*hold, stdin=subprocess.PIPE) as process:
                assert one_gpu.wait_for_state("w", "allocated")["request"]["survivors"] == to_builtins(survivors)
                process.communicate(timeout=60)
        finally:
            other.kill()


def test_the_operator_of_a_context_is_that_of_the_programs_that_it_starts(one_gpu: Manager) -> None:
    show = "print([info['id'] for info in {}.get_external_resource_infos('gpu')], flush=True)"
    inner = f"from outfitter import RuntimeContext as C\nwith C() as c: {show.format('c')}"
    outer = f"""
import os, subprocess, sys
from outfitter import RuntimeContext
with RuntimeContext(operators={{"infer": {{"gpu": 1}}}}, operator="infer") as context:
    {show.format("context")}
    subprocess.run([sys.executable, "-c", {inner!r}], env={{**os.environ, **context.child_env}}, check=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", outer], env=one_gpu.environment, capture_output=True, text=True, timeout=60, check=True
    )
    mine, its = done.stdout.splitlines()
    assert mine == its != "[]"


def test_a_context_in_a_program_that_a_worker_starts_has_the_workers_devices(one_gpu: Manager) -> None:
    inner = "from outfitter import RuntimeContext as C\nwith C() as c: print(c.worker, c.env['CUDA_VISIBLE_DEVICES'])"
    outer = f"""
import os, subprocess, sys
from outfitter import RuntimeContext
with RuntimeContext({{"gpu": 1}}, worker="w") as context:
    print(context.worker, context.env["CUDA_VISIBLE_DEVICES"], flush=True)
    subprocess.run([sys.executable, "-c", {inner!r}], env={{**os.environ, **context.child_env}}, check=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", outer], env=one_gpu.environment, capture_output=True, text=True, timeout=60, check=True
    )
    mine, its = done.stdout.splitlines()
    assert mine == its
    one_gpu.wait_for_state("w", "ended")


@pytest.mark.parametrize("inner", INNER)
def test_a_program_of_a_worker_inside_a_run_keeps_the_devices_of_both(start_manager: StartManager, inner: str) -> None:
    manager = start_manager(gpus=2)
    with manager.popen("run", "--worker", "outer", "--", *INNER[inner]) as run:
        program = int(line_of(run))
        try:
            run.kill()
            for worker in ("inner", "outer"):
                manager.wait_for_state(worker, "releasing")
                named = f"{program} (sleep)"
                manager.wait_for(lambda: named in str((manager.record(worker) or {}).get("delayed_by")))  # noqa: B023
        finally:
            os.kill(program, signal.SIGKILL)
        run.communicate(timeout=PATIENCE)
    for worker in ("inner", "outer"):
        manager.wait_for_state(worker, "ended")
