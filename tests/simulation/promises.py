"""What must be so after a run, whatever happened in it: the design's promises, checked on all that was committed."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from types import MappingProxyType
from typing import Any

from outfitter_proto.codec import decode_ledger
from outfitter_proto.keys import host_writer, sweeper_writer
from outfitter_proto.partitioning import partition_of
from outfitter_proto.records import Allocation, Checkpoint, Cordon
from outfitter_service.runtime.dead_letter_quota import A_MINUTE
from outfitter_service.runtime.processor.processor import Processor
from outfitter_verify import Control, Log, Partition, Reading, Record, Report, Violation
from outfitter_verify import check as verify
from simulation import ailing, ordered, parted
from simulation.hosts.hardware import REPLICAS, physical
from simulation.hosts.managers import CLUSTER, EPOCH, TOPICS, Host
from simulation.lent import HOLDING, lent
from simulation.model import log as model
from simulation.model.broker import LONG_POLL_S
from simulation.world.operators import CONTROL
from simulation.world.world import World
from support.exclusivity import Held, lent_too_often

FINAL = ("ended", "failed")
SHORT_OUTAGE_S = LONG_POLL_S + 0.2
"""An outage of the bus that is not longer may pass unnoticed, and of a longer one as much: no fetch is late before its
long poll is over."""
CLOCKS_APART_S = 10.0
"""Managers' clocks differ by some seconds, and a tick or a commit may be under way."""


def check(world: World) -> tuple[list[str], dict[str, int]]:
    """What is not as promised, and how much there was to look at."""
    wrong: list[str] = []
    counts: Counter[str] = Counter()
    report = verify(_reading(world))
    found = {
        host.name: parted.look(host, world.broker.lives(TOPICS.allocations, host.partition)) for host in world.hosts
    }
    if not _is_ledger_remade(world):  # what was written to two ledgers fits together for who has seen both
        wrong += [
            str(violation)
            for violation in report.violations
            if not any(
                is_excused(world, violation)
                for is_excused in (
                    _is_about_lost_input,
                    _is_about_input_made_anew,
                    _is_about_a_silent_driver,
                    _is_about_a_shortened_host,
                )
            )
            and not any(each.excuses(violation) for each in found.values())
        ]
    wrong += _unanswered(world)
    wrong += world.complaints
    if world.onlooker is not None:
        wrong += world.onlooker.complaints
        counts["lives judged"] += world.onlooker.judged
    wrong += _lost_in_silence(world)
    wrong += _unswept(world)
    counts.update(report.counts)
    counts["orders judged"] = next(each.looked_at for each in report.checks if each.name == "orders")
    for host in world.hosts:
        wrong += [f"{host.name}: {each}" for each in host.bench.violations]
        counts["stale calls"] += host.bench.stale
        lives = world.broker.lives(TOPICS.allocations, host.partition)
        wrong += _lent_too_early(world, lives, host)
        wrong += [each for ledger in lives for each in _held_twice(host, ledger)]
        wrong += found[host.name].wrong
        counts["parts judged"] += found[host.name].judged
        wrong += [each for ledger in lives for each in ordered.lent_although_ordered(host, ledger)]
        wrong += [each for ledger in lives for each in ailing.lent_while_ailing(world, host, ledger)]
        wrong += [each for ledger in lives for each in _blamed_for_an_outage(world, host, ledger)]
        wrong += _asked_otherwise(world, host.name, host.partition)
        wrong += _at_rest(world, host.name, report)
        wrong += _left_in_books(world, host)
    wrong += ordered.in_effect_at_rest(world)
    wrong += _refused_for_their_size(world)
    wrong += _served(world)
    wrong += _out_of_time(world)
    wrong += [complaint for worker in world.workers for complaint in worker.complaints]
    wrong += at_odds(world)
    wrong += [f"PROMISE 2: {key} was not served although nothing stood in its way" for key in world.stalled]
    wrong += [
        f"{manager.process.name} ended: {manager.ended!r}"
        for manager in world.managers
        if manager.ended is not None and not manager.gave_up
        if not (manager.gave_up_topics and _is_ledger_remade(world))
    ]
    wrong += [f"asyncio: {failure.get('message')}: {failure.get('exception')!r}" for failure in world.loop.failures]
    counts["gave up"] = sum(manager.gave_up for manager in world.managers)
    counts["runs"] = len(world.managers)
    counts["expelled"] = sum(group.expelled for group in world.broker.groups.values())
    counts["timed out"] = world.broker.timed_out
    counts["lost"] = world.network.lost
    counts["late"] = world.network.late
    counts["holdings"] = sum(len(worker.holdings) for worker in world.workers)
    return wrong, dict(counts)


