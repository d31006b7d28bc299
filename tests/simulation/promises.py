"""What must be so after a run, whatever happened in it: the design's promises, checked on all that was committed."""

from __future__ import annotations

import json
from collections import Counter

from outfitter_proto.codec import decode_ledger
from outfitter_proto.records import Allocation, Checkpoint
from outfitter_verify import Log, Partition, Reading, Record, Report
from outfitter_verify import check as verify
from simulation import log as model
from simulation.managers import CLUSTER
from simulation.world import TOPICS, World

FINAL = ("ended", "failed")


def check(world: World) -> tuple[list[str], dict[str, int]]:
    """What is not as promised, and how much there was to look at."""
    wrong: list[str] = []
    counts: Counter[str] = Counter()
    report = verify(_reading(world))
    wrong += [str(violation) for violation in report.violations]
    counts.update(report.counts)
    for site in world.sites:
        wrong += [f"{site.host}: {each}" for each in site.bench.violations]
        counts["stale calls"] += site.bench.stale
        ledger = world.broker.logs[TOPICS.allocations, site.partition]
        wrong += _lent_too_early(world, ledger, site.host)
        wrong += _at_rest(world, site.host, report)
    wrong += at_odds(world)
    wrong += [f"PROMISE 2: {key} was not served although nothing stood in its way" for key in world.stalled]
    wrong += [
        f"{manager.process.name} ended: {manager.ended!r}"
        for manager in world.managers
        if manager.ended is not None and not manager.gave_up
    ]
    wrong += [f"asyncio: {failure.get('message')}: {failure.get('exception')!r}" for failure in world.loop.failures]
    counts["gave up"] = sum(manager.gave_up for manager in world.managers)
    counts["runs"] = len(world.managers)
    counts["timed out"] = world.broker.timed_out
    counts["lost"] = world.network.lost
    counts["late"] = world.network.late
    counts["holdings"] = sum(len(worker.holdings) for worker in world.workers)
    return wrong, dict(counts)


def _reading(world: World) -> Reading:
    """All that was ever committed, as if nothing had been compacted."""

    def log(topic: str, partition: int) -> Log:
        found = world.broker.logs[topic, partition]
        records = [
            Record(record.offset, record.key, record.value, record.timestamp_ms) for record, _ in found.committed()
        ]
        return Log(topic, partition, 0, found.end, records)

    partitions = world.setting.partitions
    return Reading(
        cluster=CLUSTER,
        partitions=partitions,
        topic_id=world.broker.topic(TOPICS.registrations).id,
        markers=True,
        logs=[
            Partition(
                registrations=log(TOPICS.registrations, number),
                allocations=log(TOPICS.allocations, number),
                history=log(TOPICS.history, number),
                dead_letters=log(TOPICS.dead_letters, number),
            )
            for number in range(partitions)
        ],
    )


def _lent_too_early(world: World, ledger: model.Log, host: str) -> list[str]:
    """No device is lent while a worker still believes, and may, that it is its own."""
    grants: dict[str, list[tuple[float, str, int]]] = {}
    for record, at in ledger.committed():
        if record.value is None or record.key is None or not record.key.startswith(f"{host}/".encode()):
            continue
        found = json.loads(record.value)
        if found["state"] in ("preparing", "allocated"):
            for info in found["resources"].get("gpu", []):
                grants.setdefault(info["id"], []).append((at, record.key.decode(), found["token"]))
    wrong: list[str] = []
    for worker in world.workers:
        for held in worker.holdings:
            for device in held.devices:
                for at, key, token in grants.get(device, []):
                    if key != held.key and token > held.token and at < held.until and held.since < held.until:
                        wrong.append(
                            f"PROMISE 7: {device} was lent to {key} at {at - 1000:.3f}, while {held.key} had it "
                            f"until {held.until - 1000:.3f}"
                        )
    return sorted(set(wrong))[:5]


def _at_rest(world: World, host: str, report: Report) -> list[str]:
    """Everybody is gone: everything is over, and somebody manages the host."""
    wrong = [
        f"PROMISE 2: {key} is {record['state']} although its worker is long gone"
        for key, record in report.last.items()
        if key.startswith(f"{host}/") and record["state"] not in FINAL and key not in world.stalled
    ]
    serving = [manager for manager in world.managers if manager.site.host == host and manager.up]
    if not any(manager.processor.ready for manager in serving):
        wrong.append(f"nobody serves {host}: {len(serving)} managers are up")
    return wrong


def at_odds(world: World) -> list[str]:
    """Where a serving manager has something else in mind than what the ledger says (as it may, during a commit)."""
    wrong: list[str] = []
    for site in world.sites:
        wrong += _lives_as_written(world, world.broker.logs[TOPICS.allocations, site.partition], site.host)
    return wrong


def _lives_as_written(world: World, ledger: model.Log, host: str) -> list[str]:
    written: dict[str, Allocation] = {}
    checkpoint: Checkpoint | None = None
    for record, _ in ledger.committed():
        key = (record.key or b"").decode()
        if key.startswith(f"{host}/"):
            if record.value is None:
                written.pop(key, None)
            else:
                found = decode_ledger(record.value, key=record.key)
                assert isinstance(found, Allocation)
                written[key] = found
        elif key == f"@checkpoint/host/{host}" and record.value is not None:
            found = decode_ledger(record.value, key=record.key)
            assert isinstance(found, Checkpoint)
            checkpoint = found
    wrong: list[str] = []
    for manager in world.managers:
        if manager.site.host != host or not manager.up or not manager.processor.ready:
            continue
        ledger_now = manager.processor.ledger
        if ledger_now.allocations != written:
            differ = set(written.keys() ^ ledger_now.allocations.keys())
            differ |= {
                key
                for key in written.keys() & ledger_now.allocations.keys()
                if written[key] != ledger_now.allocations[key]
            }
            wrong.append(f"PROMISE 4: {manager.process.name} believes otherwise than the ledger: {sorted(differ)[:5]}")
        if checkpoint is not None and (ledger_now.token, ledger_now.commits) != (checkpoint.token, checkpoint.commit):
            wrong.append(
                f"PROMISE 4: {manager.process.name} is at token {ledger_now.token} and commit {ledger_now.commits}, "
                f"the ledger at {checkpoint.token} and {checkpoint.commit}"
            )
    return wrong
