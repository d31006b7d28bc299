"""A transaction that Kafka counts as complete and whose records in a partition no marker has decided (KAFKA-20734).

A broker does not leave one open when it is asked to. One that does not verify what is written lets a producer leave one
open: it says nothing to its coordinator of a partition that it writes to.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import AsyncIterator, Collection, Iterator

import anyio
import pytest

from chaos.harm import Harmed, harmed_cluster
from outfitter_proto.bus import Bus, BusUnavailableError, Entry, TopicSpec, Writer, connect
from outfitter_proto.bus.kafka import KafkaBus, adapter
from outfitter_proto.bus.kafka.connecting.protocol import DescribeProducersRequest, DescribeTransactionsRequest
from outfitter_proto.bus.kafka.writing import open_transactions
from outfitter_proto.bus.kafka.writing.open_transactions import LastTransaction
from outfitter_proto.bus.kafka.writing.transactions import TransactionalId
from support.bus.committed import committed
from support.kafka.broker import LAUNCHER, VERSION_1
from support.kafka.proxy import ADD_PARTITIONS_TO_TXN, END_TXN, INIT_PRODUCER_ID, Harm
from support.kafka.transactions import end, leave_open

pytestmark = pytest.mark.kafka


@pytest.fixture(scope="module", params=[(), VERSION_1], ids=["version 2", "version 1"])
def harmed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harmed]:
    """A broker that believes producers (KIP-890's verification is switched off), behind a proxy."""
    settings = {"transaction.partition.verification.enable": "false"}
    folder = tmp_path_factory.mktemp("kafka")
    with harmed_cluster(folder, nodes=1, settings=settings, options=request.param) as harmed:
        yield harmed


class Case:
    """Two topics and an identity of one's own."""

    def __init__(self, bus: Bus, name: str) -> None:
        self.bus = bus
        self.identity, self.ledger, self.history = name, f"{name}-ledger", f"{name}-history"

    async def open(self, bus: Bus | None = None) -> Writer:
        return await (bus or self.bus).open_writer(
            self.identity, 0, topics=[self.ledger, self.history, "no-such-topic"]
        )

    async def leave_open(self, *, after: str) -> None:
        """Records in both topics that nobody will decide, after a transaction that ended so."""
        async with await self.open() as writer:
            if after == "commit":
                await writer.commit([(self.ledger, [Entry(b"k", b"before")])])
            elif after == "abort":
                await self.write(writer, b"before")
                await end(writer, commit=False)
            for topic in self.ledger, self.history:
                await self.bus.stable_end(topic, 0)  # the markers are there
            await self.write(writer, b"left", told=False)  # as if its process died then

    async def write(self, writer: Writer, value: bytes, *, told: bool = True) -> None:
        """Write a record to both topics in a transaction that stays open."""
        await leave_open(writer, self.ledger, self.history, value=value, told=told)

    async def read(self) -> list[list[bytes | None]]:
        """What is committed in the ledger and in the history, once nothing there is undecided."""
        return [
            [message.value for message in await committed(self.bus, topic)] for topic in (self.ledger, self.history)
        ]


@pytest.fixture
async def case(harmed: Harmed) -> AsyncIterator[Case]:
    async with connect(harmed.broker.url) as bus:
        case = Case(bus, harmed.broker.new_cluster())
        await bus.create_topics([TopicSpec(case.ledger, 1, {}), TopicSpec(case.history, 1, {})])
        yield case
    harmed.proxy.heal()


@pytest.mark.parametrize(
    ("after", "ledger", "history"),
    [("commit", [b"before", b"left"], [b"left"]), ("abort", [], []), ("nothing", [], [])],
)
async def test_what_was_left_open_is_ended_as_the_last_transaction_did(
    case: Case, after: str, ledger: list[bytes], history: list[bytes]
) -> None:
    await case.leave_open(after=after)
    async with await case.open() as writer:
        assert await case.read() == [ledger, history]
        await writer.commit([(case.history, [Entry(b"k", b"next")]), (case.ledger, [Entry(b"k", b"next")])])
        assert await case.read() == [[*ledger, b"next"], [*history, b"next"]]


async def test_how_it_ended_is_kept_in_mind_when_the_first_attempt_to_end_it_fails(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taking the transactional id makes its coordinator forget."""

    async def fail(*_: object, commit: bool) -> None:
        raise BusUnavailableError("on purpose")

    await case.leave_open(after="commit")
    with monkeypatch.context() as patched:
        patched.setattr(TransactionalId, "_complete", fail)
        with pytest.raises(BusUnavailableError, match="on purpose"):
            await case.open()
    async with await case.open():
        assert await case.read() == [[b"before", b"left"], [b"left"]]
    await case.leave_open(after="abort")
    async with connect(case.bus.url) as other:
        with monkeypatch.context() as patched:
            patched.setattr(TransactionalId, "_complete", fail)
            with pytest.raises(BusUnavailableError, match="on purpose"):
                await case.open(other)
    async with await case.open():  # what was kept in mind was about an earlier one
        assert await case.read() == [[b"before", b"left"], [b"left"]]


@pytest.mark.parametrize(("harm", "attempts"), [(Harm.CONNECTION_LOST, 1), (Harm.LOST_ANSWER, 2)])
async def test_how_it_ended_is_kept_in_mind_when_the_answer_to_the_taking_is_lost(
    case: Case, harmed: Harmed, monkeypatch: pytest.MonkeyPatch, harm: Harm, attempts: int
) -> None:
    await case.leave_open(after="commit")
    fault = harmed.proxy.harm(INIT_PRODUCER_ID, harm, client=case.identity)
    if attempts > 1:
        with monkeypatch.context() as patched:
            patched.setattr(adapter, "TAKE_WITHIN", 2.9)  # less than a request may take
            with pytest.raises(BusUnavailableError, match=r"within 2\.9 s"):
                await case.open()
    async with await case.open():
        assert fault.struck.is_set()
        assert await case.read() == [[b"before", b"left"], [b"left"]]


@pytest.mark.parametrize(
    ("seen", "known"),
    [
        (LastTransaction("Empty", 5, 4), LastTransaction("CompleteCommit", 5, 4)),
        (LastTransaction("Empty", 5, 3), LastTransaction("CompleteCommit", 5, 3)),
        (
            LastTransaction("Empty", 5, 5),
            LastTransaction("Empty", 5, 5),
        ),  # somebody else took it in between, and may have ended it
        (LastTransaction("Empty", 6, 0), LastTransaction("Empty", 6, 0)),
        (LastTransaction("CompleteAbort", 5, 4), LastTransaction("CompleteAbort", 5, 4)),
        (LastTransaction(""), LastTransaction("")),
    ],
)
def test_taking_an_identity_makes_its_coordinator_forget_what_was_learnt_before(
    seen: LastTransaction, known: LastTransaction
) -> None:
    assert LastTransaction("CompleteCommit", 5, 3).then(seen) == known


@pytest.mark.parametrize("key", [ADD_PARTITIONS_TO_TXN, END_TXN])
async def test_an_identity_is_taken_anew_after_a_request_to_end_it_got_no_answer(
    case: Case, harmed: Harmed, key: int
) -> None:
    """It may arrive late, and would end a later transaction."""
    await case.leave_open(after="commit")
    fault = harmed.proxy.harm(key, Harm.CONNECTION_LOST, client=case.identity)
    with pytest.raises(BusUnavailableError, match="take the identity anew"):
        await case.open()
    assert fault.struck.is_set()
    async with await case.open():
        assert await case.read() == [[b"before", b"left"], [b"left"]]


async def test_who_is_about_to_take_an_identity_does_not_wait_for_what_that_has_open(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, bus = case.ledger, case.bus
    async with await case.open() as writer:
        await writer.commit([(topic, [Entry(b"k", b"before")])])
        await bus.stable_end(topic, 0)
        _, begin = await bus.offsets(topic, 0)
        await case.write(writer, b"never")
        assert await bus.tenure(case.identity) == writer.tenure
        assert await bus.stable_end(topic, 0, taking=case.identity) == begin
        async with await bus.open_writer(f"{case.identity}-other", 0, topics=[topic]):
            with monkeypatch.context() as patched:
                patched.setattr(adapter, "DECIDED_WITHIN", 0.5)
                for another in (f"{case.identity}-other", f"{case.identity}-nobody"):
                    with pytest.raises(BusUnavailableError, match="undecided"):
                        await bus.stable_end(topic, 0, taking=another)
        async with await case.open():  # which ends it
            assert await bus.stable_end(topic, 0, taking=case.identity) > begin
    assert await case.read() == [[b"before"], []]


async def test_a_transaction_that_took_too_long_ended_its_writers_tenure(case: Case) -> None:
    async with (
        KafkaBus(case.bus.url, transaction_timeout=0.5) as bus,
        await bus.open_writer(case.identity, 0, topics=[case.ledger]) as writer,
    ):
        await case.write(writer, b"never")
        await bus.stable_end(case.ledger, 0)
        assert await bus.tenure(case.identity) not in (writer.tenure, None)


async def test_who_is_about_to_take_an_identity_waits_for_what_others_have_open_besides(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Case(case.bus, case.identity)
    other.identity = f"{case.identity}-other"
    async with await case.open() as writer, await other.open() as another:
        await case.write(writer, b"never")
        await case.write(another, b"never")
        monkeypatch.setattr(adapter, "DECIDED_WITHIN", 0.5)
        with pytest.raises(BusUnavailableError, match="undecided"):
            await case.bus.stable_end(case.ledger, 0, taking=case.identity)
        with pytest.raises(BusUnavailableError, match="undecided"):
            await case.bus.stable_end(case.ledger, 0, taking=other.identity)


@pytest.mark.parametrize("request_type", [DescribeTransactionsRequest, DescribeProducersRequest])
async def test_a_broker_that_does_not_know_the_question_is_waited_for_on_the_same_connection(
    case: Case, monkeypatch: pytest.MonkeyPatch, request_type: type
) -> None:
    bus = case.bus
    assert isinstance(bus, KafkaBus)
    async with await case.open() as writer:
        await case.write(writer, b"never")
        before = dict(bus._cluster._connections)
        with monkeypatch.context() as patched:
            patched.setattr(request_type, "API_KEY", 9999)
            patched.setattr(adapter, "DECIDED_WITHIN", 0.5)
            with pytest.raises(BusUnavailableError, match="undecided"):
                await bus.stable_end(case.ledger, 0, taking=case.identity)
        assert before.items() <= bus._cluster._connections.items()


async def test_an_identity_that_nobody_has_held_needs_no_ending(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = 0
    complete = TransactionalId._complete

    async def counted(self: TransactionalId, topics: Collection[str], *, commit: bool) -> None:
        nonlocal ended
        ended += 1
        await complete(self, topics, commit=commit)

    monkeypatch.setattr(TransactionalId, "_complete", counted)
    for before in range(3):
        async with await case.open():
            assert ended == before


async def test_what_was_left_open_is_aborted_where_the_broker_does_not_tell_how_it_ended(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kafka before 3.0 does not know the question."""
    await case.leave_open(after="commit")
    monkeypatch.setattr(DescribeTransactionsRequest, "API_KEY", 9999)
    async with await case.open():
        assert await case.read() == [[b"before"], []]


async def test_whose_transactions_are_open_is_said_as_far_as_it_can_be_known(case: Case) -> None:
    assert isinstance(case.bus, KafkaBus)
    cluster = case.bus._cluster
    assert await open_transactions.sentence(cluster, case.ledger, 0) == "no transaction is open there any more"
    said = await open_transactions.sentence(cluster, "no-such-topic", 0)
    assert said.startswith("whose transaction is open there is not known: ")
    assert "no-such-topic" in said


async def test_an_end_that_stays_undecided_is_an_error_that_names_the_producer_and_the_remedy(
    case: Case, harmed: Harmed, monkeypatch: pytest.MonkeyPatch
) -> None:
    await case.leave_open(after="commit")
    with monkeypatch.context() as patched:
        patched.setattr(adapter, "DECIDED_WITHIN", 0.5)
        with pytest.raises(BusUnavailableError, match=f"{case.ledger}/0 stays undecided") as raised:
            await case.bus.stable_end(case.ledger, 0)
    said = str(raised.value)
    assert re.search(r"\(epoch [01]\) since offset 2, last written 20", said)
    _, _, remedy = said.partition(": kafka-transactions ")
    assert remedy == (
        f"--bootstrap-server {harmed.broker.bootstrap} abort --topic {case.ledger} --partition 0 --start-offset 2"
    )
    command = [sys.executable, str(LAUNCHER), "transactions", *remedy.split()]
    done = await anyio.run_process(command, check=False, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout
    assert await case.bus.stable_end(case.ledger, 0) > 2
