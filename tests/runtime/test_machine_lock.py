"""The machine's lock: who holds it is named, old and new managers exclude each other, and no stranger keeps a service
from starting that has a directory of its own."""

from __future__ import annotations

import os
import re
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from outfitter_proto.support import manager_lock
from outfitter_service.runtime import machine_lock
from outfitter_service.runtime.machine_lock import ManagerExistsError, alone_on_machine, holder_of, socket_name
from support.managers.process import ManagerError, StartManager
from support.polling import until

OLD = """
import socket, sys
held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
held.bind("\\0outfitter-manager/" + sys.argv[1])
print(flush=True)
input()
"""
"""All that a manager of earlier versions does, or a stranger."""


@pytest.fixture
def host() -> str:
    return f"t-{secrets.token_hex(5)}"


@pytest.fixture
def old(host: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", OLD, host]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        yield holder
        holder.kill()


@pytest.fixture
def own(tmp_path: Path) -> dict[str, str]:
    """The environment of a service with a directory of its own."""
    (tmp_path / "own").mkdir(mode=0o755)
    return {"RUNTIME_DIRECTORY": str(tmp_path / "own")}


def refusal(host: str, environment: dict[str, str], **more: tuple[int, ...]) -> str:
    with pytest.raises(ManagerExistsError) as refused, alone_on_machine(host, environment, **more):
        pytest.fail("two managers")
    return str(refused.value)


def test_a_second_manager_says_which_process_of_whose_serves_the_host(start_manager: StartManager) -> None:
    first = start_manager()
    with pytest.raises(ManagerError, match=rf"process {first.pid} of .*\(?uid {os.geteuid()}\)?"):
        start_manager(host=first.host)


def test_a_manager_of_an_earlier_version_is_named_too_and_excluded_either_way(
    host: str, old: subprocess.Popen[bytes], own: dict[str, str]
) -> None:
    for environment in ({}, own):
        assert f"process {old.pid} of " in refusal(host, environment)


def test_a_manager_excludes_those_of_earlier_versions(host: str, own: dict[str, str]) -> None:
    for environment in ({}, own):
        with alone_on_machine(host, environment), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as late:
            with pytest.raises(OSError, match="in use"):
                late.bind(socket_name(host))
            assert holder_of(socket_name(host)).pid == os.getpid()


def test_a_manager_is_named_to_those_who_may_not_look_into_its_process(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As users may not look into root's."""
    monkeypatch.setattr(machine_lock, "_process_with", lambda _: None)
    with alone_on_machine(host, {}):
        assert f"process {os.getpid()} of " in refusal(host, {})


def test_a_manager_is_named_however_often_somebody_asks(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each `outfitter status` of a host whose manager is silent asks, and nobody may look into root's processes."""
    monkeypatch.setattr(machine_lock, "_process_with", lambda _: None)
    with alone_on_machine(host, {}):
        # whoever asks does not wait: it is told nothing while the queue of a busy manager is full
        for _ in range(100):
            until(lambda: manager_lock.holder(host) == os.getpid(), lambda: "it is not named")
            until(lambda: holder_of(socket_name(host)).pid == os.getpid(), lambda: "it is not named")


def test_a_stranger_keeps_no_service_from_starting_that_has_a_directory_of_its_own(
    host: str, old: subprocess.Popen[bytes], own: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    ours = (os.geteuid() + 1,)
    told = refusal(host, {}, managers=ours)
    assert f"process {old.pid} of " in told
    assert "RuntimeDirectory=" in told
    with alone_on_machine(host, own, managers=ours):
        assert re.search(rf"stranger holds the machine's lock.*process {old.pid} of ", capsys.readouterr().out)
        # and nobody else of the service
        assert f"process {os.getpid()} of " in refusal(host, own, managers=ours)
    with alone_on_machine(host, own, managers=ours):
        pass


def test_who_cannot_be_told_may_be_a_manager(
    host: str, old: subprocess.Popen[bytes], own: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(name: bytes) -> Iterator[tuple[int, int | None]]:
        raise OSError("no such socket family")

    monkeypatch.setattr(machine_lock, "_unix_sockets", nothing)
    assert "does not name" in refusal(host, own, managers=(os.geteuid() + 1,))


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_a_directory_that_others_may_write_is_not_the_services_own(
    host: str, old: subprocess.Popen[bytes], own: dict[str, str], mode: int
) -> None:
    Path(own["RUNTIME_DIRECTORY"]).chmod(mode)
    refusal(host, own, managers=(os.geteuid() + 1,))


def test_of_several_directories_the_first_that_is_there_counts(host: str, own: dict[str, str]) -> None:
    several = {"RUNTIME_DIRECTORY": f"/nowhere:{own['RUNTIME_DIRECTORY']}"}
    with alone_on_machine("h" * 253, several), alone_on_machine(host, several):
        assert len(list(Path(own["RUNTIME_DIRECTORY"]).iterdir())) == 2


def test_a_lock_that_is_a_link_to_elsewhere_is_not_followed(host: str, own: dict[str, str], tmp_path: Path) -> None:
    (Path(own["RUNTIME_DIRECTORY"]) / f"manager-{host}.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"), alone_on_machine(host, own):
        pytest.fail("it was followed")