def _reading(world: World) -> Reading:
    """All that was ever committed, as if nothing had been compacted or deleted; by the clock of a broker that is right,
    as far as managers' clocks are."""
    epoch_ms = round(EPOCH.timestamp() * 1000)

    def log(topic: str, partition: int) -> Log:
        found = world.broker.logs[topic, partition]
        records = [
            Record(record.offset, record.key, record.value, epoch_ms + record.timestamp_ms)
            for record, _ in found.committed()
        ]
        return Log(topic, partition, found.start, found.end, records)

    partitions = world.setting.partitions
    has_orders = world.operators is not None
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
                control=Control(log(CONTROL, 0), world.broker.topic(CONTROL).id) if has_orders else Control(),
            )
            for number in range(partitions)
        ],
    )


def _is_ledger_remade(world: World) -> bool:
    return world.remade_at is not None and world.remaking is not None and world.remaking.of_ledger


def _is_swept_beyond_quota(world: World, partition: int) -> bool:
    """Whether the sweepers of a partition sent as many dead letters as they may, since the ledger was made anew: to it
    no host had a manager. Whoever loses the partition takes the count of further ones with it."""
    if not _is_ledger_remade(world):
        return False
    codes: Counter[str] = Counter()
    for record, at in world.broker.logs[TOPICS.dead_letters, partition].committed():
        letter = json.loads(record.value or b"")
        if at > (world.remade_at or 0) and letter["writer"] == sweeper_writer(partition):
            codes[str(letter.get("code"))] += 1
    return max(codes.values(), default=0) >= A_MINUTE


def _unanswered(world: World) -> list[str]:
    """Each registration that is there has a record, or a dead letter: whatever topics were made anew."""
    answered, letters = _answers([*world.broker.gone, *world.broker.logs.values()])
    lost = world.retention.lost if world.retention is not None else ()
    wrong: list[str] = []
    for host in world.hosts:
        if _is_swept_beyond_quota(world, host.partition):
            continue
        for record, _ in world.broker.logs[TOPICS.registrations, host.partition].committed():
            place = host.partition, record.offset
            if record.key != host.name.encode() or place in lost or place in letters:
                continue
            said = json.loads(record.value or b"{}")
            key = "/".join(str(said.get(name)) for name in ("host", "worker", "incarnation"))
            if said.get("type") == "register" and key.encode() not in answered and key not in world.stalled:
                wrong.append(f"PROMISE 2: nobody answered registration {host.partition}/{record.offset} of {key}")
    return wrong


def _answers(logs: Iterable[model.Log]) -> tuple[set[bytes], set[tuple[int, int]]]:
    """The keys of all records that were ever committed, and the places of what has a dead letter."""
    keys: set[bytes] = set()
    letters: set[tuple[int, int]] = set()
    for log in logs:
        for record, _ in log.committed():
            if log.topic == TOPICS.allocations:
                keys.add(record.key or b"")
            elif log.topic == TOPICS.dead_letters:
                source = json.loads(record.value or b"")["source"]
                letters.add((source["partition"], source["offset"]))
    return keys, letters


def _is_about_lost_input(world: World, violation: Violation) -> bool:
    """Whether it says that a registration has no answer that nobody could read in time."""
    place = violation.place
    return (
        world.retention is not None
        and violation.check in ("answers", "dead-letters")
        and place.topic == TOPICS.registrations
        and (place.partition, place.offset) in world.retention.lost
    )


def _is_about_input_made_anew(world: World, violation: Violation) -> bool:
    """Whether it says when a lease had to end, where the registrations of before are gone: who is the newer run of a
    worker stood there. Whether a lease ended too early is looked at by `_blamed_for_an_outage`."""
    return world.remade_at is not None and violation.check == "releases" and "the lease of" in violation.what


def _is_about_a_silent_driver(world: World, violation: Violation) -> bool:
    """Whether it says that two have one device, where only a driver that was silent knew that it is one: whether the
    manager could know, too, is looked at by `_held_twice`."""
    if violation.check != "exclusivity":
        return False
    held = violation.what.split()[2]
    return any(host.bench.is_hidden(held) for host in world.hosts)


