"""History in cluster scope: a writer is a partition and has many hosts, and writers change hands."""

from __future__ import annotations

from pathlib import Path

import pytest

from outfitter_proto.bus import connect
from outfitter_service.config import BusConnection
from outfitter_service.query import rebuild
from support.checker.verdict import replay_result
from support.managers.fleet import Fleet, hosts

pytestmark = pytest.mark.timeout(120)


async def test_every_partition_is_rebuilt_with_all_its_hosts_after_its_owner_was_killed(tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path}/bus.db?synchronous=NORMAL"
    names = hosts(8)
    async with Fleet(tmp_path, url, "outfitter") as fleet:
        one = fleet.start("one")
        await fleet.register(names, ["a", "b", "c"])
        await fleet.are({(name, worker): "allocated" for name in names for worker in "ab"})
        one.kill9()
        fleet.start("two", replica=False)
        await fleet.deregister(names, ["a"])
        await fleet.are({(name, "c"): "allocated" for name in names})
    where = BusConnection(bus=url, host=names[0], cluster="outfitter")
    async with connect(url) as bus:
        told = await replay_result(url)
        assert told[:2] == ([], ())
        assert told.records == len(fleet.records)
        of_one = await rebuild.rebuild(bus, where, names[0], None)
        found = rebuild.allocations(of_one, names[0])
        assert {(one.record.host, one.record.worker, one.record.state) for one in found} == {
            (names[0], "a", "ended"), (names[0], "b", "allocated"), (names[0], "c", "allocated"),
        }  # fmt: skip
