"""Bugs that are planted on purpose, each a mistake that a manager or its bus adapter could well contain.

A simulator that does not find them finds nothing. Each says within how many seeds it must be found, which is
several times what was measured. Most sit in the bus, where they are independent of how the runtime is built.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import msgspec
from msgspec import UNSET, Struct, structs

from outfitter.session import status
from outfitter.session.lease import Lease
from outfitter.session.worker_session import WorkerSession
from outfitter_proto.bus import (
    BusError,
    CommitUnknownError,
    Entry,
    FencedError,
    Message,
    OffsetOutOfRangeError,
    Reader,
    TopicInfo,
    Writer,
)
from outfitter_proto.codec import encode
from outfitter_proto.records import FINAL_STATES, Allocation, Deregister, Register, Source
from outfitter_service.core import decide, discovery, fast_path
from outfitter_service.core import model as m
from outfitter_service.core.decision import DecisionBuilder
from outfitter_service.core.placement.shared_devices import Scene
from outfitter_service.core.state import infos
from outfitter_service.core.state.host_state import HostState
from outfitter_service.core.state.ledger import Ledger
from outfitter_service.core.states import Step
from outfitter_service.runtime.clock import Clock
from outfitter_service.runtime.input.lookahead import LookAheadBuffer
from outfitter_service.runtime.liveness.leases import Leases
from outfitter_service.runtime.liveness.tracker import LivenessTracker
from outfitter_service.runtime.processor.commit.pending_commit import PendingCommit
from outfitter_service.runtime.processor.commit_loop import CommitLoop
from outfitter_service.runtime.processor.event_queue import EventQueue
from outfitter_service.runtime.processor.settlement import InputLoss
from outfitter_service.runtime.processor.takeover import Takeover
from outfitter_service.runtime.sweeper.host_registry import HostRegistry
from outfitter_service.runtime.sweeper.partition_sweeper import PartitionSweeper
from simulation import remaking, settings
from simulation.broker import Producer
from simulation.client import ModelBus, ModelReader, ModelWriter
from simulation.errors import FENCED, RefusedError
from simulation.hardware import Catalogue
from simulation.log import Log
from simulation.run import Outcome, run

CHECKPOINT = b"@checkpoint/"


class Bug(Struct, frozen=True, kw_only=True):
    """A planted bug: its name, what it does, how many seeds it may take to be found, and where it sits."""

    name: str
    what: str
    within: int
    bus: type[ModelBus] = ModelBus
    patches: Callable[[], AbstractContextManager[Any]] = nullcontext


class Hunt(Struct, frozen=True, kw_only=True):
    """What came of looking for a bug: after how many seeds it was found (None: it was not), and by what."""

    bug: str
    seeds: int | None
    steps: int
    outcome: Outcome | None = None


def hunt(bug: Bug, *, first: int = 0) -> Hunt:
    """Run seeds, from `first` on, until one of them finds `bug`, or as many as it may take."""
    steps = 0
    with bug.patches():
        for number in range(bug.within):
            outcome = run(first + number, make_bus=bug.bus)
            steps += outcome.steps
            if outcome.violations:
                return Hunt(bug=bug.name, seeds=number + 1, steps=steps, outcome=outcome)
    return Hunt(bug=bug.name, seeds=None, steps=steps)


# --- in the writer -----------------------------------------------------------------------------------------


class _LateFence(ModelWriter):
    async def take(self) -> None:
        """Later."""

    async def commit(self, batches: Sequence[tuple[str, Sequence[Entry]]]) -> None:
        if self._producer is None:
            await super().take()
        await super().commit(batches)


class _Forgetful(ModelWriter):
    async def _produce(self, producer: Producer, log: Log, entries: Sequence[Entry]) -> None:
        try:
            await super()._produce(producer, log, entries)
        except RefusedError as error:
            if error.code in FENCED:
                raise


class _Stubborn(ModelWriter):
    async def commit(self, batches: Sequence[tuple[str, Sequence[Entry]]]) -> None:
        try:
            await super().commit(batches)
        except CommitUnknownError:
            await self._again(batches)

    async def _again(self, batches: Sequence[tuple[str, Sequence[Entry]]]) -> None:
        self._spent = self._begun = self._ending = False
        self._sequences.clear()
        await self.take()
        await super().commit(batches)


class _Zombie(ModelWriter):
    async def commit(self, batches: Sequence[tuple[str, Sequence[Entry]]]) -> None:
        try:
            await super().commit(batches)
        except FencedError:
            self._spent = self._begun = self._ending = False
            self._sequences.clear()
            await self.take()
            await super().commit(batches)


class _Untainted(ModelWriter):
    @property
    def tainted(self) -> bool:
        return self._spent


class _TwoSteps(ModelWriter):
    async def commit(self, batches: Sequence[tuple[str, Sequence[Entry]]]) -> None:
        *before, (topic, entries) = batches
        await super().commit([*before, (topic, entries[:-1])])
        await super().commit([(topic, entries[-1:])])


class _TakesFirst(ModelWriter):
    async def commit(self, batches: Sequence[tuple[str, Sequence[Entry]]]) -> None:
        *before, (topic, entries) = batches
        await super().commit([*before, (topic, [*reversed(entries[:-1]), entries[-1]])])


class _GroupWriter(ModelWriter):
    async def commit(self, batches: Sequence[tuple[str, Sequence[Entry]]]) -> None:
        await super().commit(batches)
        last = batches[-1][1][-1]
        if (last.key or b"").startswith(CHECKPOINT):
            position = msgspec.json.decode(last.value or b"")["input"]["to"]
            await self._bus._ask("OffsetCommit", lambda: _groups(self._bus).update({last.key: position}))


def _writing(kind: type[ModelWriter]) -> type[ModelBus]:
    class Buggy(ModelBus):
        writer = kind

    return Buggy


# --- in the bus --------------------------------------------------------------------------------------------


def _groups(bus: ModelBus) -> dict[bytes | None, int]:
    found: dict[bytes | None, int] = bus._broker.__dict__.setdefault("group_offsets", {})
    return found


class _Rewriting(ModelReader):
    """Reads checkpoints with something of them replaced."""

    change: Callable[[bytes | None, dict[str, Any]], None]

    async def fetch(self, *, max_records: int = 1000, timeout: float = 1.0) -> list[Message]:
        found = await super().fetch(max_records=max_records, timeout=timeout)
        return [self._changed(message) for message in found]

    def _changed(self, message: Message) -> Message:
        if message.value is None or not (message.key or b"").startswith(CHECKPOINT):
            return message
        body = msgspec.json.decode(message.value)
        self.change(message.key, body)
        return structs.replace(message, value=msgspec.json.encode(body))


class _GroupBus(ModelBus):
    writer = _GroupWriter

    async def open_reader(self, topic: str, partition: int, *, start: int | None, committed: bool) -> Reader:
        reader = await super().open_reader(topic, partition, start=start, committed=committed)
        assert isinstance(reader, ModelReader)
        rewriting = _Rewriting(self, reader._log, reader.position, committed=committed)

        def change(key: bytes | None, body: dict[str, Any]) -> None:
            body["input"]["to"] = _groups(self).get(key, body["input"]["to"])

        rewriting.change = change
        return rewriting


class _Tokenless(ModelBus):
    async def open_reader(self, topic: str, partition: int, *, start: int | None, committed: bool) -> Reader:
        reader = await super().open_reader(topic, partition, start=start, committed=committed)
        assert isinstance(reader, ModelReader)
        rewriting = _Rewriting(self, reader._log, reader.position, committed=committed)
        rewriting.change = lambda _, body: body.update(token=0)
        return rewriting


class _Level(ModelBus):
    async def open_reader(self, topic: str, partition: int, *, start: int | None, committed: bool) -> Reader:
        reader = await super().open_reader(topic, partition, start=start, committed=committed)
        assert isinstance(reader, ModelReader)
        rewriting = _Rewriting(self, reader._log, reader.position, committed=committed)
        rewriting.change = lambda _, body: body["input"].pop("ahead", None)
        return rewriting


class _Uncommitted(ModelBus):
    async def open_reader(self, topic: str, partition: int, *, start: int | None, committed: bool) -> Reader:
        return await super().open_reader(topic, partition, start=start, committed=False)

    async def stable_end(self, topic: str, partition: int, *, taking: str | None = None) -> int:
        del taking
        return (await self.offsets(topic, partition))[1]


class _Hasty(ModelBus):
    async def stable_end(self, topic: str, partition: int, *, taking: str | None = None) -> int:
        del taking
        log = self.log(topic, partition)
        _, end = await self._ask("ListOffsets", lambda: self._broker.offset(log, committed=True))
        found: int = end
        return found


class _Nameless(ModelBus):
    """Tells topics apart by their names alone."""

    topics: tuple[str, ...] = ()

    async def topic(self, name: str) -> TopicInfo:
        found = await super().topic(name)
        return found._replace(id="the same") if name.endswith(self.topics) else found

    async def has_committed(self, identity: str) -> bool:
        return "allocations" not in self.topics and await super().has_committed(identity)


class _AnyLedger(_Nameless):
    topics = ("allocations",)


class _AnyInput(_Nameless):
    topics = ("registrations",)


# --- in the runtime ----------------------------------------------------------------------------------------


@contextmanager
def _acting_early() -> Iterator[None]:
    commit = CommitLoop._commit

    async def act_and_commit(self: CommitLoop, work: PendingCommit, checkpoint: Any) -> None:
        for command in work.batch.effects.commands:
            record, _ = work.batch.output.values.get(command.allocation, (None, None))
            self._settlement._drivers.perform(command, record)  # type: ignore[arg-type]
        await commit(self, work, checkpoint)

    with patch.object(CommitLoop, "_commit", act_and_commit):
        yield


def _judge_by_the_clock(self: LivenessTracker, heard: object) -> list[m.LeaseExpired]:
    due = self.leases.due(self._now())
    for key in due:
        self.leases.drop(key)
    return [m.LeaseExpired(allocation=key) for key in due]


@contextmanager
def _short_leases() -> Iterator[None]:
    start = Leases.start

    def start_shorter(self: Leases, key: str, length_s: float, now: float) -> None:
        start(self, key, length_s * 0.25, now)

    with patch.object(Leases, "start", start_shorter):
        yield


@contextmanager
def _ahead_whatever_came_of_it() -> Iterator[None]:
    take_back = CommitLoop._take_back

    def keep_ahead(self: CommitLoop, *works: PendingCommit) -> None:
        self._taken.cursor.ahead = dict(self._open.ahead)
        take_back(self, *works)

    with patch.object(CommitLoop, "_take_back", keep_ahead):
        yield


@contextmanager
def _taken_again() -> Iterator[None]:
    keeps = LookAheadBuffer._keeps

    def keeps_the_next(self: LookAheadBuffer, message: Message) -> bool:
        kept = keeps(self, message)
        if self._left.pop(message.key or b"", None) is not None:
            self._kept[message.key or b""] = 0
        return kept

    with patch.object(LookAheadBuffer, "_keeps", keeps_the_next):
        yield


@contextmanager
def _own_names() -> Iterator[None]:
    def known_only(_: str, known: Iterable[str], classes: object) -> list[str]:
        del classes
        return list(known)

    with (
        # looked for where only the driver of a third resource knows both names, and now and then does not
        patch.object(settings, "_catalogue", lambda _: Catalogue(cards=True, mapped=True)),
        patch.object(settings, "FAULTS", ("device", "device", "kill", "worker")),
        patch.object(infos, "other_names", known_only),
        patch.object(discovery, "_aliases_now", lambda _, record: record.aliases),
        patch.object(discovery, "_still_linked", lambda *_: ()),
    ):
        yield


def _unmeasured(
    self: DecisionBuilder, key: str, after: Allocation, *_: object, **__: object
) -> tuple[Allocation, bytes]:
    del self, key
    return after, encode(after)


@contextmanager
def _on_from_the_end() -> Iterator[None]:
    begin_again = CommitLoop._begin_again

    async def begin_at_the_end(self: CommitLoop, lost: OffsetOutOfRangeError) -> BusError | None:
        return await begin_again(self, OffsetOutOfRangeError(str(lost), start=lost.end, end=lost.end))

    with patch.object(CommitLoop, "_begin_again", begin_at_the_end):
        yield


@contextmanager
def _rolls_once() -> Iterator[None]:
    catch_up = HostRegistry.catch_up

    async def catch_up_once(self: HostRegistry) -> None:
        if self._position is None:
            await catch_up(self)

    with patch.object(HostRegistry, "catch_up", catch_up_once):
        yield


async def _answer_at_once(self: PartitionSweeper, writer: Writer, host_registry: HostRegistry, read_to: int) -> None:
    await host_registry.catch_up()
    self._look_again(host_registry)
    letters = self._ripe(host_registry)
    if letters or self._is_due(read_to):
        await self._commit(writer, letters, self._next(letters, read_to))


def _jumping() -> AbstractContextManager[Any]:
    """Looked for where clocks are set."""
    return patch.object(settings, "JUMPY", 1.0)


@contextmanager
def _by_the_wall() -> Iterator[None]:
    begin = LivenessTracker.__init__

    def begin_by_the_wall(self: LivenessTracker, *args: Any, clock: Clock, **options: Any) -> None:
        begin(self, *args, clock=clock, **options)
        self._now = lambda: clock.utc().timestamp()

    with patch.object(LivenessTracker, "__init__", begin_by_the_wall), _jumping():
        yield


@contextmanager
def _ahead_for_good() -> Iterator[None]:
    with patch.object(HostState, "is_ahead", lambda *_: False), _jumping():
        yield


@contextmanager
def _claims_of_its_own() -> Iterator[None]:
    begin = Scene.__init__

    def begin_without_claims(self: Scene, *args: Any) -> None:
        begin(self, *args)
        self._claimed = self._claimed_alone = frozenset()

    with (
        patch.object(settings, "_catalogue", lambda _: Catalogue(cards=True)),
        patch.object(Scene, "__init__", begin_without_claims),
    ):
        yield


def _unruly() -> AbstractContextManager[Any]:
    """Looked for where workers say what no client would."""
    return patch.object(settings, "UNRULY", 1.0)


@contextmanager
def _another_request() -> Iterator[None]:
    again = decide._register_again

    def take_it(builder: DecisionBuilder, key: str, known: Allocation, message: Register) -> None:
        asked = {name: one.amount for name, one in (message.resources or {}).items()}
        if known.state == "pending" and asked != known.request.amounts:
            request = structs.replace(known.request, amounts=asked, resources=message.resources)
            builder.step(Step.REFRESH, "registered again", known, request=request)
        else:
            again(builder, key, known, message)

    with patch.object(decide, "_register_again", take_it), _unruly():
        yield


@contextmanager
def _goodbye_of_the_eldest() -> Iterator[None]:
    deregister = decide._deregister

    def deregister_eldest(builder: DecisionBuilder, message: Deregister, source: Source) -> None:
        if message.incarnation is None:
            runs = [key for _, key in builder.host_state(message.host).incarnations.get(message.worker, ())]
            live = [key for key in runs if builder.ledger.allocations[key].state not in FINAL_STATES]
            if live:
                message = structs.replace(message, incarnation=live[0].rpartition("/")[2])
        deregister(builder, message, source)

    with patch.object(decide, "_deregister", deregister_eldest), _unruly():
        yield


def _changing() -> AbstractContextManager[Any]:
    """Looked for where configurations change."""
    return patch.object(settings, "CHANGING", 1.0)


@contextmanager
def _let_go_as_configured() -> Iterator[None]:
    lets_go = decide._lets_go

    def lets_go_now(rules: decide.Rules, record: Allocation) -> bool:
        return lets_go(rules, structs.replace(record, prepared=UNSET))

    with patch.object(decide, "_lets_go", lets_go_now), _changing():
        yield


# --- in the client -----------------------------------------------------------------------------------------


def _from_when_it_is_read(self: Lease, seconds: float | None) -> None:
    if seconds != self._seconds:
        self.confirm(self.clock())
    self._seconds = seconds


def _by_any_acknowledgement(self: Lease, sent_at: float) -> bool:
    self.confirm(sent_at)
    return True


async def _whatever_became_of_the_lease(self: WorkerSession) -> Allocation:
    snapshot = self.allocation_watch.read()
    while snapshot.record is None or (refusal := status.refusal(snapshot.record)) is not None:
        if snapshot.error is not None:
            raise snapshot.error
        if snapshot.record is not None and status.standing(snapshot.record) is not status.AllocationStatus.WAITING:
            raise refusal
        snapshot = await self.allocation_watch.changed(snapshot.version)
    return snapshot.record


class _Everything:
    def __contains__(self, _: object) -> bool:
        return True


def _regardless(self: CommitLoop) -> LookAheadBuffer | None:
    lookahead_buffer = self._inputs.lookahead.lookahead_buffer
    return lookahead_buffer if lookahead_buffer and lookahead_buffer.messages else None


def _nothing(*_: Any, **__: Any) -> None:
    """What should have been done is not."""


BUGS: tuple[Bug, ...] = (
    Bug(
        name="fence-after-restore",
        what="the ledger is read first, and the predecessor is fenced by the first commit",
        within=40,
        bus=_writing(_LateFence),
    ),
    Bug(
        name="forgotten-future",
        what="a produce that failed is not noticed, and the transaction is committed without it",
        within=120,
        bus=_writing(_Forgetful),
    ),
    Bug(
        name="position-from-the-group",
        what="the input goes on at the consumer group's offset, which is committed after the records",
        within=40,
        bus=_GroupBus,
    ),
    Bug(
        name="lease-judged-while-behind",
        what="a lease is over when its time is, whatever heartbeats lie unread in the input",
        within=200,
        patches=lambda: patch.object(LivenessTracker, "expired", _judge_by_the_clock),
    ),
    Bug(
        name="unknown-commit-retried",
        what="a commit whose outcome is unknown is made once more",
        within=150,
        bus=_writing(_Stubborn),
    ),
    Bug(
        name="no-taint",
        what="a producer whose request was repeated is kept: a late EndTxn ends a later transaction",
        within=400,
        bus=_writing(_Untainted),
        # looked for where the network troubles the requests in question
        patches=lambda: patch.object(settings, "STORMS", (("EndTxn",),)),
    ),
    Bug(
        name="zombie-goes-on",
        what="a fenced writer takes its identity again and goes on with what it has in mind",
        within=40,
        bus=_writing(_Zombie),
    ),
    Bug(
        name="checkpoint-apart",
        what="the checkpoint is committed after the records that it is about",
        within=40,
        bus=_writing(_TwoSteps),
    ),
    Bug(
        name="grants-before-releases",
        what="within a commit, what takes devices stands before what lets go of them",
        within=40,
        bus=_writing(_TakesFirst),
    ),
    Bug(
        name="token-restarted",
        what="fencing tokens begin anew after a restart",
        within=40,
        bus=_Tokenless,
    ),
    Bug(
        name="uncommitted-ledger",
        what="the ledger is restored with what no transaction has committed",
        within=40,
        bus=_Uncommitted,
    ),
    Bug(
        name="restore-to-the-stable-offset",
        what="the ledger is read up to the last stable offset, which another writer's open transaction holds back",
        within=250,
        bus=_Hasty,
    ),
    Bug(
        name="acting-before-the-commit",
        what="drivers are called before the commit that says so has returned",
        within=300,
        patches=_acting_early,
    ),
    Bug(
        name="rollback-forgotten",
        what="what a failed commit decided stays in mind",
        within=80,
        patches=lambda: patch.object(Ledger, "rollback", lambda self: (self.settle(), self.keep())),
    ),
    Bug(
        name="commands-not-issued-again",
        what="what an unfinished record of the ledger implies is not done after a restore",
        within=40,
        patches=lambda: patch.object(EventQueue, "answered", lambda _: _Everything()),
    ),
    Bug(
        name="nobody-attended-to",
        what="leases and owners of before a restore are forgotten by it",
        within=100,
        patches=lambda: patch.object(LivenessTracker, "restart", _nothing),
    ),
    Bug(
        name="foreign-instance-fenced-back",
        what="a fenced manager takes the partition again without looking who has it",
        within=40,
        patches=lambda: patch.object(Takeover, "_refuse_successor", _nothing),
    ),
    Bug(
        name="short-leases",
        what="a lease is over before the worker believes so",
        within=120,
        patches=_short_leases,
    ),
    Bug(
        name="lent-without-taking-back",
        what="a device that a driver prepared is free at once when its worker is gone",
        within=40,
        patches=lambda: patch.object(decide, "_lets_go", lambda *_: False),
    ),
    Bug(
        name="ahead-forgotten",
        what="after a restore, what was decided before its turn is decided again",
        within=100,
        bus=_Level,
    ),
    Bug(
        name="ahead-without-the-commit",
        what="what a failed commit decided before its turn is passed over by the next one",
        within=250,
        patches=_ahead_whatever_came_of_it,
    ),
    Bug(
        name="left-and-taken-again",
        what="a host that had a message left to its turn has the next one decided before it",
        within=100,
        patches=_taken_again,
    ),
    Bug(
        name="ahead-of-the-window",
        what="a message is decided before its turn while the host's earlier ones still wait for theirs",
        within=100,
        patches=lambda: patch.object(CommitLoop, "_lookahead_buffer", _regardless),
    ),
    Bug(
        name="lease-from-when-it-is-read",
        what="a worker's lease begins when the first record is read, however long ago that was written",
        within=300,
        patches=lambda: patch.object(Lease, "grant", _from_when_it_is_read),
    ),
    Bug(
        name="late-heartbeat-renews",
        what="a heartbeat that gets through after the end of a worker's lease renews it",
        within=500,
        patches=lambda: patch.object(Lease, "acknowledge", _by_any_acknowledgement),
    ),
    Bug(
        name="grant-judged-by-old-heartbeats",
        what="whether a grant after an outage is lost is judged by the worker's heartbeats of before it",
        within=40,
        patches=lambda: patch.object(WorkerSession, "_await_verdict", _whatever_became_of_the_lease),
    ),
    Bug(
        name="names-apart",
        what="a device that two resources show under two names is lent under each of them",
        within=40,
        patches=lambda: patch.object(HostState, "canonical", lambda _, name: name),
    ),
    Bug(
        name="names-of-its-own-driver",
        what="a record keeps only those names of a device that its own resource's driver knows",
        within=40,
        patches=_own_names,
    ),
    Bug(
        name="leases-by-the-wall",
        what="leases are judged by the wall clock, which jumps",
        within=40,
        patches=_by_the_wall,
    ),
    Bug(
        name="ahead-for-good",
        what="what ended while the clock was ahead is remembered until the clock is there again",
        within=40,
        patches=_ahead_for_good,
    ),
    Bug(
        name="claims-of-its-own-resource",
        what="what an earlier worker waits for is left to it as the resource that it wants, and not as others",
        within=200,
        patches=_claims_of_its_own,
    ),
    Bug(
        name="another-request",
        what="a run that waits and registers again with another request waits for that one",
        within=40,
        patches=_another_request,
    ),
    Bug(
        name="goodbye-of-the-eldest",
        what="a deregistration of a worker that names no run ends the eldest one",
        within=40,
        patches=_goodbye_of_the_eldest,
    ),
    Bug(
        name="let-go-as-configured",
        what="whether a driver has to let go of a device is judged by today's configuration, not by that of its grant",
        within=40,
        patches=_let_go_as_configured,
    ),
    Bug(
        name="size-not-measured",
        what="what is decided is not measured, so grants and commits become larger than topics take",
        within=40,
        patches=lambda: patch.object(DecisionBuilder, "_measured", _unmeasured),
    ),
    Bug(
        name="plain-grants-not-measured",
        what="plain grants are taken for small, whatever their devices say of themselves",
        within=100,
        patches=lambda: patch.object(fast_path, "REQUEST_BYTES", -math.inf),
    ),
    Bug(
        name="lost-input-from-the-end",
        what="where the position in the input is out of range, it goes on at the input's end",
        within=60,
        patches=_on_from_the_end,
    ),
    Bug(
        name="lost-input-in-silence",
        what="registrations that were lost are passed over without a word",
        within=60,
        patches=lambda: patch.object(InputLoss, "accept", lambda self, _: self.liveness.renew_all()),
    ),
    Bug(
        name="nobodys-passed-over",
        what="a sweeper's position passes over what it has still to answer",
        within=40,
        patches=lambda: patch.object(PartitionSweeper, "_next", lambda *given: given[-1]),
    ),
    Bug(
        name="swept-by-an-old-roll",
        what="a sweeper reads once who has a manager",
        within=60,
        patches=_rolls_once,
    ),
    Bug(
        name="swept-without-a-claim",
        what="a sweeper does not say what it is about to answer before it does",
        within=400,
        patches=lambda: patch.object(PartitionSweeper, "_answer", _answer_at_once),
    ),
    Bug(
        name="any-ledger",
        what="a ledger that was deleted and made anew is taken for the one of before",
        within=100,
        bus=_AnyLedger,
        patches=lambda: patch.object(remaking, "SHARE", 1.0),
    ),
    Bug(
        name="any-input",
        what="registrations that were made anew are read on from where the others ended",
        within=100,
        bus=_AnyInput,
        patches=lambda: patch.object(remaking, "SHARE", 1.0),
    ),
)
"""All of them."""
