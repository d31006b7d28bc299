"""Measure, print a table and write the figures as JSON: `make bench`.

    PYTHONPATH=tests python -m bench [--out FILE] [--quick] [--only PART …]

Every ratio is Outfitter's figure over the bare loop's, of the same run on the same broker.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import anyio
import msgspec

from bench import (
    api,
    devices,
    embedded,
    floods,
    livez,
    loads,
    machine,
    orders,
    readers,
    replay,
    replicas,
    shapes,
    turns,
    webhook,
)
from bench.kafka import RATES, Contest, Run, Sizes
from bench.report import TURN, Row, short, spread, table
from outfitter_proto.bus.kafka.adapter import KafkaBus
from support.kafka.broker import Broker
from support.managers.process import environment

QUICK = Sizes(
    backlog=10_000,
    slow_backlog=1000,
    backlogs=1,
    seconds=3.0,
    timed=20,
    rounds=1,
    ledger=20_000,
    held=2000,
    replicas=2000,
)
PARTS = (
    "backlog",
    "framework",
    "latency",
    "restore",
    "kill",
    "replicas",
    "embedded",
    "turns",
    "shapes",
    "devices",
    "api",
    "webhook",
    "floods",
    "orders",
)
WAITING = 10_000
"""Workers that wait while decisions are timed: as many as may wait on one host."""
MIB = 1024 * 1024
TURNS = 3
"""Of each side in a round of latencies: what else the machine does changes within seconds."""


def main(arguments: Sequence[str]) -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(prog="bench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the figures are written as JSON")
    parser.add_argument("--quick", action="store_true", help="less of everything: to see that it works")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="what to measure")
    parser.add_argument("--bootstrap", help="host:port of a broker to use instead of one of its own")
    chosen = parser.parse_args(arguments)
    sizes = QUICK if chosen.quick else Sizes()
    before = machine.description()
    rows: list[Row] = []
    by_shape: list[Row] = []
    if "shapes" in chosen.only:
        say("decisions by the number of different requests that wait")
        by_shape = shapes.measure(WAITING // 10 if chosen.quick else WAITING)
    with tempfile.TemporaryDirectory(prefix="outfitter-bench-") as name:
        folder = Path(name)
        if "embedded" in chosen.only:
            rows += measure_embedded(folder / "embedded", quick=chosen.quick)
        if "turns" in chosen.only:
            rows += measure_turns(folder / "turns")
        if "devices" in chosen.only:
            say("many devices on one host")
            rows += devices.measure(folder / "devices")
        if "api" in chosen.only:
            rows += measure_api(folder / "api", quick=chosen.quick)
        if "webhook" in chosen.only:
            rows += measure_webhook(folder / "webhook")
        if set(chosen.only) - {"embedded", "turns", "shapes", "devices", "api", "webhook"}:
            broker = None if chosen.bootstrap else Broker(folder / "kafka")
            try:
                if broker is not None:
                    broker.start()
                bootstrap = chosen.bootstrap or (broker.bootstrap if broker else "")
                contest = Contest(bootstrap, folder, sizes)
                rows += anyio.run(measure_kafka, contest, chosen.only)
            finally:
                if broker is not None:
                    broker.stop()
    after = machine.description()
    print(f"\n{before['platform']}, {before['cpus']} CPUs, Python {before['python']}, {before['build']}")
    print(f"load average before {before['load_average']}, after {after['load_average']}")
    if first := short(rows):
        print(f"\n{table(first)}")
    if rows:
        print(f"\n{table(rows)}\n")
    if by_shape:
        print(table(by_shape, columns=("all different", "all alike")))
    rows += by_shape
    if chosen.out:
        result = {"machine": before, "load_average_after": after["load_average"], "sizes": sizes, "figures": rows}
        chosen.out.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")


def measure_embedded(folder: Path, *, quick: bool) -> list[Row]:
    """What the embedded bus costs."""
    say("embedded bus")
    found = embedded.measure(folder, runs=5 if quick else 20, grants=10 if quick else 100)
    return [
        Row(
            "outfitter run -- true, over the start of Python",
            "ms",
            found.run_ms - found.python_ms,
            aim="< 300",
            matters=True,
        ),
        Row("  CPU of it", "ms", found.run_cpu_ms - found.python_cpu_ms),
        Row("start of Python", "ms", found.python_ms),
        Row("one device: registration to infos, p50", "ms", machine.median(found.session_ms), aim="< 10", matters=True),
        Row("one device: registration to infos, p99", "ms", machine.percentile(found.session_ms, 0.99)),
        Row("one device: a whole RuntimeContext to infos, p50", "ms", machine.median(found.context_ms)),
    ]


def measure_turns(folder: Path) -> list[Row]:
    """The longest turn of a manager's event loop, and the longest silence of its `/livez`, under each flood of the
    table of limits."""
    rows: list[Row] = []
    for found in anyio.run(turns.measure_all, folder, say):
        rows.append(Row(f"{TURN}: {found.flood}", "ms", found.longest_ms, aim=f"<= {turns.LIMIT_MS:g}"))
        rows.append(Row("  longest look for garbage beside it", "ms", found.garbage_ms))
        if found.messages:
            rows.append(Row("  CPU a message", "us", 1000 * found.cpu_ms / found.messages))
    silences = anyio.run(livez.measure_all, folder, say)
    aim = f"<= {livez.LIMIT_S:g}"
    return [*rows, *(Row(f"/livez unanswered: {one.flood}", "s", one.longest_s, aim=aim) for one in silences)]


def measure_api(folder: Path, *, quick: bool) -> list[Row]:
    """What the read API of a fleet costs."""
    hosts = 100 if quick else 1000
    say(f"read API of {hosts} hosts with {hosts * api.WORKERS} workers")
    found = anyio.run(partial(api.measure, folder, hosts=hosts))
    rows = [Row(f"API: start with {hosts * api.WORKERS} workers", "s", found.start_s)]
    slowest = sorted(found.pages_ms, key=lambda page: machine.percentile(found.pages_ms[page], 0.99))[::-1]
    aim = f"< {api.PAGE_LIMIT_MS:g}"
    rows += [
        Row(f"  /{page}, p99", "ms", machine.percentile(found.pages_ms[page], 0.99), aim=aim) for page in slowest[:5]
    ]
    every = [took for times in found.pages_ms.values() for took in times]
    return [
        *rows,
        Row("  all pages, p50", "ms", machine.median(every)),
        Row("  /livez beside it, p99", "ms", machine.percentile(found.probe_ms, 0.99)),
        Row(f"  one event to {api.READERS} readers, p50", "ms", machine.median(found.events_ms)),
        Row("    p99", "ms", machine.percentile(found.events_ms, 0.99), aim=f"< {api.EVENT_LIMIT_MS:g}"),
        Row("  memory", "MiB", found.memory_before / MIB),
        Row(f"  memory with {api.READERS} readers", "MiB", found.memory_with_readers / MIB),
        *measure_readers(folder / "readers"),
    ]


def measure_readers(folder: Path) -> list[Row]:
    """What the read API costs at its worst."""
    say("read API with readers that take nothing, and a host with many holders")
    found = anyio.run(readers.measure, folder)
    return [
        Row("  memory more with readers that take nothing", "MiB", found.unread_bytes / MIB, aim="< 64"),
        Row(f"  one device of {readers.SHARED} with {readers.SHARERS} holders each, after a change, p50", "ms",
            machine.median(found.line_ms)),
        Row("  /livez beside it, the longest", "ms", max(found.probe_ms), aim="< 100"),
    ]  # fmt: skip


def measure_webhook(folder: Path) -> list[Row]:
    """What strangers that read no answer cost the webhook."""
    say("webhook with strangers")
    found = webhook.measure(folder)
    more = (found.memory_with_strangers - found.memory_before) / MIB
    return [
        Row("webhook: memory", "MiB", found.memory_before / MIB),
        Row("  more with strangers that read no answer", "MiB", more, aim=f"< {webhook.LIMIT_MIB:g}"),
        Row("  API servers answered beside them", "", float(found.answered), aim=">= 1"),
    ]


async def measure_kafka(contest: Contest, parts: Sequence[str]) -> list[Row]:
    """What Kafka costs."""
    rows: list[Row] = []
    await contest.take_samples()
    for name, record in contest.samples.items():
        rows.append(Row(f"size of a {name} record", "bytes", len(record)))
    if "backlog" in parts:
        rows += await measure_backlog(contest)
    if "framework" in parts:
        rows += await measure_framework(contest)
    if "latency" in parts:
        rows += await measure_latency(contest)
    if "restore" in parts:
        rows += await measure_restore(contest)
    if "kill" in parts:
        rows += await measure_kill(contest)
    if "replicas" in parts:
        rows += await measure_replicas(contest)
    if "floods" in parts:
        rows += await measure_floods(contest)
    if "orders" in parts:
        rows += await measure_orders(contest)
    return rows


async def measure_orders(contest: Contest) -> list[Row]:
    """From an order of an operator to its effect in the ledger."""
    say("orders")
    cluster = await contest.new_cluster("orders")
    with contest.manager(cluster, WAITING):
        found = await orders.measure(contest.url, cluster, contest.sizes.rounds * 20)
    rows: list[Row] = []
    for what, took in (("quiet", found.quiet), (f"{orders.RATE} registrations a second", found.loaded)):
        rows.append(Row(f"order to its effect, {what}, p50", "ms", machine.median(took)))
        aim = f"< {orders.LIMIT_MS:g}"
        rows.append(Row("  p99", "ms", machine.percentile(took, 0.99), aim=aim))
    return rows


async def measure_floods(contest: Contest) -> list[Row]:
    """An honest worker beside a flood within the advised quota, and the worst messages' cost for 100 kB of them."""
    rows: list[Row] = []
    for records in (floods.BATCH_RECORDS, floods.SMALL):
        say(f"an honest worker beside a flood of {floods.QUOTA} bytes a second, {records} messages a batch")
        took = await floods.answers_beside(
            contest.url, contest.folder, await contest.new_cluster("flood"), records=records
        )
        rows.append(Row(f"answer beside a flood, {records:,} messages a batch, p50", "s", machine.median(took)))
        rows.append(Row("  the longest", "s", max(took), aim=f"< {floods.LIMIT_S:g}"))
    for kind in floods.COSTLY:
        say(f"100 kB of: {kind}")
        found = await floods.cost(contest.url, contest.folder, await contest.new_cluster("cost"), kind)
        rows.append(Row(f"written for: {kind}", "times", found.written / found.sent, aim=f"<= {floods.LIMIT_TIMES:g}"))
        rows.append(Row("  CPU of 100 kB", "s", found.cpu_s * 1e5 / found.sent, aim=f"<= {floods.LIMIT_CPU_S:g}"))
        rows.append(Row("  CPU a message", "us", found.cpu_s * 1e6 / found.messages))
    return rows


