"""What the simulation has found, each as short as it gets."""

from __future__ import annotations

import random
from collections.abc import Sequence

import anyio
from msgspec import structs

from outfitter_drivers.script import ScriptOutcome
from outfitter_proto.names import managers_topic
from outfitter_proto.records import Allocation, ResolvedRequest, Source
from outfitter_proto.signs_of_life import SignsOfLife, follow_signs
from outfitter_service.core import model as m
from outfitter_service.metrics import Metrics
from outfitter_service.runtime.drivers.pool import DriverPool
from simulation.hosts.books import Books
from simulation.hosts.hardware import BOOKED, RESOURCE, Bench, Catalogue, load
from simulation.hosts.managers import EPOCH
from simulation.loop import Loop, running
from simulation.model.broker import LONG_POLL_S, Broker, Habits
from simulation.model.client import ModelBus
from simulation.model.network import Link, Network


def releasing(bench: Bench, *, shared: bool = False) -> Allocation:
    """The record of a worker that gives the only device back."""
    return Allocation(
        host="h", worker="w", incarnation="1", state="releasing", since=EPOCH, writer="host/h", commit=1, token=1,
        request=ResolvedRequest(amounts={RESOURCE: 1}), source=Source(partition=0, offset=0),
        resources={RESOURCE: [{"id": bench.ids[0], "index": "0"}]}, shared=[RESOURCE] if shared else [],
    )  # fmt: skip


def test_a_driver_does_not_take_back_what_was_lent_as_shared_before_it_prepared_devices() -> None:
    """Somebody else had it by then: a record may be released for another resource of it, or for its survivors."""

    async def release() -> Bench:
        bench = Bench("h", 1, dice=random.Random(1))
        bench.ready_for[bench.ids[0]] = "h/other/1"
        pool = DriverPool(load({"h": bench}, prepares=True), metrics=Metrics([RESOURCE]))
        record = releasing(bench, shared=True)
        released = anyio.Event()

        def emit(event: m.Event) -> None:
            if isinstance(event, m.Unprepared):
                released.set()

        async with anyio.create_task_group() as tasks:
            started = anyio.Event()
            tasks.start_soon(lambda: pool.run(emit, started=started, host="h"))
            await started.wait()
            pool.perform(m.Unprepare(allocation=record.key, token=1), record)
            await released.wait()
            tasks.cancel_scope.cancel()
        return bench

    with running(1) as loop:
        bench = loop.run_until_complete(loop.spawn(loop.world, release))
    assert (bench.violations, bench.ready_for) == ([], {bench.ids[0]: "h/other/1"})


def test_a_grant_and_its_release_in_one_commit_reach_the_driver_in_this_order() -> None:
    """Tasks that are started one after the other may begin in any order: a device stayed ready for who had left."""

    async def grant_and_release() -> dict[str, str]:
        bench = Bench("h", 1, dice=random.Random(1))
        pool = DriverPool(load({"h": bench}, prepares=True), metrics=Metrics([RESOURCE]))
        record = releasing(bench)
        ends: list[m.Event] = []
        async with anyio.create_task_group() as tasks:
            started = anyio.Event()
            tasks.start_soon(lambda: pool.run(ends.append, started=started, host="h"))
            await started.wait()
            pool.perform(m.Prepare(allocation=record.key, token=1), record)
            pool.perform(m.Unprepare(allocation=record.key, token=1), record)
            await anyio.sleep(1.0)
            tasks.cancel_scope.cancel()
        assert [type(end) for end in ends if not isinstance(end, m.DriverReport)] == [m.Prepared, m.Unprepared]
        return bench.ready_for

    for seed in range(30):
        with running(seed) as loop:
            assert loop.run_until_complete(loop.spawn(loop.world, grant_and_release)) == {}, f"seed {seed}"


