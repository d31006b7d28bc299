"""Each request of a transaction and each answer to it, at a real broker, in both versions of transactions.

`outfitter_proto.bus.kafka.writing.steps` has the table. A proxy loses requests and answers, delays them, and spoils
answers that come: then the request was carried out, and the broker is asked again all the same.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import anyio
import anyio.to_thread
import pytest

from chaos.harm import Harmed, harmed_cluster
from outfitter_proto.bus import (
    Bus,
    BusAuthorizationError,
    BusError,
    BusUnavailableError,
    CommitUnknownError,
    Entry,
    FencedError,
    TooLargeError,
    TopicSpec,
    Writer,
    connect,
)
from outfitter_proto.bus.kafka import KafkaBus, adapter
from outfitter_proto.bus.kafka.connecting import cluster
from outfitter_proto.bus.kafka.writing.steps import TABLE, Known, Step
from support.bus.committed import committed
from support.kafka.broker import NEW, OLD, VERSION_1, KafkaBroker
from support.kafka.proxy import (
    ADD_PARTITIONS_TO_TXN,
    DESCRIBE_TRANSACTIONS,
    END_TXN,
    FIND_COORDINATOR,
    INIT_PRODUCER_ID,
    PRODUCE,
    Fault,
    Harm,
)
from support.kafka.transactions import end, held_by, leave_open

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

WITHIN = 60.0
BROKERS = {"version 2": (NEW, ()), "version 1": (NEW, VERSION_1), "old Kafka": (OLD, ())}
HARMS = [harm for harm in Harm if harm is not Harm.ERROR]
UNKNOWN_SERVER_ERROR, LAST_EPOCH = -1, 2**15 - 2


def with_broker(name: str, *values: object) -> pytest.MarkDecorator:
    """Each broker with each value, unless it has no such request: version 2 adds no partitions."""
    pairs = [
        (kind, value)
        for kind in BROKERS
        for value in values
        if kind != "version 2" or value not in (Step.ADD, ADD_PARTITIONS_TO_TXN)
    ]
    return pytest.mark.parametrize(("harmed", name), pairs, indirect=["harmed"])


@pytest.fixture(scope="module", params=BROKERS)
def harmed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harmed]:
    """A broker of each kind behind a proxy."""
    kafka, options = BROKERS[request.param]
    with harmed_cluster(tmp_path_factory.mktemp("kafka"), nodes=1, kafka=kafka, options=options) as harmed:
        yield harmed


class Case:
    """Two topics, a writer identity and what was committed, on a bus that leads through the proxy."""

    def __init__(self, bus: Bus, harmed: Harmed, version: int) -> None:
        self.bus = bus
        self.version = version
        self.identity = KafkaBroker.new_cluster()
        self.ledger, self.history = f"{self.identity}-ledger", f"{self.identity}-history"
        self._harmed = harmed

    async def open(self, bus: Bus | None = None) -> Writer:
        return await (bus or self.bus).open_writer(self.identity, 0, topics=[self.ledger, self.history])

    async def reopened(self) -> Writer:
        """The writer, taken as often as it takes."""
        with anyio.fail_after(WITHIN):
            while True:
                try:
                    return await self.open()
                except BusUnavailableError:
                    await anyio.sleep(0.1)

    async def commit(self, writer: Writer, value: bytes) -> None:
        await writer.commit([(topic, [Entry(b"k", value)]) for topic in (self.history, self.ledger)])

    async def seen(self) -> list[bytes | None]:
        """What is committed, the same in both topics."""
        history, ledger = [
            [message.value for message in await committed(self.bus, topic)] for topic in (self.history, self.ledger)
        ]
        assert history == ledger
        return ledger

    def harm(self, key: int, harm: Harm, *, times: int = 1, hold: bool = False, code: int = -1) -> Fault:
        """Do harm to the writer's next requests of this kind."""
        return self._harmed.proxy.harm(key, harm, client=self.identity, times=times, hold=hold, code=code)

    def heal(self) -> None:
        self._harmed.proxy.heal()

    async def deliver(self, fault: Fault) -> None:
        """Deliver what a fault holds back, and wait for the answer."""
        self._harmed.proxy.release(fault)
        await delivered(fault)


