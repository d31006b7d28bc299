"""The model itself: the bus port's contract holds on it, and Kafka's harder rules do, which the port only hints at."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from bus import test_contract as contract
from outfitter_proto.bus import Entry
from simulation.loop import Loop, Process, running
from simulation.model.broker import Broker, Habits, Producer
from simulation.model.client import ModelBus
from simulation.model.errors import CONCURRENT_TRANSACTIONS, INVALID_PRODUCER_EPOCH, RefusedError
from simulation.model.log import Log
from simulation.model.network import Link, LostError, Network, Weather

CONTRACT: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (contract.test_a_partition_is_read_in_the_order_it_was_published, {"committed": True}),
    (contract.test_a_partition_is_read_in_the_order_it_was_published, {"committed": False}),
    (contract.test_partitions_are_apart, {}),
    (contract.test_a_fetch_of_nothing_ends_with_its_timeout_and_the_next_one_goes_on, {}),
    (contract.test_a_fetch_returns_no_more_records_than_asked_for_and_its_position_follows, {}),
    (contract.test_a_reader_starts_where_it_is_told_and_seeks, {}),
    (contract.test_several_readers_read_the_same_independently, {}),
    (contract.test_a_cancelled_fetch_skips_no_record, {}),
    (contract.test_an_offset_that_is_not_there_is_out_of_range_and_seeking_heals_it, {}),
    (contract.test_a_commit_writes_all_its_batches_in_order_and_readers_reach_the_stable_end, {}),
    (contract.test_a_writer_writes_its_own_partition_number_of_every_topic, {}),
    (contract.test_a_fenced_writer_can_write_nothing_more, {}),
    (contract.test_a_tenure_lasts_until_somebody_takes_the_identity, {}),
    (contract.test_writers_of_different_identities_share_a_partition, {}),
    (contract.test_a_cancelled_commit_is_decided_as_a_whole_once_a_new_writer_is_open, {"patience": 0.005}),
    (contract.test_a_last_batch_far_larger_than_a_writer_says_it_takes_is_refused_whole, {}),
    (contract.test_offsets_count_from_the_first_there_is_to_the_one_after_the_last, {}),
]


class Model:
    """A broker with two topics of one partition, and a bus on it."""

    def __init__(self, loop: Loop, *, habits: Habits = Habits(marker_s=0.01, clean_s=None)) -> None:  # noqa: B008
        self.loop = loop
        self.broker = Broker(loop, 1, {"ledger": True, "history": False}, 1, habits)
        self.network = Network(loop, 1)
        self.bus = ModelBus(self.broker, Link(self.network, loop.world))
        loop.spawn(loop.world, self.broker.run)

    @property
    def ledger(self) -> Log:
        return self.broker.logs["ledger", 0]

    def begin(self, key: str, *, timeout: float = 5.0) -> Producer:
        """Fence, and leave a transaction with one record open."""
        producer = self.broker.init_producer("writer", timeout)
        self.broker.add_partitions(producer, [self.ledger])
        self.broker.produce(producer, self.ledger, 0, [Entry(key.encode(), b"1")])
        return producer

    def visible(self) -> list[str]:
        return [(message.key or b"").decode() for message in self.ledger.read(0, 100, committed=True)[0]]


def simulated(test: Callable[[Model], Awaitable[None]], **options: Any) -> None:
    """Run `test` on a model of its own, in its own time."""
    with running(1) as loop:
        model = Model(loop, **options)
        loop.run_until_complete(loop.spawn(loop.world, lambda: test(model)))
        for task in loop.world.tasks:
            task.cancel()
        loop.run_until_complete(anyio.sleep(1))


@pytest.mark.parametrize(("promise", "given"), CONTRACT, ids=lambda value: getattr(value, "__name__", None))
def test_the_model_keeps_the_port_s_contract(promise: Callable[..., Awaitable[None]], given: dict[str, Any]) -> None:
    numbers = itertools.count()

    async def test(model: Model) -> None:
        async def make_topic(partitions: int = 1, **_: str) -> str:
            name = f"topic-{next(numbers)}"
            for partition in range(partitions):
                model.broker.logs[name, partition] = Log(name, partition, compact=False)
            return name

        await promise(bus=model.bus, make_topic=make_topic, **given)

    simulated(test)


def test_a_transaction_is_visible_once_it_is_marked_and_not_when_its_end_is_answered() -> None:
    async def test(model: Model) -> None:
        producer = model.begin("a")
        model.broker.end(producer, commit=True)
        assert model.visible() == []
        with pytest.raises(RefusedError) as caught:
            model.broker.add_partitions(producer, [model.ledger])
        assert caught.value.code == CONCURRENT_TRANSACTIONS
        await anyio.sleep(0.5)
        assert model.visible() == ["a"]
        assert model.ledger.end == 2

    simulated(test)


def test_an_open_transaction_hides_what_others_have_committed_after_its_beginning() -> None:
    async def test(model: Model) -> None:
        producer = model.begin("a")
        model.ledger.append([Entry(b"b", b"1")], model.loop.time())
        assert model.visible() == []
        model.broker.end(producer, commit=False)
        await anyio.sleep(0.5)
        assert model.visible() == ["b"]

    simulated(test)


def test_a_late_request_to_commit_ends_the_next_transaction_of_the_same_epoch() -> None:
    """Jepsen's case: the reason why a writer whose request was repeated is replaced."""

    async def test(model: Model) -> None:
        producer = model.begin("a")
        model.broker.end(producer, commit=True)
        await anyio.sleep(0.5)
        model.broker.add_partitions(producer, [model.ledger])
        model.broker.produce(producer, model.ledger, 1, [Entry(b"half", b"1")])
        model.broker.end(producer, commit=True)  # the copy of the first request
        await anyio.sleep(0.5)
        assert model.visible() == ["a", "half"]

    simulated(test)