async def measure_backlog(contest: Contest) -> list[Row]:
    """Answers a second when there is always something to do."""
    runs: dict[str, list[Run]] = {"bare": [], "outfitter": [], "plain": []}
    for number in range(contest.sizes.backlogs):
        for kind, found in runs.items():
            say(f"backlog {number + 1}/{contest.sizes.backlogs}: {kind}")
            found.append(await contest.backlog(kind))

    def middle(kind: str, figure: Callable[[Run], float]) -> float:
        return machine.median([figure(run) for run in runs[kind]])

    ours, bare = (middle(kind, lambda run: run.rate) for kind in ("outfitter", "bare"))
    return [
        Row("registrations allocated from a backlog", "1/s", ours, bare, aim=">= 0.8",
            spread=spread([run.rate for run in runs["bare"]]), matters=True),
        Row("  transactions", "1/s", *(middle(kind, lambda run: run.commits) for kind in ("outfitter", "bare"))),
        Row("  CPU a registration", "us",
            *(middle(kind, lambda run: run.cpu_us) for kind in ("outfitter", "bare"))),
        Row("  memory afterwards", "MiB",
            *(middle(kind, lambda run: run.memory / MIB) for kind in ("outfitter", "bare"))),
        Row("bare loop, one record of 418 bytes for each", "1/s", None, middle("plain", lambda run: run.rate)),
        Row("  transactions", "1/s", None, middle("plain", lambda run: run.commits)),
        Row("  CPU a record", "us", None, middle("plain", lambda run: run.cpu_us)),
    ]  # fmt: skip


