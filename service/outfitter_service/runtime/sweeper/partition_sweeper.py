"""Sweeps one partition: each unroutable registration becomes one dead letter, which says what to do.

Dead letters and the swept position are one transaction under the sweeper's own writer identity. So a replaced sweeper
writes nothing more, and its successor repeats nothing. The sweeper answers no registration and knows no rules; the
ledger says which hosts have a manager (host_registry.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import anyio
import structlog
from msgspec import Struct

from outfitter_proto.bus import (
    Bus,
    BusConfigurationError,
    BusError,
    Entry,
    FencedError,
    Message,
    OffsetOutOfRangeError,
    Reader,
    TooLargeError,
    Writer,
)
from outfitter_proto.codec import WireError, decode_registration, encode
from outfitter_proto.keys import sweeper_writer
from outfitter_proto.names import Topics, transactional_id
from outfitter_proto.records import DeadLetter, NobodysCode, Register
from outfitter_proto.support.backoff import Backoff
from outfitter_proto.topics import with_remedy
from outfitter_service.runtime.changelog.encoding import dead_letter, letter_entries
from outfitter_service.runtime.changelog.restore import LedgerRefusedError
from outfitter_service.runtime.changelog.topic_layout import CHECK_S
from outfitter_service.runtime.dead_letter_quota import DeadLetterQuota, Omitted, Payer
from outfitter_service.runtime.identity import Identity
from outfitter_service.runtime.input.scope import Unroutable, unroutable
from outfitter_service.runtime.instruments import Instruments
from outfitter_service.runtime.sweeper.held_messages import HeldMessage, HeldMessages
from outfitter_service.runtime.sweeper.host_registry import HostRegistry, HostStatus
from outfitter_service.runtime.sweeper.sweep_progress import SweepProgress

log = structlog.get_logger("outfitter.sweeper")

GRACE_S = 5.0
"""Seconds that a message of a host without a manager waits: its manager may be starting."""
SLICE, PACE_S = 500, 0.1
"""Registrations in one read, and the seconds between two reads. Most registrations are only skipped. So the sweeper
reads a flood at 5,000 a second, and does not delay the manager's own work."""
LISTEN_S = 5.0
"""Seconds for which one read waits for messages."""
FIRST_DELAY_S, LONGEST_DELAY_S = 0.5, 30.0
"""Seconds between attempts to take the partition."""
FENCED_S = 60.0
"""Seconds for which a sweeper that was fenced leaves the partition to the other one."""
REFUSED_S = 300.0
"""Seconds until a sweeper whose checkpoint cannot be used tries again: somebody may have repaired it."""
NO_SUMMARIES: Mapping[Payer, Omitted] = {}
_LOGGED = 20
"""Most dead letters of one commit that get a log line each."""
_NAMED = 10
"""Most hosts that a dead letter names."""


class SweepContext(Struct, frozen=True, kw_only=True):
    """What a partition's sweeper works with: one `partition` of `partitions`. `identity`: the manager that sweeps.
    `grace_s`: seconds that a message of a host without a manager waits for one."""

    bus: Bus
    topics: Topics
    partition: int
    partitions: int
    identity: Identity
    instruments: Instruments
    grace_s: float = GRACE_S


def _needs_answer(message: Message) -> bool:
    """Whether a message needs an answer. Heartbeats and deregistrations for a host without a manager need none, and may
    be many."""
    try:
        return isinstance(decode_registration(message.value, key=message.key, exact=False), Register)
    except WireError:
        return True