async def delivered(fault: Fault) -> None:
    assert await anyio.to_thread.run_sync(fault.delivered.wait, WITHIN)


@pytest.fixture
async def case(harmed: Harmed, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Case]:
    monkeypatch.setattr(cluster, "REQUEST_TIMEOUT", 1.5)  # a lost answer is waited for so long
    version = 2 if "version 2" in request.node.callspec.id else 1
    async with connect(harmed.broker.url) as bus:
        case = Case(bus, harmed, version)
        await bus.create_topics([TopicSpec(case.ledger, 1, {}), TopicSpec(case.history, 1, {})])
        yield case
    harmed.proxy.heal()


# --- the version -------------------------------------------------------------------------------------------


async def test_the_version_is_the_clusters(case: Case) -> None:
    async with await case.open() as writer:
        held = held_by(writer)
        assert held.version == case.version
        before = held.holder
        for value in b"1", b"2":
            await case.commit(writer, value)
        rises = 2 if case.version == 2 else 0
        assert held.holder == (before.producer_id, before.epoch + rises)


# --- no answer ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.value)
@with_broker("key", ADD_PARTITIONS_TO_TXN, PRODUCE, END_TXN)
async def test_a_request_that_gets_no_answer_is_settled_by_its_repetition(case: Case, key: int, harm: Harm) -> None:
    """A late copy of a request of version 1 could still act, so there the writer is opened anew."""
    async with await case.open() as writer:
        await case.commit(writer, b"1")
        fault = case.harm(key, harm)
        await case.commit(writer, b"2")
        assert fault.struck.is_set()
        assert writer.must_reopen is (case.version == 1 and key != PRODUCE)
        if harm is Harm.LATE_REQUEST:
            await delivered(fault)
            if case.version == 1 and key == PRODUCE:
                # what a leader has to verify makes it refuse what comes later (error 45)
                with pytest.raises(BusUnavailableError, match="error 45"):
                    await case.commit(writer, b"3")
        if not writer.must_reopen:
            await case.commit(writer, b"3")
    if writer.must_reopen:
        async with await case.open() as writer:
            await case.commit(writer, b"3")
    assert await case.seen() == [b"1", b"2", b"3"]


@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.value)
@pytest.mark.parametrize("key", [INIT_PRODUCER_ID, DESCRIBE_TRANSACTIONS, FIND_COORDINATOR])
async def test_the_identity_is_taken_although_requests_to_take_it_get_no_answer(
    case: Case, key: int, harm: Harm
) -> None:
    """A request to take it that is delivered late fences its own sender, who takes the identity once more."""
    async with await case.open() as writer:
        await case.commit(writer, b"1")
    fault = case.harm(key, harm)
    async with await case.reopened() as writer:
        assert fault.struck.is_set()
        if harm is Harm.LATE_REQUEST and key == INIT_PRODUCER_ID:
            await delivered(fault)
            with pytest.raises(FencedError):
                await case.commit(writer, b"never")
    async with await case.reopened() as writer:
        await case.commit(writer, b"2")
    assert await case.seen() == [b"1", b"2"]


@pytest.mark.parametrize(("harm", "after"), [(Harm.LOST_ANSWER, [b"1", b"2"]), (Harm.NEVER_SENT, [b"1"])])
async def test_a_commit_that_no_answer_settles_is_unknown_and_the_ledger_says(
    case: Case, monkeypatch: pytest.MonkeyPatch, harm: Harm, after: list[bytes]
) -> None:
    monkeypatch.setattr(adapter, "WATCHDOG", 4.5)
    async with await case.open() as writer:
        await case.commit(writer, b"1")
        case.harm(END_TXN, harm, times=1000)
        with pytest.raises(CommitUnknownError, match="no answer to the request to commit"):
            await case.commit(writer, b"2")
        assert writer.must_reopen
        case.heal()
    async with await case.reopened() as writer:
        assert await case.seen() == after
        await case.commit(writer, b"3")
    assert await case.seen() == [*after, b"3"]