def test_a_driver_is_asked_and_its_offer_given_back_in_one_commit_in_this_order() -> None:
    """Tasks may begin in any order: an offer stayed in a script's books where nobody had asked for it yet."""

    async def ask_and_go() -> dict[str, Sequence[str]]:
        bench = Bench("h", 1, dice=random.Random(1))
        request = ResolvedRequest(amounts={BOOKED: 1})
        gone = structs.replace(releasing(bench), state="ended", token=None, resources={}, request=request)
        pool = DriverPool(load({"h": bench}, prepares=True, catalogue=Catalogue(books=True)), metrics=Metrics([BOOKED]))
        async with anyio.create_task_group() as tasks:
            started = anyio.Event()
            tasks.start_soon(lambda: pool.run(lambda _: None, started=started, host="h"))
            await started.wait()
            pool.perform(m.Discover(host="h", resource=BOOKED, amount=1, least=1, allocation=gone.key), gone)
            pool.see_committed(gone)
            await anyio.sleep(1.0)
            tasks.cancel_scope.cancel()
        return bench.books.entries

    for seed in range(30):
        with running(seed) as loop:
            assert loop.run_until_complete(loop.spawn(loop.world, ask_and_go)) == {}, f"seed {seed}"


def test_the_devices_that_a_script_with_books_names_are_lent_to_nobody_else_here_either() -> None:
    """As the service has it, whose managers the simulation is to judge."""
    bench = Bench("h", 1, dice=random.Random(1))
    loaded = load({"h": bench}, prepares=True, catalogue=Catalogue(ports=True, books=True))
    assert [name for name, resource in loaded.items() if resource.spec.per_worker] == [BOOKED]


class CountedBooks(Books):
    """Books that know how often devices were asked for, for whom."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def allocate(self, amount: int, who: str) -> ScriptOutcome:
        self.asked.append(who)
        return super().allocate(amount, who)


def test_what_was_given_back_is_not_given_back_again_when_the_partition_is_taken_again() -> None:
    """To give it back a script is asked for it. One was killed just then, and so was the manager before it had tried
    again: the next one took it for given back long ago, and the books kept it."""

    async def take_again() -> CountedBooks:
        bench = Bench("h", 1, dice=random.Random(1))
        books = bench.books = CountedBooks()
        request = ResolvedRequest(amounts={BOOKED: 1})
        gone = structs.replace(releasing(bench), state="ended", token=None, resources={}, request=request)
        unseen = structs.replace(gone, incarnation="2", commit=2)
        pool = DriverPool(load({"h": bench}, prepares=True, catalogue=Catalogue(books=True)), metrics=Metrics([BOOKED]))
        async with anyio.create_task_group() as tasks:
            started = anyio.Event()
            tasks.start_soon(lambda: pool.run(lambda _: None, started=started, host="h"))
            await started.wait()
            pool.perform(m.Discover(host="h", resource=BOOKED, amount=1, least=1, allocation=gone.key), gone)
            pool.see_committed(gone)
            await anyio.sleep(1.0)
            pool.see_restored([gone, unseen])
            await anyio.sleep(1.0)
            tasks.cancel_scope.cancel()
        return books

    with running(1) as loop:
        books = loop.run_until_complete(loop.spawn(loop.world, take_again))
    assert (books.asked, books.entries) == (["h/w/1", "h/w/2"], {})


def test_signs_that_an_unanswered_fetch_may_hide_are_not_taken_for_read() -> None:
    """A manager that had just started was taken for dead: its first sign lay behind a fetch that got no answer."""

    async def follow(bus: ModelBus, loop: Loop) -> float:
        signs = SignsOfLife(now_ms=lambda: loop.time() * 1000, monotonic=loop.time)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(follow_signs, bus, "c", 0, signs)
            await anyio.sleep(5)
            assert signs._as_of[0] > loop.time() - 4
            bus.link.deaf, deaf_at = True, loop.time()
            await anyio.sleep(5)
            tasks.cancel_scope.cancel()
        return signs._as_of[0] - deaf_at

    with running(1) as loop:
        broker = Broker(loop, 1, {managers_topic("c"): True}, 1, Habits(marker_s=0.01, clean_s=None))
        bus = ModelBus(broker, Link(Network(loop, 1), loop.world))
        loop.spawn(loop.world, broker.run)
        read_s = loop.run_until_complete(loop.spawn(loop.world, lambda: follow(bus, loop)))
        for task in loop.world.tasks:
            task.cancel()
        loop.run_until_complete(anyio.sleep(1))
    assert read_s <= LONG_POLL_S
