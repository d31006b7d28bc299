"""Plants in the ledger's end: what a replay of history gives is something else."""

from __future__ import annotations

from support.checker.plants import planted
from support.checker.streams import HOST, World, expire


def last(world: World, kind: str) -> int:
    """The index of the newest history record of this type."""
    return max(index for index, _ in enumerate(world.history.records) if world.history.body(index)["type"] == kind)


@planted("replay", says="field resources: the ledger has")
def somebody_writes_another_inventory(world: World) -> None:
    body = world.hosts[f"@host/{HOST}"] | {"resources": {"gpu": {"state": "reported", "devices": [{"id": "GPU-9"}]}}}
    world.allocations.append(f"@host/{HOST}", body)
    world.commit(world.allocation("e", "pending"))


@planted("replay", says=f"@host/{HOST}: the ledger has nothing, history")
def somebody_deletes_the_hosts_record(world: World) -> None:
    world.allocations.append(f"@host/{HOST}", None)
    world.commit(world.allocation("e", "pending"))


@planted("replay", says=f"@device/{HOST}/GPU-0: the ledger has {{")
def somebody_writes_a_record_of_a_device(world: World) -> None:
    world.allocations.append(f"@device/{HOST}/GPU-0", {"type": "device", "host": HOST, "id": "GPU-0"})
    world.commit(world.allocation("e", "pending"))


@planted("replay", says=f"{HOST}/d/1: the ledger has nothing, history")
def somebody_deletes_an_allocation_that_is_over(world: World) -> None:
    world.allocations.append(f"{HOST}/d/1", None)
    world.commit(world.allocation("e", "pending"))


@planted("replay", says=f"@checkpoint/host/{HOST}: the ledger has nothing, history")
def somebody_deletes_the_checkpoint(world: World) -> None:
    world.commit(world.allocation("e", "pending"))
    world.allocations.append(f"@checkpoint/host/{HOST}", None)


@planted("replay", says="field token: the ledger has")
def history_has_another_checkpoint(world: World) -> None:
    world.commit(world.allocation("e", "pending"))
    end = last(world, "commit")
    world.history.change(end, checkpoint=world.history.body(end)["checkpoint"] | {"token": 99})


@planted("replay", says=f"{HOST}/b/1: field reason: the ledger has nothing, history 'invented'")
def a_snapshot_has_another_record(world: World) -> None:
    world.snapshot()
    piece = last(world, "snapshot")
    records = world.history.body(piece)["records"]
    world.history.change(piece, records=records | {f"{HOST}/b/1": records[f"{HOST}/b/1"] | {"reason": "invented"}})
    world.commit(world.allocation("e", "pending"))
    expire(world.history, world.history.records[piece].offset)


@planted("replay", says=f"{HOST}/b/1: the ledger has {{")
def a_snapshot_leaves_a_record_out(world: World) -> None:
    world.snapshot()
    piece = last(world, "snapshot")
    records = world.history.body(piece)["records"]
    del records[f"{HOST}/b/1"]
    world.history.change(piece, records=records)
    world.commit(world.allocation("e", "pending"))


@planted("replay", says=f"{HOST}/d/1: the ledger has {{")
def history_drops_a_record_that_the_ledger_has(world: World) -> None:
    world.commit(world.allocation("e", "pending"))
    world.history.change(last(world, "commit"), dropped=[f"{HOST}/d/1"])