def _is_about_a_shortened_host(world: World, violation: Violation) -> bool:
    """Whether it says that a device was not reported, where the host's record had no room for all resources: while an
    administrator has lowered what the topics take."""
    return world.lowering is not None and violation.check == "inventory" and "which was not reported" in violation.what


def _lost_in_silence(world: World) -> list[str]:
    """Where a registration was deleted before it was answered, history says that registrations were lost."""
    if world.retention is None:
        return []
    told = {
        (partition, (record.key or b"").decode())
        for (topic, partition), log in world.broker.logs.items()
        for record, _ in log.committed()
        if topic == TOPICS.history and b'"input-lost"' in (record.value or b"")
    }
    answered, letters = _answers(world.broker.logs.values())
    wrong: list[str] = []
    without = {host_writer(job.name) for job in world.jobs if job.limits.history is None}
    for (partition, offset), record in world.retention.missed.items():
        said = json.loads(record.value or b"{}")
        key = "/".join(str(said.get(name)) for name in ("host", "worker", "incarnation")).encode()
        writer = world.retention.writer(record, partition)
        is_answered = key in answered or (partition, offset) in letters
        is_silent = (partition, writer) not in told and not is_answered and writer not in without
        if said.get("type") == "register" and is_silent:
            wrong.append(f"PROMISE 2: registration {partition}/{offset} was lost, and {writer} does not say so")
    return [] if world.setting.replicas and world.jobs[0].limits.history is None else wrong


def _unswept(world: World) -> list[str]:
    """What is nobody's has a dead letter. Where a partition is filled with what gets some, they are not looked at: who
    loses the partition takes the count of those beyond a minute's with it."""
    if world.setting.replicas and world.remaking is not None and world.remaking.fill_s is not None:
        return []
    lost = world.retention.lost if world.retention is not None else ()
    left = world.strangers.unanswered() if world.strangers is not None else []
    return [
        f"PROMISE 2: nobody answered registration {p}/{o}, which is nobody's"
        for p, o in left
        if (p, o) not in lost and not _is_swept_beyond_quota(world, p)
    ]


def _held_twice(host: Host, ledger: model.Log) -> list[str]:
    """No device is two workers' under whichever names, at any prefix of the ledger: where the manager can know."""
    wrong: list[str] = []
    bench = host.bench
    known: dict[str, float] = {}
    live: dict[str, tuple[float, Held]] = {}
    for record, at in ledger.committed():
        key = (record.key or b"").decode()
        found = json.loads(record.value) if record.value is not None else {}
        if key == f"@host/{host.name}":
            for told in found.get("resources", {}).values():
                for names in told.get("names", []):
                    known.setdefault(physical(names[0]), at)
        if not key.startswith(f"{host.name}/"):
            continue
        since = live.pop(key, (at,))[0]
        if found.get("state") not in HOLDING:
            continue
        held = lent(found)
        for other, (granted, its) in live.items():
            wrong += [
                f"PROMISE 1: {device} is {key}'s from {at - 1000:.3f} on, while {other} has it"
                for device in held.clash(its)
                if not bench.catalogue.mapped
                or known.get(device, math.inf) < granted < bench.parted_at.get(device, math.inf)
            ]
        live[key] = (since, held)
        wrong += [
            f"PROMISE 1: {device} is lent more than {REPLICAS} times from {at - 1000:.3f} on, to {key} as well"
            for device in lent_too_often([each for _, each in live.values()], REPLICAS)
        ]
    return sorted(set(wrong))[:5]