@pytest.mark.parametrize("is_done", [True, False])
async def test_a_take_over_while_a_commit_gets_no_answer_leaves_it_unknown(
    case: Case, monkeypatch: pytest.MonkeyPatch, is_done: bool
) -> None:
    """The repeated request is refused in the same words whether the first one has committed or never came."""
    monkeypatch.setattr(cluster, "REQUEST_TIMEOUT", 3.0)  # for so long the second copy keeps its sender waiting
    monkeypatch.setattr(adapter, "WATCHDOG", WITHIN)
    unknown: list[CommitUnknownError] = []
    async with await case.open() as writer, connect(case.bus.url) as other:
        first, second = case.harm(END_TXN, Harm.LATE_REQUEST, hold=True), case.harm(END_TXN, Harm.NEVER_SENT)

        async def commit() -> None:
            with pytest.raises(CommitUnknownError, match="asked again to commit") as raised:
                await case.commit(writer, b"1")
            unknown.append(raised.value)

        with anyio.fail_after(WITHIN):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(commit)
                assert await anyio.to_thread.run_sync(second.struck.wait, WITHIN)
                if is_done:
                    await case.deliver(first)
                async with await case.open(other):
                    pass
        assert unknown
        assert writer.must_reopen
        await case.deliver(first)
    assert await case.seen() == ([b"1"] if is_done else [])


async def test_a_coordinator_that_is_not_found_at_once_is_no_doubt_about_a_commit(case: Case) -> None:
    async with await case.open() as writer:
        for harm in (Harm.LOST_ANSWER, Harm.CONNECTION_LOST, Harm.NEVER_SENT):
            held_by(writer)._coordinator = None  # as if it had moved
            fault = case.harm(FIND_COORDINATOR, harm)
            await case.commit(writer, harm.value.encode())
            assert fault.struck.is_set()
            assert not writer.must_reopen
    assert len(await case.seen()) == 3


# --- answers -----------------------------------------------------------------------------------------------

KEYS = {Step.ADD: ADD_PARTITIONS_TO_TXN, Step.WRITE: PRODUCE, Step.END: END_TXN}


def codes(step: Step, *kinds: Known) -> list[int]:
    return [code for (of, code), known in TABLE.items() if of is step and known in kinds and code is not None]


@with_broker("step", *KEYS)
async def test_what_was_not_done_yet_or_may_have_been_done_is_asked_again(case: Case, step: Step) -> None:
    """The broker has carried out what the spoiled answer is to: that harms no repetition."""
    values = [b"%d" % code for code in codes(step, Known.NOT_YET, Known.ELSEWHERE, Known.DOUBT)]
    if step is Step.END:
        values.append(b"%d" % UNKNOWN_SERVER_ERROR)  # a code without a row
    async with await case.open() as writer:
        for value in values:
            fault = case.harm(KEYS[step], Harm.ERROR, code=int(value))
            await case.commit(writer, value)
            assert fault.struck.is_set()
            assert not writer.must_reopen
    assert await case.seen() == values


REFUSALS = {47: FencedError, 90: FencedError, 48: BusUnavailableError, 10: TooLargeError, 29: BusAuthorizationError,
            45: BusUnavailableError, 120: BusUnavailableError, UNKNOWN_SERVER_ERROR: BusUnavailableError}  # fmt: skip


