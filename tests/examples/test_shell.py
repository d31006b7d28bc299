"""examples/shell does what each worker must do."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from examples.contract import Program, WorkerContract, built, vectors
from support.documents import ROOT
from support.managers.process import Manager
from support.polling import until
from support.processes.tools import needs

pytestmark = pytest.mark.examples

TIMEOUT = f"""#!/bin/sh
case $1 in *[!0-9.]*) exit 125 ;; esac
exec {shutil.which("timeout")} "$@"
"""
"""timeout(1) that refuses the durations that BusyBox' refuses."""


def build() -> Program:
    needs("bash", "jq", "java", "mvn")
    folder = built("shell", [])
    timeout = folder / "timeout"
    timeout.write_text(TIMEOUT)
    timeout.chmod(0o755)
    path = f"{folder}:{ROOT / 'deploy' / 'kafka' / 'bin'}:{os.environ['PATH']}"
    # each heartbeat starts a Java virtual machine, which may take seconds
    return Program(folder, ["env", f"PATH={path}", "bash", "worker.sh"], lease_s=30)


@pytest.fixture(scope="module")
def program() -> Program:
    return build()


class TestShell(WorkerContract):
    def test_while_nothing_happens_it_starts_no_process(self, program: Program, one_gpu: Manager) -> None:
        """So it substitutes no command then: bash 5.2 may lose a signal that comes while it parses a substitution."""
        with self.worker(program, one_gpu, "idle", lease_s=600) as worker:
            worker.wait_for("yours")
            bash = Path(f"/proc/{worker.pid}")

            def go_round() -> None:
                """Wait until it has waited for records some more times."""
                waits = psutil.Process(worker.pid).num_ctx_switches().voluntary + 20
                until(lambda: psutil.Process(worker.pid).num_ctx_switches().voluntary > waits, worker.output)

            def faults_of_children() -> str:
                """proc(5) `cminflt`, which grows with each child that it has waited for."""
                return (bash / "stat").read_text().rpartition(")")[2].split()[8]

            go_round()  # past what it does with its record
            before = faults_of_children()
            assert one_gpu.outfitter("register", "--worker", "other", "--lease", "600").returncode == 0
            one_gpu.wait_for_state("other", "pending")
            go_round()
            assert faults_of_children() == before
            worker.signal(signal.SIGTERM)
            assert worker.wait() == 0

    def test_it_concludes_what_the_vectors_say(self, program: Program) -> None:
        folder, _ = vectors()
        file = json.loads((folder / "records.json").read_text())
        own = "/".join(file[name] for name in ("host", "worker", "incarnation"))
        # it reads all partitions, and has no host's partition to compare with
        rows = [row for row in file["vectors"] if row["partition"] == file["partition"]]
        assert words(program, own, rows) == [row["then"] for row in rows]
        for sequence in json.loads((folder / "sequences.json").read_text())["vectors"]:
            rows = [row for row in sequence["records"] if row["partition"] == file["partition"]]
            if "only" in sequence:  # it never registers again
                continue
            now, concluded = "waiting", []
            for word in words(program, own, rows):
                now = now if word == "skip" or now in {"over", "failed"} else word
                concluded.append(now)
            assert concluded == [row["then"] for row in rows], sequence["name"]

    def test_its_lease_is_lost_when_the_vectors_say_so(self, program: Program) -> None:
        folder, _ = vectors()
        script = 'while read -r command; do eval "$command"; done'
        for vector in json.loads((folder / "leases.json").read_text())["vectors"]:
            lines = [f"lease={hundredths(vector['lease_s'] or 0)} alive_at={hundredths(vector['registered_at'])}"]
            for step in vector["steps"]:
                now = hundredths(step["at"])
                if "acknowledged" in step:
                    lines.append(f"acknowledge {hundredths(step['acknowledged'])} {now}")
                lines.append(f"is_lost {now} && echo lost || echo held")
            expected = [step["then"].replace("at-risk", "held") for step in vector["steps"]]
            assert functions(program, script, lines) == expected, vector["name"]


def words(program: Program, own: str, rows: list[dict[str, Any]]) -> list[str]:
    """What the script says of each row."""
    script = 'while IFS= read -r key && IFS= read -r body; do status "$own" "$key" "$body"; done'
    return functions(program, script, [line for row in rows for line in (row["key"], body(row))], own=own)


def body(row: dict[str, Any]) -> str:
    """A record's body as the console consumer prints it."""
    return str(row["text"]) if "text" in row else json.dumps(row["value"])


def hundredths(seconds: float) -> int:
    return round(seconds * 100)


def functions(program: Program, script: str, lines: list[str], **variables: str) -> list[str]:
    """What `script` prints for `lines` on its standard input, beside the functions of the worker."""
    given = [f"{name}={value}" for name, value in variables.items()]
    done = subprocess.run(
        ["env", *given, "bash", "-c", f". ./worker.sh\n{script}"],
        cwd=program.folder, input="\n".join([*lines, ""]), capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
