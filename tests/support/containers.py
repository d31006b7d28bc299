"""Containers without an engine: an image's unpacked root under bubblewrap, as root.

A container has what Docker gives with `--read-only --cap-drop ALL --security-opt no-new-privileges`: a read-only root,
the image's user and command, no capability, and PIDs of its own. Its network is this machine's.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tools import tool

ENDS_WITHIN_S = 90.0
"""A command that ends by itself, on a busy machine."""
STOPPED_WITHIN_S = 30.0


class Mount(NamedTuple):
    """A file or folder of this machine in a container."""

    source: Path
    target: str
    writable: bool = False

    def arguments(self) -> list[str]:
        """Those of bubblewrap."""
        folder = str(Path(self.target).parent)  # which others may enter only if it is made by itself
        return ["--dir", folder, "--bind" if self.writable else "--ro-bind", str(self.source), self.target]


class Image:
    """What `tests/deploy/image/build` leaves in a folder: the unpacked root, and the image's configuration."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "root"
        settings = json.loads((folder / "image.json").read_text())["OCIv1"]["config"]
        self.user: str = settings["User"]
        self.entrypoint: list[str] = settings["Entrypoint"]
        self.command: list[str] = settings["Cmd"]
        self.environment = dict(variable.split("=", 1) for variable in settings["Env"])

    def within(
        self,
        command: Sequence[str] | None = None,
        *,
        entrypoint: Sequence[str] | None = None,
        environment: Mapping[str, str] | None = None,
        mounts: Sequence[Mount] = (),
        scratch: Sequence[str] = (),
        own_pids: bool = True,
    ) -> list[str]:
        """The command line that runs `command` in a container; None: the image's own.

        `scratch`: where the container has an empty folder in memory. `own_pids` false: it sees this machine's.
        """
        user, group = self.user.split(":")
        variables = self.environment | dict(environment or {})
        return [
            program("bwrap"), "--bind", str(self.root), "/", "--proc", "/proc", "--dev", "/dev",
            *(argument for folder in scratch for argument in ("--perms", "1777", "--tmpfs", folder)),
            *(argument for mount in mounts for argument in mount.arguments()),
            "--remount-ro", "/", "--unshare-ipc", "--unshare-uts",
            *(["--unshare-pid", "--as-pid-1"] if own_pids else []),
            "--clearenv", *(argument for item in variables.items() for argument in ("--setenv", *item)),
            "--chdir", "/", "--cap-drop", "ALL", *(f for name in SWITCHING for f in ("--cap-add", name)), "--",
            # the image's user, with none of the capabilities that becoming it took
            "setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups",
            "--bounding-set=-all", "--inh-caps=-all", "--pdeathsig=KILL", "--",
            *(self.entrypoint if entrypoint is None else entrypoint), *(self.command if command is None else command),
        ]  # fmt: skip


SWITCHING = ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP")


class Container:
    """A process that bubblewrap started. `log` gets what it prints."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self.log = log
        told, tell = os.pipe()
        name, *rest = command
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [name, "--info-fd", str(tell), *rest],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=[tell],
            )  # fmt: skip
        os.close(tell)
        with os.fdopen(told) as info:
            text = info.read()
        if not text:
            self._process.wait()
            pytest.fail(f"bubblewrap started nothing: {self.output()}", pytrace=False)
        self.pid: int = json.loads(text)["child-pid"]

    def output(self) -> str:
        """What it has printed."""
        return self.log.read_text(errors="replace")

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def kill9(self) -> None:
        """End it as a crash would."""
        if self.running:
            os.kill(self.pid, signal.SIGKILL)
        self._process.wait(STOPPED_WITHIN_S)

    def wait(self) -> int:
        """Its exit code, when it ends by itself."""
        return self._process.wait(ENDS_WITHIN_S)

    def stop(self) -> int:
        """Send SIGTERM to its first process, and return its exit code."""
        if self.running:
            os.kill(self.pid, signal.SIGTERM)
        return self._process.wait(STOPPED_WITHIN_S)


def program(name: str) -> str:
    """The path of a program: `prometheus`, or one of those beside buildah."""
    return str(tool("prometheus") if name == "prometheus" else tool("buildah") / name)


class Answer(NamedTuple):
    """What a server answered; status 0: nobody answers."""

    status: int
    body: str


def answer(url: str, *, token: str | None = None) -> Answer:
    """The answer to a GET request."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=10) as response:  # noqa: S310
            return Answer(response.status, response.read().decode())
    except urllib.error.HTTPError as error:
        return Answer(error.code, error.read().decode())
    except OSError as error:
        return Answer(0, str(error))