@with_broker("step", Step.ADD, Step.WRITE)
async def test_nothing_is_committed_after_a_refusal(case: Case, step: Step) -> None:
    refusals = REFUSALS if step is Step.WRITE else {code: REFUSALS[code] for code in (47, 90, 29, UNKNOWN_SERVER_ERROR)}
    for code, kind in refusals.items():
        async with await case.open() as writer:
            case.harm(KEYS[step], Harm.ERROR, code=code)
            with pytest.raises(kind) as raised:
                await case.commit(writer, b"never")
            assert writer.must_reopen
            if code in (10, 29):
                assert case.history in str(raised.value)
    async with await case.open() as writer:
        await case.commit(writer, b"1")
    assert await case.seen() == [b"1"]


async def test_the_identity_is_taken_although_answers_say_not_yet_and_a_refusal_is_an_error(case: Case) -> None:
    answers = [
        (key, code)
        for step, key in ((Step.TAKE, INIT_PRODUCER_ID), (Step.DESCRIBE, DESCRIBE_TRANSACTIONS))
        for code in codes(step, Known.NOT_YET, Known.ELSEWHERE)
    ]
    for key, code in answers:
        fault = case.harm(key, Harm.ERROR, code=code)
        async with await case.open() as writer:
            assert fault.struck.is_set()
            await case.commit(writer, b"%d" % code)
    for code in (13, 15, 16, UNKNOWN_SERVER_ERROR):
        fault = case.harm(FIND_COORDINATOR, Harm.ERROR, code=code)
        async with await case.open():
            assert fault.struck.is_set()
    for key in FIND_COORDINATOR, INIT_PRODUCER_ID, DESCRIBE_TRANSACTIONS:
        case.harm(key, Harm.ERROR, code=53)
        with pytest.raises(BusAuthorizationError, match=f"Write on transactional-id '{case.identity}'"):
            await case.open()
    case.harm(INIT_PRODUCER_ID, Harm.ERROR, code=UNKNOWN_SERVER_ERROR)
    with pytest.raises(BusUnavailableError):
        await case.open()
    assert len(await case.seen()) == len(answers)


# --- what brokers answer by themselves -----------------------------------------------------------------------


async def test_the_first_end_of_a_transaction_stands(case: Case) -> None:
    async with await case.open() as writer:
        held = held_by(writer)
        for commit in (True, False):
            await leave_open(writer, case.ledger, case.history, value=b"%d" % commit)
            holder = held.holder
            assert await until(writer, commit=commit) is Known.DONE
            after, held.holder = held.holder, holder  # as if the answer had been lost
            assert await until(writer, commit=commit) is Known.DONE
            assert held.holder == after
            held.holder = holder
            assert await until(writer, commit=not commit) is Known.ENDED
            held.holder = after
    assert await case.seen() == [b"1"]


async def test_a_late_end_of_a_transaction_of_version_2_leaves_the_next_one_alone(case: Case) -> None:
    """Jepsen's case. In version 1 it ends the next one, which is why the writer is opened anew there."""
    async with await case.open() as writer:
        held = held_by(writer)
        for number, commit in enumerate([True, False]):
            await case.commit(writer, b"%d" % number)
            before = held.holder._replace(epoch=held.holder.epoch - 1) if case.version == 2 else held.holder
            await leave_open(writer, case.ledger, case.history, value=b"open")
            now, held.holder = held.holder, before
            late = await until(writer, commit=commit)
            held.holder = now
            assert late is (Known.FENCED if case.version == 2 else Known.DONE)
            if case.version == 2:
                assert await until(writer, commit=not commit) is Known.DONE
    expected = [b"0", b"1", b"open"] if case.version == 2 else [b"0", b"open", b"1"]
    assert await case.seen() == expected


async def test_an_end_without_anything_written_or_of_another_producer_is_none(case: Case) -> None:
    async with await case.open() as writer:
        held = held_by(writer)
        holder, held.holder = held.holder, held.holder._replace(producer_id=held.holder.producer_id + 1000)
        assert await until(writer, commit=True) is Known.REFUSED
        held.holder = holder
        assert await until(writer, commit=True) is Known.ENDED
        if case.version == 2:
            before = held_by(writer).holder
            assert await until(writer, commit=False) is Known.DONE
            assert held_by(writer).holder.epoch == before.epoch + 1
        await case.commit(writer, b"1")
    assert await case.seen() == [b"1"]


