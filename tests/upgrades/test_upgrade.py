"""A running fleet of an earlier version goes over to this one, manager by manager, under load; then one goes back.

The brokers let nobody in unasked. The topics are the earlier version's, and each principal has the rights of the
earlier version's page. One manager stays old for ever, and on each host one worker's program is old and one is new.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest

from outfitter_proto.bus import connect
from support.kafka.secure_broker import SecureBroker, right, secure_broker
from support.managers.granted import MANAGER, granted
from support.managers.process import OUTFITTER, Manager, environment, files_config
from support.polling import until
from tools import tool

__all__ = ["secure_broker"]

pytestmark = [pytest.mark.upgrade, pytest.mark.kafka, pytest.mark.timeout(900)]

EARLIER = (str(tool("earlier") / "venv" / "bin" / "python"), "-m", "outfitter_service.cli")
OLD_PAGE = tool("earlier") / "tree" / "deploy" / "security.md"
PARTITIONS = 4
RUNS = 3
"""Commands that end well on each host, of each program, between two steps."""
WITHIN_S = 120.0

COMMAND = """
exec 9>>"$LOCKS/$OUTFITTER_HOST-$CUDA_VISIBLE_DEVICES"
flock --nonblock 9 || { echo "$OUTFITTER_HOST $CUDA_VISIBLE_DEVICES" >>"$LOCKS/twice"; exit 3; }
sleep 0.3
"""
"""Holds a lock of the device while it lives: whoever is lent the same device meanwhile notes that."""


class Load:
    """Workers on each host, one after the other. `well`: how many ended well, by host and program."""

    def __init__(self, folder: Path, variables: Mapping[str, str], hosts: list[str]) -> None:
        self.well: Counter[tuple[str, str]] = Counter()
        self.wrong: list[str] = []
        self.locks = folder / "locks"
        self.locks.mkdir()
        self._variables = variables
        self._ended = threading.Event()
        programs = {"old": EARLIER, "new": OUTFITTER}
        self._threads = [
            threading.Thread(target=self._work, args=(host, name, program))
            for host in hosts
            for name, program in programs.items()
        ]

    def _work(self, host: str, name: str, program: tuple[str, ...]) -> None:
        env = environment(OUTFITTER_HOST=host, LOCKS=str(self.locks), **self._variables)
        while not self._ended.is_set():
            done = subprocess.run(
                [*program, "run", "--resource", "gpu=1", "--wait", "60s", "--", "sh", "-c", COMMAND],
                env=env, capture_output=True, text=True, timeout=WITHIN_S,
            )  # fmt: skip
            if done.returncode == 0:
                self.well[host, name] += 1
            elif "no manager answers" not in done.stderr:  # while it is exchanged
                self.wrong.append(f"{host} {name}: {done.returncode} {done.stderr}")

    def goes_on(self) -> None:
        """Block until each program has had its device on each host some times more."""
        before = Counter(self.well)
        until(
            lambda: self.wrong or all(self.well[key] >= before[key] + RUNS for key in before),
            lambda: f"{before} -> {self.well}",
            within_s=WITHIN_S,
        )
        assert self.wrong == []
        assert not (self.locks / "twice").exists()

    @contextmanager
    def running(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            until(lambda: len(self.well) == len(self._threads), lambda: f"{self.well} {self.wrong}", within_s=WITHIN_S)
            yield
        finally:
            self._ended.set()
            for thread in self._threads:
                thread.join()


class Fleet:
    """Managers with rights of their own, and what they log in with."""

    def __init__(self, broker: SecureBroker, folder: Path, hosts: list[str], cluster: str) -> None:
        self.broker = broker
        self.cluster = cluster
        self.managers: dict[str, Manager] = {}
        self.principals = {host: f"m-{secrets.token_hex(4)}" for host in hosts}
        for host, principal in self.principals.items():
            self.grant(OLD_PAGE, MANAGER, principal, host)
            login = "".join(f'{name} = "{value}"\n' for name, value in broker.scram(principal).items())
            config = files_config(folder / host / "gpus", extra='lease = "20s"\nlease-grace = "5s"')
            self.managers[host] = Manager(
                folder / host, f"{config}[kafka]\n{login}", bus=broker.at("sasl"), host=host, cluster=cluster,
                program=EARLIER,
            )  # fmt: skip

    def started(self) -> None:
        """Start all managers. For its first start in a partition where others write, 0.2.0 wants two rights more than
        its page grants."""
        more = [
            right(f"User:{principal}", "Read", "topic", f"{self.cluster}.{topic}")
            for principal in self.principals.values()
            for topic in ("history", "dead-letters")
        ]
        self.broker.allow(*more)
        for manager in self.managers.values():
            manager.start()
        self.broker.withdraw(*more)

    def grant(self, page: Path, role: str, principal: str, host: str) -> None:
        rights = granted(self.cluster, host, page=page)[role]
        self.broker.allow(*(right(f"User:{principal}", *each[:3], prefixed=each[3]) for each in rights))

    def exchange(self, host: str, program: tuple[str, ...]) -> str:
        """Have another program serve a host; give what it logged at its start."""
        old = self.managers[host]
        assert old.stop() == 0, old.log_tail()
        begun = old.log.stat().st_size
        new = Manager(
            old.folder, old.config.read_text(), bus=old.bus_url, host=host, cluster=self.cluster, program=program
        )
        self.managers[host] = new
        new.start()
        return new.log.read_bytes()[begun:].decode()

    def refused(self, host: str, program: tuple[str, ...]) -> str:
        """Have another program try to serve a host that it must refuse; give what it said."""
        old = self.managers[host]
        assert old.stop() == 0, old.log_tail()
        begun = old.log.stat().st_size
        new = Manager(
            old.folder, old.config.read_text(), bus=old.bus_url, host=host, cluster=self.cluster, program=program
        )
        new.start(ready=False)
        assert new.wait(WITHIN_S) != 0
        return new.log.read_bytes()[begun:].decode()

    def variables(self, login: Mapping[str, str], listener: str) -> dict[str, str]:
        """The environment of a client that logs in so."""
        names = {f"OUTFITTER_KAFKA_{name.upper().replace('-', '_')}": value for name, value in login.items()}
        return {"OUTFITTER_BUS": self.broker.at(listener), "OUTFITTER_CLUSTER": self.cluster, **names}

    def administer(self, program: tuple[str, ...], *arguments: str) -> subprocess.CompletedProcess[str]:
        env = environment(**self.variables(self.broker.administrator(), "open"))
        return subprocess.run([*program, *arguments], env=env, capture_output=True, text=True, timeout=WITHIN_S)

    @contextmanager
    def ended(self) -> Iterator[None]:
        try:
            yield
        finally:
            for manager in self.managers.values():
                manager.kill9()
                print(f"--- {manager.log}\n{manager.log_tail()}")


def test_a_fleet_goes_over_manager_by_manager_and_one_goes_back(secure_broker: SecureBroker, tmp_path: Path) -> None:
    cluster = f"t-{secrets.token_hex(4)}"
    hosts = [f"{cluster}-{number}" for number in range(4)]
    first, second, third, _ = hosts
    fleet = Fleet(secure_broker, tmp_path, hosts, cluster)
    created = fleet.administer(EARLIER, "topics", "create", "--partitions", str(PARTITIONS))
    assert created.returncode == 0, created.stderr
    worker = f"w-{secrets.token_hex(4)}"
    for role in ("worker", "operator"):
        fleet.grant(OLD_PAGE, role, worker, first)
    load = Load(tmp_path, fleet.variables(secure_broker.scram(worker), "sasl"), hosts)

    with fleet.ended():
        fleet.started()
        with load.running():
            load.goes_on()
            for host in (first, second, third):
                started = fleet.exchange(host, OUTFITTER)
                assert f"{cluster}.managers" in started, "the missing topic is not named"
                load.goes_on()
            checked = fleet.administer(OUTFITTER, "topics", "check")
            assert "managers: (topic) is missing, should be present" in checked.stdout, checked.stdout + checked.stderr

            created = fleet.administer(OUTFITTER, "topics", "create", "--partitions", str(PARTITIONS))
            assert created.returncode == 0, created.stderr
            fleet.exchange(second, OUTFITTER)  # with the topic, and without the right
            load.goes_on()
            fleet.grant(Path("deploy/security.md").absolute(), MANAGER, fleet.principals[first], first)
            fleet.exchange(first, OUTFITTER)
            load.goes_on()
            anyio.run(_beats, fleet, first)

            fleet.exchange(second, EARLIER)
            load.goes_on()
            fleet.exchange(first, EARLIER)  # one whose topic has its beats
            load.goes_on()

            fleet.exchange(first, OUTFITTER)
            ordered = fleet.administer(OUTFITTER, "cordon", first, "--device", "GPU-0", "--reason", "XID 79")
            assert ordered.returncode == 0, ordered.stderr
            load.goes_on()
            late = fleet.administer(OUTFITTER, "cordon", third, "--device", "GPU-0", "--reason", "dust", "--wait", "5s")
            assert late.returncode == 75, late.stderr
            assert "cannot read orders" in late.stderr, "the right that is missing is not named"
            load.goes_on()
        refused = fleet.refused(first, EARLIER)
        assert "format 2" in refused, refused
        assert load.wrong == []
        assert not (load.locks / "twice").exists()
        report = fleet.administer(OUTFITTER, "verify", "--json")
        assert report.returncode == 0, report.stdout + report.stderr
        print(f"runs that ended well: {dict(load.well)}; {json.loads(report.stdout)['violations']}")


async def _beats(fleet: Fleet, host: str) -> None:
    """Wait until a host's manager has said in the new topic that it lives."""
    topic = f"{fleet.cluster}.managers"
    async with connect(fleet.broker.at("open"), fleet.broker.administrator()) as bus:
        with anyio.fail_after(WITHIN_S):
            for partition in range(PARTITIONS):
                async with await bus.open_reader(topic, partition, start=None, committed=True) as reader:
                    while reader.position < await bus.stable_end(topic, partition):
                        for message in await reader.fetch():
                            if message.key == f"host/{host}".encode():
                                return
            raise AssertionError(f"{topic} has no record of {host}")