class PartitionSweeper:
    """Sweeps one partition while `run` runs."""

    def __init__(
        self,
        context: SweepContext,
        *,
        served: Callable[[], Iterable[str]],
    ) -> None:
        """`served`: returns the hosts with a manager, which a dead letter names."""
        self._context = context
        self._activity = f"sweeping partition {context.partition}"
        self._served = served
        self._held = HeldMessages()
        self._progress = SweepProgress(context.identity, context.partition, context.instruments.clock)
        self._dead_letter_quota = DeadLetterQuota(context.instruments.clock.monotonic)
        self._checked_at = 0.0
        self._is_refused = False
        """Dead letters were refused for their size, and none was written since."""
        self.host_registry: HostRegistry | None = None
        self.cannot_sweep = False
        """The sweeper's checkpoint cannot be used, so nothing is swept."""

    async def run(self) -> None:
        """Sweep until cancelled, through outages of the bus and while the checkpoint cannot be used."""
        try:
            await self._run()
        finally:
            self._context.instruments.outage.drop(self._activity)

    async def _run(self) -> None:
        backoff = Backoff(FIRST_DELAY_S, LONGEST_DELAY_S)
        partition = self._context.partition
        while True:
            begun = self._context.instruments.clock.monotonic()
            try:
                await self._sweep_tenure()
            except LedgerRefusedError as error:
                self._context.instruments.outage.passed(self._activity)
                if not self.cannot_sweep:
                    log.error("a partition cannot be swept", partition=partition, error=str(error), again_s=REFUSED_S)
                self.cannot_sweep = True
                await anyio.sleep(REFUSED_S)
            except FencedError:
                self._context.instruments.outage.passed(self._activity)
                log.debug("another manager sweeps", partition=partition, again_s=FENCED_S)
                await anyio.sleep(FENCED_S)
            except TooLargeError as error:
                self._is_refused = True
                self._context.instruments.outage.met(self._activity, with_remedy(self._context.bus, error))
            except BusError as error:
                self._context.instruments.outage.met(self._activity, error)
            await anyio.sleep(backoff.next_delay(lasted=self._context.instruments.clock.monotonic() - begun))

    # --- taking the partition ------------------------------------------------------------------------------

    async def _sweep_tenure(self) -> None:
        """Take the partition and sweep it until the writer must be opened again.

        Raises:
            LedgerRefusedError: the sweeper's checkpoint cannot be used.
            BusError: the bus did not answer, or another sweeper has taken the partition.
        """
        context = self._context
        identity = transactional_id(context.identity.cluster, sweeper_writer(context.partition))
        topics = context.topics.written(history=False)
        async with await context.bus.open_writer(identity, context.partition, topics=topics) as writer:
            ledger_id = (await context.bus.topic(context.topics.allocations)).id  # before it is read
            input_id = await self._check_input_topic("")
            host_registry = self.host_registry = HostRegistry(
                context.bus,
                context.topics.allocations,
                context.partition,
                input_id=input_id,
                clock=context.instruments.clock,
            )
            await host_registry.catch_up()
            self.cannot_sweep = False
            self._held.clear()
            start = self._progress.begin(host_registry.checkpoint, input_id, ledger_id)
            async with await context.bus.open_reader(
                context.topics.registrations, context.partition, start=start, committed=False
            ) as reader:
                self._progress.read_from(reader.position)
                if not self._is_refused:
                    context.instruments.outage.passed(self._activity)
                log.debug("sweeping", partition=context.partition, position=reader.position)
                while not writer.must_reopen:
                    if context.instruments.clock.monotonic() - self._checked_at > CHECK_S:
                        await self._check_input_topic(input_id)
                    await self._read(reader)
                    await self._answer(writer, host_registry, reader.position)

    async def _check_input_topic(self, known_id: str) -> str:
        """The id of the registrations topic. `known_id`: its id at the last check, empty before the first one.

        The id must not have changed: the sweeper would skip the beginning of a new topic. The number of partitions must
        not have changed: hosts would have other partitions.

        Raises:
            BusConfigurationError: one of them has changed.
        """
        context = self._context
        layout = (await context.bus.layouts([context.topics.registrations])).get(context.topics.registrations)
        if layout is None or layout.partitions != context.partitions or known_id not in ("", layout.id):
            raise BusConfigurationError("the registrations topic was recreated, or has another number of partitions")
        self._checked_at = context.instruments.clock.monotonic()
        return layout.id

    # --- reading -------------------------------------------------------------------------------------------

    async def _read(self, reader: Reader) -> None:
        await anyio.sleep(PACE_S)
        now = self._context.instruments.clock.monotonic()
        first = self._held.first
        wait = min(max(first.due - now, 0.0), LISTEN_S) if first is not None else LISTEN_S
        if self._held.full:
            await anyio.sleep(min(wait, PACE_S))
            return
        try:
            messages = await reader.fetch(max_records=SLICE, timeout=wait)
        except OffsetOutOfRangeError as error:
            log.warning("registrations were deleted before they were swept", wanted=reader.position, start=error.start)
            await reader.seek(error.start)
            self._held.clear()
            self._progress.skip_to(error.start)
            return
        due = self._context.instruments.clock.monotonic() + self._context.grace_s
        served_keys: set[bytes | None] = set()  # from here on nothing is awaited, and the hosts' states do not change
        for message in messages:
            if message.key not in served_keys and self._hold_if_unserved(message, due) is HostStatus.SERVED:
                served_keys.add(message.key)

    def _hold_if_unserved(self, message: Message, due: float) -> HostStatus:
        """Hold a message until `due`, unless its host certainly has a manager or it needs no answer. Returns the state
        of its host."""
        key = message.key
        why = unroutable(message, self._context.partitions)
        host = key.decode() if why is None and key is not None else ""
        status = HostStatus.UNKNOWN
        if why is None and self.host_registry is not None:
            status = self.host_registry.status(host, message.offset)
        if status is not HostStatus.SERVED and (why is not None or _needs_answer(message)):
            self._held.put(HeldMessage(message=message, due=due, host=host, why=why))
        return status

    # --- answering -----------------------------------------------------------------------------------------

    async def _answer(self, writer: Writer, host_registry: HostRegistry, read_to: int) -> None:
        """Write the dead letters of the messages that are due, in order."""
        held, progress, now = self._held, self._progress, self._context.instruments.clock.monotonic
        if held.first is not None and held.first.why is None and held.first.due <= now():
            await host_registry.catch_up()
            held.drop_served(host_registry)
        letters = held.due(host_registry, now())
        end = letters[-1].message.offset + 1 if letters else 0
        if end > progress.claimed and any(each.why is None for each in letters):
            await self._check_input_topic(progress.input_id)
            progress.claim(end)
            await self._commit(writer, [], progress.position)
            if writer.must_reopen:
                return  # a late copy of the claim's requests could end the next transaction too early
            await host_registry.catch_up()
            held.drop_served(host_registry)
            letters = [each for each in held.due(host_registry, now()) if each.message.offset < end]
        summed = self._dead_letter_quota.due()
        if letters or summed or progress.is_due(held.position_after(0, read_to)):
            await self._check_input_topic(progress.input_id)
            await self._commit(writer, letters, held.position_after(len(letters), read_to), summed)

    async def _commit(
        self, writer: Writer, letters: list[HeldMessage], position: int, summed: Mapping[Payer, Omitted] = NO_SUMMARIES
    ) -> None:
        """Commit the dead letters of these messages, and the position after them. Each code has a quota per minute;
        `summed`: the messages that exceeded it in the last minute."""
        context = self._context
        reasons = {id(held): self._reason(held) for held in letters}
        now = context.instruments.clock.utc()
        written: list[DeadLetter] = []
        used: Counter[Payer] = Counter()
        omitted: dict[Payer, Omitted] = {}
        for held in letters:
            why = reasons[id(held)]
            writer_name = sweeper_writer(context.partition)
            letter = dead_letter(held.message, why.reason, None, writer=writer_name, at=now, code=why.code)
            if self._dead_letter_quota.use(why.code):
                used[why.code] += 1
                written.append(letter)
            elif why.code in omitted:
                omitted[why.code] = omitted[why.code].with_one(held.message.offset)
            else:
                omitted[why.code] = Omitted(first=letter, until=held.message.offset + 1)
        written += [each.summary() for each in summed.values()]
        checkpoint = self._progress.checkpoint(position)
        ledger = context.topics.allocations, [Entry(checkpoint.key.encode(), encode(checkpoint))]
        try:
            await writer.commit([(context.topics.dead_letters, letter_entries(written)), ledger])
        except BaseException:
            self._dead_letter_quota.refund(used)
            self._omit(summed)
            raise
        if written:
            self._is_refused = False
            context.instruments.outage.passed(self._activity)
        self._omit(omitted)
        self._progress.committed(checkpoint)
        self._held.remove(len(letters))
        self._report([reasons[id(held)] for held in letters], letters, sum(each.count for each in omitted.values()))

    def _omit(self, omitted: Mapping[Payer, Omitted]) -> None:
        for payer, messages in omitted.items():
            self._dead_letter_quota.omit(payer, messages)

    def _reason(self, held: HeldMessage) -> Unroutable:
        if held.why is not None:
            return held.why
        served = sorted(self._served())
        more = f" and {len(served) - _NAMED} more" if len(served) > _NAMED else ""
        return Unroutable(
            NobodysCode.NO_MANAGER,
            f"no manager serves host {held.host!r}; hosts served: {', '.join(served[:_NAMED]) or 'none'}{more}. "
            f"Start one with `outfitter serve --host {held.host}`, and register again",
        )

    def _report(self, reasons: list[Unroutable], letters: list[HeldMessage], omitted: int) -> None:
        for code, count in Counter(why.code for why in reasons).items():
            self._context.instruments.metrics.swept.labels(code).inc(count)
        self._context.instruments.metrics.dead_letters.inc(len(letters))
        self._context.instruments.metrics.dead_letters_omitted.inc(omitted)
        for why, held in list(zip(reasons, letters, strict=True))[:_LOGGED]:
            message = held.message
            log.warning(
                "dead letter: unroutable message",
                source=f"{message.topic}/{message.partition}/{message.offset}",
                reason=why.reason,
            )
        if len(letters) > _LOGGED:
            log.warning("dead letters: unroutable messages", more=len(letters) - _LOGGED)