def _lent_too_early(world: World, lives: Sequence[model.Log], host: Host) -> list[str]:
    """No device is lent while a worker still believes, and may, that it is its own: not in a ledger that was made anew
    either, where tokens may begin anew."""
    grants: dict[str, list[tuple[float, str, tuple[int, int], bool]]] = {}
    ranks: dict[tuple[str, int], dict[int, float]] = {}
    for life, ledger in enumerate(lives):
        for record, at in ledger.committed():
            if record.value is None or record.key is None or not record.key.startswith(f"{host.name}/".encode()):
                continue
            found = json.loads(record.value)
            if found["state"] in ("preparing", "allocated"):
                key, token = record.key.decode(), found["token"]
                ranks.setdefault((key, token), {}).setdefault(life, at)
                held = lent(found)
                for device in held.own:
                    is_replica = device in held.replicas
                    grants.setdefault(device, []).append((at, key, (life, token), is_replica))
    wrong: list[str] = []
    said_over = _said_over(world, host.name)
    named = _named_survivors(world, lives, host.name) if world.setting.walled else None
    for held in [held for worker in world.workers for held in worker.holdings if held.key.startswith(f"{host.name}/")]:
        if held.left and named is not None and held.key not in named:
            continue  # perhaps no manager has ever seen them
        until = min(held.until, said_over.get(held.key, math.inf))
        if held.left and named is not None:
            until = min(until, named[held.key])
        for device in itertools.filterfalse(host.bench.is_hidden, held.held.own):
            began = ranks.get((held.key, held.token), {})
            own = max((life for life, at in began.items() if at <= held.since), default=0), held.token
            for at, key, rank, is_replica in grants.get(device, []):
                if is_replica and device in held.held.replicas:
                    continue
                if key != held.key and rank > own and at < until and held.since < until:
                    wrong.append(
                        f"PROMISE 7: {device} was lent to {key} at {at - 1000:.3f}, while {held.key} had it "
                        f"until {until - 1000:.3f}"
                    )
    return sorted(set(wrong))[:5]


def _named_survivors(world: World, lives: Sequence[model.Log], host: str) -> dict[str, float]:
    """The runs whose records named processes that their worker left behind; and when a manager that did not see them
    let the devices go, because somebody deregistered the run once more."""
    partition = partition_of(host, world.setting.partitions)
    said: dict[str, list[float]] = {}
    for log in world.broker.lives(TOPICS.registrations, partition):
        for record, at in log.committed():
            message = json.loads(record.value or b"{}") if record.key == host.encode() else {}
            if message.get("type") == "deregister":
                said.setdefault(f"{host}/{message['worker']}/{message['incarnation']}", []).append(at)
    named: dict[str, float] = {}
    for ledger in lives:
        for record, at in ledger.committed():
            key, found = (record.key or b"").decode(), json.loads(record.value or b"{}")
            if found.get("type") != "allocation" or found["host"] != host:
                continue
            words = found.get("delayed_by", "no word")
            if words.startswith("process"):
                named.setdefault(key, math.inf)
            known = int(found.get("reason_code") == "deregistered")
            if key in named and words == "" and sum(each <= at for each in said.get(key, [])) > known:
                named[key] = min(named[key], at)
    return named


def _blamed_for_an_outage(world: World, host: Host, ledger: model.Log) -> list[str]:
    """No lease ends because of a silence in which the bus was away: its worker was once silent for a whole lease, since
    it had a record, while the broker could be reached. What a worker says after a newer run has begun is left out, and
    a registration of a run that asks for something else than its record: they renew no lease."""
    signs: dict[str, list[tuple[float, object]]] = {}
    newer: dict[str, float] = {}
    newest: dict[str, str] = {}
    for log in world.broker.lives(TOPICS.registrations, host.partition):
        for record, at in log.committed():
            said = json.loads(record.value or b"{}") if record.key == host.name.encode() else {}
            worker, run = f"{host.name}/{said.get('worker')}", said.get("incarnation")
            if said.get("type") == "register" and newest.get(worker, run) != run:
                newer.setdefault(f"{worker}/{newest[worker]}", at)
            if said.get("type") == "register":
                newest[worker] = run
            signs.setdefault(f"{worker}/{run}", []).append((at, said.get("resources")))
    wrong: list[str] = []
    answered: dict[str, float] = {}
    for record, at in ledger.committed():
        key = (record.key or b"").decode()
        if record.value is None or not key.startswith(f"{host.name}/"):
            continue
        answered.setdefault(key, at)
        found = json.loads(record.value)
        lease_s = found["request"].get("lease_s")
        if found.get("reason_code") != "lease-expired" or lease_s is None:
            continue
        asked, end = (None, found["request"]["resources"]), min(at, newer.get(key, at))
        heard = [sign for sign, resources in signs.get(key, []) if sign < end and resources in asked]
        spans = [(begin, over) for begin, over in itertools.pairwise([*heard, at]) if over > answered[key]]
        silent_s = max((world.network.up_s(*span) for span in spans), default=math.inf)
        if silent_s < lease_s - SHORT_OUTAGE_S:
            wrong.append(
                f"PROMISE 7: the lease of {key} ended at {at - 1000:.3f}, though it was silent for {silent_s:.3f} s at "
                f"most while the bus was there, and not for {lease_s:g} s"
            )
    return sorted(set(wrong))[:5]