def test_a_late_request_to_commit_means_nothing_once_the_producer_was_replaced() -> None:
    async def test(model: Model) -> None:
        old = model.begin("a")
        model.broker.end(old, commit=True)
        await anyio.sleep(0.5)
        model.begin("half")
        with pytest.raises(RefusedError) as caught:
            model.broker.end(old, commit=True)
        assert caught.value.code == INVALID_PRODUCER_EPOCH
        await anyio.sleep(0.5)
        assert model.visible() == ["a"]

    simulated(test)


def test_a_transaction_that_is_open_for_too_long_is_aborted_and_its_producer_fenced() -> None:
    async def test(model: Model) -> None:
        producer = model.begin("a", timeout=2.0)
        await anyio.sleep(5.0)
        assert model.visible() == []
        assert model.ledger.stable == model.ledger.end
        with pytest.raises(RefusedError) as caught:
            model.broker.end(producer, commit=True)
        assert caught.value.code == INVALID_PRODUCER_EPOCH

    simulated(test)


def test_a_batch_that_comes_twice_is_written_once() -> None:
    async def test(model: Model) -> None:
        producer = model.begin("a")
        assert model.broker.produce(producer, model.ledger, 0, [Entry(b"a", b"1")]) == 0
        model.broker.end(producer, commit=True)
        await anyio.sleep(0.5)
        assert model.visible() == ["a"]

    simulated(test)


def test_compaction_leaves_the_last_record_of_each_key_and_holes_that_a_reader_passes() -> None:
    async def test(model: Model) -> None:
        for number in range(30):
            async with await model.bus.open_writer("writer", 0) as writer:
                await writer.commit([("ledger", [Entry(b"a", b"%d" % number), Entry(b"b", None)])])
        await anyio.sleep(0.5)
        before = len(model.ledger.records)
        model.ledger.clean()
        assert len(model.ledger.records) < before / 3
        async with await model.bus.open_reader("ledger", 0, start=None, committed=True) as reader:
            last: dict[bytes | None, bytes | None] = {}
            while reader.position < model.ledger.end:
                last.update((message.key, message.value) for message in await reader.fetch())
        assert last == {b"a": b"29", b"b": None}

    simulated(test)


def test_a_lost_answer_and_a_late_request_look_alike_to_who_asked() -> None:
    async def test(model: Model) -> None:
        done: list[str] = []
        link = Link(model.network, Process("somebody"))
        for weather in (Weather(answer_lost=1.0), Weather(late=1.0), Weather(request_lost=1.0)):
            model.network.weather = weather
            with pytest.raises(LostError):
                await link.ask("Anything", lambda: done.append("done"))
        await anyio.sleep(30)
        assert done == ["done", "done"]

    simulated(test)


def test_a_stopped_process_stands_still_while_time_passes_and_a_dead_one_for_ever() -> None:
    ticks: dict[str, list[float]] = {"stopped": [], "dead": []}

    async def test(model: Model) -> None:
        loop = model.loop

        async def tick(name: str) -> None:
            while True:
                await anyio.sleep(1.0)
                ticks[name].append(loop.time())

        stopped, dead = Process("stopped"), Process("dead")
        loop.spawn(stopped, lambda: tick("stopped"))
        loop.spawn(dead, lambda: tick("dead"))
        await anyio.sleep(2.5)
        loop.stop_process(stopped)
        loop.kill(dead)
        await anyio.sleep(10)
        assert len(ticks["stopped"]) == len(ticks["dead"]) == 2
        loop.go_on(stopped)
        await anyio.sleep(0.5)
        assert len(ticks["stopped"]) == 3
        assert len(ticks["dead"]) == 2
        loop.raise_up(dead)
        for task in [*stopped.tasks, *dead.tasks]:
            task.cancel()

    simulated(test)
