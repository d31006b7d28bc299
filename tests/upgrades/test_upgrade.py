"""A running fleet of an earlier version goes over to this one, manager by manager, under load; then one goes back.

The brokers let nobody in unasked. The topics are the earlier version's, and each principal has the rights of the
earlier version's page. One manager stays old for ever, and on each host one worker's program is old and one is new.
"""

from __future__ import annotations

import json
import secrets
import subprocess
from collections.abc import Mapping
from pathlib import Path

import anyio
import pytest

from outfitter_proto.bus import connect
from support.kafka.secure_broker import SecureBroker, right, secure_broker
from support.managers.granted import MANAGER, granted
from support.managers.process import OUTFITTER, Manager, environment, files_config
from support.managers.upgrading import EARLIER, WITHIN_S, Fleet, Load, Work
from tools import tool

__all__ = ["secure_broker"]

pytestmark = [pytest.mark.upgrade, pytest.mark.kafka, pytest.mark.timeout(900)]

OLD_PAGE = tool("earlier") / "tree" / "deploy" / "security.md"
PARTITIONS = 4


class SecuredFleet(Fleet):
    """Managers with rights of their own, and what they log in with."""

    def __init__(self, broker: SecureBroker, folder: Path, hosts: list[str], cluster: str) -> None:
        self.broker = broker
        self.cluster = cluster
        self.principals = {host: f"m-{secrets.token_hex(4)}" for host in hosts}
        managers: dict[str, Manager] = {}
        for host, principal in self.principals.items():
            self.grant(OLD_PAGE, MANAGER, principal, host)
            login = "".join(f'{name} = "{value}"\n' for name, value in broker.scram(principal).items())
            config = files_config(folder / host / "gpus", extra='lease = "20s"\nlease-grace = "5s"')
            managers[host] = Manager(
                folder / host, f"{config}[kafka]\n{login}", bus=broker.at("sasl"), host=host, cluster=cluster,
                program=EARLIER,
            )  # fmt: skip
        super().__init__(managers)

    def started(self) -> None:
        """Start all managers. For its first start in a partition where others write, 0.2.0 wants two rights more than
        its page grants."""
        more = [
            right(f"User:{principal}", "Read", "topic", f"{self.cluster}.{topic}")
            for principal in self.principals.values()
            for topic in ("history", "dead-letters")
        ]
        self.broker.allow(*more)
        super().started()
        self.broker.withdraw(*more)

    def grant(self, page: Path, role: str, principal: str, host: str) -> None:
        rights = granted(self.cluster, host, page=page)[role]
        self.broker.allow(*(right(f"User:{principal}", *each[:3], prefixed=each[3]) for each in rights))

    def variables(self, login: Mapping[str, str], listener: str) -> dict[str, str]:
        """The environment of a client that logs in so."""
        names = {f"OUTFITTER_KAFKA_{name.upper().replace('-', '_')}": value for name, value in login.items()}
        return {"OUTFITTER_BUS": self.broker.at(listener), "OUTFITTER_CLUSTER": self.cluster, **names}

    def administer(self, program: tuple[str, ...], *arguments: str) -> subprocess.CompletedProcess[str]:
        env = environment(**self.variables(self.broker.administrator(), "open"))
        return subprocess.run([*program, *arguments], env=env, capture_output=True, text=True, timeout=WITHIN_S)


def test_a_fleet_goes_over_manager_by_manager_and_one_goes_back(secure_broker: SecureBroker, tmp_path: Path) -> None:
    cluster = f"t-{secrets.token_hex(4)}"
    hosts = [f"{cluster}-{number}" for number in range(4)]
    first, second, third, _ = hosts
    fleet = SecuredFleet(secure_broker, tmp_path, hosts, cluster)
    created = fleet.administer(EARLIER, "topics", "create", "--partitions", str(PARTITIONS))
    assert created.returncode == 0, created.stderr
    worker = f"w-{secrets.token_hex(4)}"
    for role in ("worker", "operator"):
        fleet.grant(OLD_PAGE, role, worker, first)
    programs = {"old": EARLIER, "new": OUTFITTER}
    works = [Work(host, name, program) for host in hosts for name, program in programs.items()]
    load = Load(tmp_path, fleet.variables(secure_broker.scram(worker), "sasl"), works)

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
        load.check()
        report = fleet.administer(OUTFITTER, "verify", "--json")
        assert report.returncode == 0, report.stdout + report.stderr
        print(f"runs that ended well: {dict(load.well)}; {json.loads(report.stdout)['violations']}")


async def _beats(fleet: SecuredFleet, host: str) -> None:
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
