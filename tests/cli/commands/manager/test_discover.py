"""`outfitter discover`: one call of a driver. discover.txt has what it prints; here is what ends it."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from support.drivers.gpu_machine import executable
from support.managers.process import OUTFITTER, environment
from support.processes.ending import wait_until_ended
from support.transcripts import Scene, scenes

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("scene", scenes(Path(__file__).with_name("discover.txt")), ids=str)
def test_discover(scene: Scene, tmp_path: Path) -> None:
    scene.play(tmp_path)


@pytest.fixture
def scripted(tmp_path: Path) -> Path:
    """A configuration whose script is `tmp_path/script`. It may take ten minutes."""
    config = tmp_path / "outfitter.toml"
    config.write_text(
        'external-resources = ["gpu"]\n[external-resource.gpu]\namount = 1\ndriver = "gpu"\n'
        f'param.discovery-script.path = "{tmp_path}/script"\nparam.discovery-script.timeout = "600s"\n'
    )
    return config


@pytest.mark.parametrize(("number", "handling"), [("TERM", "default"), ("HUP", "default"), ("HUP", "ignore")])
def test_a_signal_that_ends_the_command_ends_its_script(
    scripted: Path, tmp_path: Path, number: str, handling: str
) -> None:
    asked, proceed = tmp_path / "asked", tmp_path / "proceed"
    os.mkfifo(asked)
    os.mkfifo(proceed)
    executable(tmp_path / "script", f"echo $$ > {asked}; read _ < {proceed}; echo 0")
    is_ignored = handling == "ignore"
    writer = os.open(proceed, os.O_RDWR)
    command = ["env", f"--{handling}-signal={number}", *OUTFITTER, "discover", "gpu"]  # whatever was inherited
    with subprocess.Popen([*command, "--config", str(scripted)], env=environment(), stdout=subprocess.PIPE) as process:
        try:
            pid = int(asked.read_text())
            process.send_signal(signal.Signals[f"SIG{number}"])
            if is_ignored:
                os.write(writer, b"\n")
            assert process.wait(60) == (0 if is_ignored else -signal.Signals[f"SIG{number}"])
        finally:
            process.kill()
            os.close(writer)
    wait_until_ended(pid)


def test_the_first_process_of_a_namespace_ends_as_well(scripted: Path, tmp_path: Path) -> None:
    """The kernel ignores signals that such a process sends to itself."""
    executable(tmp_path / "script", "kill -TERM 1; sleep 1000")
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    done = subprocess.run(
        ["unshare", *user, "--pid", "--fork", "--kill-child", *OUTFITTER, "discover", "gpu", "--config", str(scripted)],
        env=environment(), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, "")