def _said_over(world: World, host: str) -> dict[str, float]:
    """When the newest run of a worker was said to be over by somebody who named the worker alone, whatever it believes:
    a deregistration of this kind may be another run's, and late. A run is as new as the registration that its record
    names: an earlier one may have been lost, and a run without a record is known to no manager. A topic that was made
    anew has offsets from 0, and records count on. So there the first one of a run counts, if it has a record later."""
    partition = partition_of(host, world.setting.partitions)
    answered: dict[tuple[str, int], float] = {}
    last: dict[str, float] = {}
    for log in world.broker.lives(TOPICS.allocations, partition):
        for record, at in log.committed():
            key = (record.key or b"").decode()
            if record.value is not None and key.startswith(f"{host}/"):
                answered.setdefault((key, json.loads(record.value)["source"]["offset"]), at)
                last[key] = at
    newest: dict[str, str] = {}
    over: dict[str, float] = {}
    for life, log in enumerate(world.broker.lives(TOPICS.registrations, partition)):
        for record, at in log.committed():
            if record.key != host.encode():
                continue
            said = json.loads(record.value or b"")
            worker, run = f"{said['host']}/{said['worker']}", said.get("incarnation")
            key = f"{worker}/{run}"
            told = answered.get((key, record.offset), 0.0) if life == 0 else last.pop(key, 0.0)
            if said["type"] == "register" and told > at:
                newest[worker] = key
            elif said["type"] == "deregister" and run is None and worker in newest:
                over.setdefault(newest[worker], at)
    return over


def _asked_otherwise(world: World, host: str, partition: int) -> list[str]:
    """A record is about the registration that it answers, whatever the same run has asked for since."""
    asked: dict[tuple[str, int], Any] = {}
    for record, _ in world.broker.logs[TOPICS.registrations, partition].committed():
        said = json.loads(record.value or b"") if record.key == host.encode() and world.remade_at is None else {}
        if said.get("type") == "register":
            key = f"{said['host']}/{said['worker']}/{said['incarnation']}"
            asked[key, record.offset] = _amounts_and_clauses(said.get("resources"))
    wrong: list[str] = []
    for record, _ in world.broker.logs[TOPICS.allocations, partition].committed():
        key = (record.key or b"").decode()
        if key.startswith(f"{host}/") and record.value is not None:
            found = json.loads(record.value)
            request = found["request"]
            about = _amounts_and_clauses(request.get("resources"), request.get("choices") or {})
            first = asked.get((key, found["source"]["offset"]), about)
            is_short = found["state"] in (*FINAL, "releasing") and request.get("resources") is None
            # of what this manager does not have, or has switched off, it keeps no clauses
            is_short |= found["state"] == "failed" and not request["amounts"].keys() >= (about or {}).keys()
            if about != first and not is_short:
                wrong.append(f"{key} asked for {first}, and its record is about {about}")
    return sorted(set(wrong))[:5]


def _amounts_and_clauses(requests: Any, choices: Any = MappingProxyType({})) -> Any:
    """What is asked for by resource, however it is said. `choices`: the clauses, if they stand apart."""
    if requests is None:
        return None
    found = {}
    for name, request in requests.items():
        whole = {**request, **choices.get(name, {})}
        where = {
            key: clause if isinstance(clause, dict) else {"is": clause}
            for key, clause in (whole.get("where") or {}).items()
        }
        found[name] = (whole["amount"], where, sorted(whole.get("same") or []))
    return found


def _refused_for_their_size(world: World) -> list[str]:
    """Nobody decides what the topics have never taken."""
    return [f"a commit of {refused} was refused for its size" for refused in world.broker.too_large[:5]]


def _at_rest(world: World, host: str, report: Report) -> list[str]:
    """Everybody is gone: everything is over, and somebody manages the host."""
    return [
        f"PROMISE 2: {key} is {record['state']} although its worker is long gone"
        for key, record in report.last.items()
        if key.startswith(f"{host}/") and record["state"] not in FINAL and key not in world.stalled
    ]