async def measure_framework(contest: Contest) -> list[Row]:
    """The same job in FastStream, if it is installed (the extra `bench`)."""
    if find_spec("faststream") is None:
        say("FastStream is not installed (the extra `bench`): left out")
        return []
    say("backlog: FastStream")
    run = await contest.backlog("faststream")
    return [
        Row("the same job in FastStream, without transactions", "1/s", None, run.rate),
        Row("  CPU a registration", "us", None, run.cpu_us),
    ]


async def measure_kill(contest: Contest) -> list[Row]:
    """What a crash of the manager costs the next worker."""
    say(f"kill -9 of a manager with {contest.sizes.held} allocations")
    took = await contest.after_kill()
    return [
        Row(f"kill -9 to the next answer, {contest.sizes.held} allocations", "ms", machine.median(took),
            matters=True),
        Row("  the longest", "ms", max(took)),
    ]  # fmt: skip


async def measure_replicas(contest: Contest) -> list[Row]:
    """Cluster scope on this machine."""
    rows: list[Row] = []
    for number in (1, 2, 3):
        say(f"{number} replicas of cluster scope")
        cluster = contest.fresh_name("replicas")
        found = await replicas.rate(
            contest.folder / cluster, contest.url, cluster, replicas=number, count=contest.sizes.replicas
        )
        rows.append(Row(f"{number} replicas, answered while it is published", "1/s", found))
    say("a replica is killed")
    cluster = contest.fresh_name("replacement")
    gone = await replicas.replacement(contest.folder / cluster, contest.url, cluster)
    rows.append(Row(f"replica killed to all answered, session {replicas.SESSION_S:g} s", "s", gone))
    return rows