async def test_whoever_is_taken_over_in_the_middle_of_a_transaction_can_neither_write_nor_commit(case: Case) -> None:
    async with await case.open() as old, connect(case.bus.url) as other:
        before = held_by(old).holder
        await case.commit(old, b"1")
        await leave_open(old, case.ledger, case.history, value=b"never")
        async with await case.open(other) as new:
            assert held_by(new).holder.epoch > held_by(old).holder.epoch >= before.epoch
            assert await case.bus.tenure(case.identity) not in (old.tenure, None)
            assert await until(old, commit=True) is Known.FENCED
            with pytest.raises(FencedError):
                await leave_open(old, case.ledger, case.history, value=b"never")
            with pytest.raises(FencedError):
                await case.commit(old, b"never")
            await case.commit(new, b"2")
            assert await case.bus.tenure(case.identity) == new.tenure
    assert await case.seen() == [b"1", b"2"]


async def test_a_transaction_that_is_open_for_too_long_is_not_committed(case: Case) -> None:
    async with KafkaBus(case.bus.url, transaction_timeout=0.5) as bus, await case.open(bus) as writer:
        await case.commit(writer, b"1")
        await leave_open(writer, case.ledger, case.history, value=b"never")
        before = writer.tenure
        await case.seen()  # once the broker has aborted it
        assert await bus.tenure(case.identity) not in (before, None)
        assert await until(writer, commit=True) is (Known.ENDED if case.version == 2 else Known.FENCED)
        with pytest.raises(FencedError):
            await case.commit(writer, b"never")
    async with await case.open() as writer:
        await case.commit(writer, b"2")
    assert await case.seen() == [b"1", b"2"]


async def test_a_closed_writer_leaves_no_transaction_open(case: Case) -> None:
    """Others in the partition would wait for its time-out."""
    async with KafkaBus(case.bus.url, transaction_timeout=10 * WITHIN) as bus, await case.open(bus) as writer:
        fault = case.harm(PRODUCE, Harm.ERROR, code=UNKNOWN_SERVER_ERROR)
        with pytest.raises(BusError):
            await case.commit(writer, b"never")
        assert fault.struck.is_set()
    assert await case.bus.tenure(case.identity) == writer.tenure
    with anyio.fail_after(WITHIN):
        assert await case.seen() == []


@pytest.mark.parametrize("harmed", ["version 2"], indirect=True)
async def test_at_the_last_epoch_commits_go_on_with_a_new_producer_id(case: Case) -> None:
    async with await case.open() as writer:
        held = held_by(writer)
        await case.commit(writer, b"1")
        first = held.holder
        while held.holder.epoch < LAST_EPOCH - 1:
            assert await until(writer, commit=False) is Known.DONE
        await case.commit(writer, b"2")
        assert held.holder == (first.producer_id, LAST_EPOCH)
        fault = case.harm(END_TXN, Harm.CONNECTION_LOST)
        await case.commit(writer, b"3")
        assert fault.struck.is_set()
        assert held.holder.producer_id != first.producer_id
        assert held.holder.epoch == 0
        await case.commit(writer, b"4")
        assert await case.bus.tenure(case.identity) == writer.tenure
        async with await case.open():
            with pytest.raises(FencedError):
                await case.commit(writer, b"never")
    assert await case.seen() == [b"1", b"2", b"3", b"4"]


async def until(writer: Writer, *, commit: bool) -> Known:
    """End the transaction of a writer, again while the markers of another one are written."""
    with anyio.fail_after(WITHIN):
        while (known := await end(writer, commit=commit)) is Known.NOT_YET:  # noqa: ASYNC110 - it tells nobody
            await anyio.sleep(0.002)
    return known