def _left_in_books(world: World, host: Host) -> list[str]:
    """Everybody is gone: a script with books has every device back, be it that it was offered and never granted."""
    return [
        f"PROMISE 2: the books of {host.name} give {', '.join(devices)} to {key}, which is long gone"
        for key, devices in host.bench.books.entries.items()
        if key not in world.stalled
    ]


def _served(world: World) -> list[str]:
    """Each partition of a host is answered for by one manager of its job."""
    wrong: list[str] = []
    up = [manager for manager in world.managers if manager.up]
    if world.setting.replicas:
        for partition in range(world.setting.partitions):
            serving = [m.process.name for m in up if partition in [number for number, _ in m.serving()]]
            if len(serving) != 1:
                wrong.append(f"partition {partition} is served by {serving or 'nobody'}; {len(up)} managers are up")
    else:
        for job in world.jobs:
            serving = [m.process.name for m in up if m.job is job and m.serving()]
            if not serving:
                wrong.append(f"nobody serves {job.name}; {len(up)} managers are up")
    return wrong


def _out_of_time(world: World) -> list[str]:
    """Managers remember nobody who is over for longer than they should from now on, whatever their clocks did."""
    wrong: list[str] = []
    for manager in world.managers:
        for _, processor in manager.serving() if manager.up else ():
            now = manager.clock.utc()
            for key, record in processor.ledger.allocations.items():
                age_s = (now - record.since).total_seconds()
                if record.state in FINAL and not -CLOCKS_APART_S <= age_s <= manager.retention_s + CLOCKS_APART_S:
                    wrong.append(f"{manager.process.name} remembers {key}, which has been over for {age_s:.0f} s")
    return wrong[:5]


def at_odds(world: World) -> list[str]:
    """Where a serving manager has something else in mind than what the ledger says (as it may, during a commit)."""
    wrong: list[str] = []
    for manager in world.managers:
        if manager.up:
            for partition, processor in manager.serving():
                ledger = world.broker.logs[TOPICS.allocations, partition]
                host = manager.job.name if not world.setting.replicas else None
                wrong += [f"{manager.process.name}: {each}" for each in _differences(processor, ledger, host)]
    return wrong


def _differences(processor: Processor, ledger: model.Log, host: str | None) -> list[str]:
    """What a processor has in mind otherwise than the ledger has it: of one host, or of all."""
    written: dict[str, Allocation] = {}
    cordons: dict[str, Cordon] = {}
    checkpoint: Checkpoint | None = None
    for record, _ in ledger.committed():
        key = (record.key or b"").decode()
        if key.startswith("@checkpoint/") and record.value is not None:
            found = decode_ledger(record.value, key=record.key)
            if isinstance(found, Checkpoint) and (host is None or found.writer == f"host/{host}"):
                checkpoint = found
        elif key.startswith("@cordon/" if host is None else f"@cordon/{host}/"):
            found = decode_ledger(record.value, key=record.key) if record.value is not None else None
            if isinstance(found, Cordon):
                cordons[key] = found
            else:
                cordons.pop(key, None)
        elif not key.startswith("@") and (host is None or key.startswith(f"{host}/")):
            if record.value is None:
                written.pop(key, None)
            else:
                found = decode_ledger(record.value, key=record.key)
                if isinstance(found, Allocation):
                    written[key] = found
    if checkpoint is not None and checkpoint.instance != processor.instance:
        return []  # it was replaced while it slept, and has had nothing to write since: its next commit will tell it
    wrong: list[str] = []
    mind = processor.ledger
    if mind.allocations != written:
        differ = written.keys() ^ mind.allocations.keys()
        differ |= {key for key in written.keys() & mind.allocations.keys() if written[key] != mind.allocations[key]}
        wrong.append(f"PROMISE 4: it believes otherwise than the ledger: {sorted(differ)[:5]}")
    if ordered.in_mind(processor) != cordons:
        wrong.append(f"PROMISE 4: it has orders in mind otherwise than the ledger, which has {sorted(cordons)}")
    if checkpoint is not None and (mind.token, mind.commits) != (checkpoint.token, checkpoint.commit):
        wrong.append(
            f"PROMISE 4: it is at token {mind.token} and commit {mind.commits}, "
            f"the ledger at {checkpoint.token} and {checkpoint.commit}"
        )
    return wrong
