"""What machines and administrators do to managers: no file descriptors left, another configuration after a crash."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from chaos.harm import Harmed, strike
from chaos.scene import DEVICES, Note, playing
from support.kafka.proxy import END_TXN, Harm

pytestmark = [pytest.mark.chaos, pytest.mark.kafka, pytest.mark.timeout(300)]

STARVED_S = 5.0

GPU = 'external-resources = ["gpu"]\n[external-resource.gpu]\namount = 1\ndriver = "static"\n'
CONFIGURATIONS = {
    "half of its devices": f"{GPU}param.count = {DEVICES // 2}\n",
    "devices of other names": f'{GPU}param.devices = "a;b"\nparam.device.a.aliases = "gpu:0"\n',
    "its devices shared": f'{GPU}sharing = "shared"\nparam.count = {DEVICES}\n',
    "another resource in its place": GPU.replace("gpu", "fpga") + "param.count = 2\n",
    "shorter leases": f'lease = "1s"\nlease-grace = "10ms"\n{GPU}param.count = {DEVICES}\n',
}


@contextmanager
def without_descriptors(pid: int) -> Iterator[None]:
    """The process can open nothing: every number below the limit is taken for as long as it lives."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def test_a_manager_that_can_open_nothing_while_its_connection_is_cut_loses_nothing(
    harmed: Harmed, tmp_path: Path, note: Note
) -> None:
    with playing(harmed.broker, tmp_path, "descriptors", note) as scene:
        for host in scene.hosts[:2]:
            name, pid = "a manager: its connection cut, no file descriptors for 5 s", scene.managers[host].pid
            with scene.fault(name) as trouble, without_descriptors(pid):
                strike(harmed, scene, END_TXN, Harm.CONNECTION_LOST, trouble, host=host)
                time.sleep(STARVED_S)


def test_managers_that_are_killed_and_started_with_another_configuration_lose_nothing(
    harmed: Harmed, tmp_path: Path, note: Note
) -> None:
    with playing(harmed.broker, tmp_path, "configuration", note) as scene:
        known = {host: manager.config.read_text() for host, manager in scene.managers.items()}
        for name, changed in CONFIGURATIONS.items():
            for told, texts in ((f"with {name}", dict.fromkeys(known, changed)), ("as before", known)):
                with scene.fault(f"managers: kill -9, started {told}") as trouble:
                    time.sleep(scene.dice.random())
                    for host, manager in scene.managers.items():
                        manager.kill9()
                        trouble.begin()
                        manager.config.write_text(texts[host])
                        manager.start(ready=False)