async def measure_latency(contest: Contest) -> list[Row]:
    """Registration to infos, at rates that leave both sides time to spare."""
    sizes = contest.sizes
    counts = {rate: max(sizes.timed, int(rate * sizes.seconds / TURNS)) + loads.FIRST for rate in RATES}
    needed = sizes.rounds * TURNS * sum(counts.values()) + 1
    took: dict[tuple[str, int], list[list[float]]] = {}
    clusters = {kind: await contest.new_cluster(kind) for kind in ("bare", "outfitter", "plain")}
    with ExitStack() as sides:
        for kind, cluster in clusters.items():
            sides.enter_context(contest.side(kind, cluster, needed))
        async with KafkaBus(contest.url) as bus:
            first = 0
            for number in range(sizes.rounds):
                for rate, count in counts.items():
                    say(f"latency {number + 1}/{sizes.rounds}: {', '.join(clusters)} by turns at {rate} a second")
                    round_of: dict[str, list[float]] = {kind: [] for kind in clusters}
                    for turn in range(TURNS):
                        order = list(clusters.items())
                        for kind, cluster in order[turn:] + order[:turn]:
                            round_of[kind] += await loads.latencies(bus, cluster, rate=rate, first=first, count=count)
                        first += count
                    for kind, values in round_of.items():
                        took.setdefault((kind, rate), []).append(values)
    rows: list[Row] = []
    for rate in RATES:
        for share in (0.5, 0.99):
            # of each round, and then the middle one: a round in which the machine was busy must not speak for all
            rounds = {
                kind: [machine.percentile(values, share) for values in took[kind, rate]]
                for kind in ("outfitter", "bare", "plain")
            }
            figures = {kind: machine.median(values) for kind, values in rounds.items()}
            name = f"registration to infos at {rate}/s, p{share * 100:.0f}"
            aim = "<= 1.2" if share == 0.5 else "<= 1.5"
            rows.append(
                Row(
                    name, "ms", figures["outfitter"], figures["bare"], aim=aim,
                    spread=spread(rounds["bare"]), matters=True,
                )
            )  # fmt: skip
            rows.append(Row("  bare loop, one record of 418 bytes", "ms", None, figures["plain"]))
    return rows


async def measure_restore(contest: Contest) -> list[Row]:
    """Records a second of a ledger that is replayed."""
    say(f"writing a ledger of {contest.sizes.ledger} records")
    cluster = await contest.new_cluster("ledger")
    async with KafkaBus(contest.url) as bus:
        await replay.fill(bus, cluster, contest.samples["ledger"], contest.sizes.ledger)
    runs: dict[str, list[replay.Replayed]] = {"bare": [], "outfitter": []}
    for number in range(contest.sizes.rounds):
        for kind, found in runs.items():
            say(f"restore {number + 1}/{contest.sizes.rounds}: {kind}")
            done = await anyio.run_process(
                [sys.executable, "-m", "bench.replay", kind, contest.url, cluster], env=environment(), stderr=None
            )
            seen = msgspec.json.decode(done.stdout, type=replay.Replayed)
            if seen.records < contest.sizes.ledger:
                raise RuntimeError(f"{kind} read {seen.records} records of {contest.sizes.ledger}")
            found.append(seen)

    def middle(figure: Callable[[replay.Replayed], float]) -> tuple[float, float]:
        ours, bare = (machine.median([figure(run) for run in runs[kind]]) for kind in ("outfitter", "bare"))
        return ours, bare

    bare = [run.records / run.seconds for run in runs["bare"]]
    return [
        Row("replay of a ledger, records", "1/s", *middle(lambda run: run.records / run.seconds), aim=">= 0.7",
            spread=spread(bare), matters=True),
        Row("memory of a replayed record", "bytes", *middle(lambda run: run.grown / run.records), matters=True),
    ]  # fmt: skip


def say(what: str) -> None:
    print(f"bench: {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
