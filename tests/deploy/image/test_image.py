"""The image as a user runs it: read-only, as nobody, without a capability."""

from __future__ import annotations

import json
import re
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.containers import Container, Image, Mount, answer
from support.documents import ROOT
from support.kafka.broker import free_port
from support.polling import until

pytestmark = pytest.mark.image

PAGE = ROOT / "deploy" / "image" / "README.md"
MEGABYTE = 1_000_000


def done(command: list[str]) -> subprocess.CompletedProcess[str]:
    """A command that ended."""
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100)


def added(image: Image) -> Iterator[tuple[Path, int, int]]:
    """What the image adds to its base: each path with its mode and its size in bytes."""
    for path in (image.root / "opt" / "outfitter").rglob("*"):
        seen = path.lstat()
        yield path, seen.st_mode, seen.st_size


def test_it_runs_as_nobody_without_a_capability_on_a_read_only_root(image: Image) -> None:
    script = """
import json, os, pathlib
status = dict(line.split(":\\t") for line in pathlib.Path("/proc/self/status").read_text().splitlines())
refused = {}
for folder in "/", "/opt/outfitter", "/etc", "/var/lib":
    try:
        pathlib.Path(folder, "x").touch()
    except OSError as error:
        refused[folder] = error.strerror
print(json.dumps({"pid": os.getpid(), "user": [*os.getresuid(), *os.getresgid(), *os.getgroups()], "refused": refused,
    "rights": {name: status[name].strip() for name in status if name.startswith("Cap") or name == "NoNewPrivs"}}))
"""
    seen = json.loads(done(image.within(["-c", script], entrypoint=["python"])).stdout)
    assert seen["user"] == [65532] * 6
    assert seen["pid"] == 1
    assert {name: int(value, 16) for name, value in seen["rights"].items()} == {
        "CapEff": 0, "CapPrm": 0, "CapInh": 0, "CapAmb": 0, "CapBnd": 0, "NoNewPrivs": 1,
    }  # fmt: skip
    assert seen["refused"] == dict.fromkeys(("/", "/opt/outfitter", "/etc", "/var/lib"), "Read-only file system")


def test_the_demonstration_succeeds_in_it(image: Image) -> None:
    demo = done(image.within(["demo"], scratch=["/tmp"]))
    assert demo.returncode == 0, demo.stdout + demo.stderr


def test_its_own_command_serves_until_sigterm_and_ends_with_0(image: Image, tmp_path: Path) -> None:
    port = free_port()
    assert image.command == ["serve", "--http", "0.0.0.0:9477"]
    command = [*image.command[:-1], f"127.0.0.1:{port}"]
    config = tmp_path / "outfitter.toml"
    config.write_text(f'bus = "sqlite:////tmp/bus/bus.db"\nhost = "image-{port}"\n')
    config.chmod(0o644)
    mounts = [Mount(config, "/etc/outfitter/outfitter.toml")]
    manager = Container(image.within(command, mounts=mounts, scratch=["/tmp"]), tmp_path / "log")
    try:
        until(lambda: answer(f"http://127.0.0.1:{port}/readyz").status == 200, manager.output)
        assert manager.stop() == 0, manager.output()
    finally:
        manager.kill9()


def test_it_has_nothing_that_built_it(image: Image) -> None:
    names = {path.name.partition("-")[0] for path, _, _ in added(image) if path.name.endswith(".dist-info")}
    assert "outfitter" in names
    assert names & {"pip", "setuptools", "wheel", "hatchling", "editables"} == set()


def test_its_user_can_read_what_it_adds_and_write_none_of_it(image: Image) -> None:
    for path, mode, _ in added(image):
        if not stat.S_ISLNK(mode):
            assert mode & stat.S_IROTH, path
            assert not mode & (stat.S_IWOTH | stat.S_IWGRP | stat.S_ISUID | stat.S_ISGID), path
        assert path.lstat().st_uid == 0, path


def test_it_adds_no_more_than_its_page_says(image: Image, capsys: pytest.CaptureFixture[str]) -> None:
    size = sum(size for _, _, size in added(image)) / MEGABYTE
    with capsys.disabled():
        print(f"\nthe image adds {size:.0f} MB to its base")
    (stated,) = re.findall(r"adds (\d+) MB", PAGE.read_text())
    assert 0.8 * int(stated) < size <= int(stated)
