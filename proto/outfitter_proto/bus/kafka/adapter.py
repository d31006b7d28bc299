"""`KafkaBus`: the port on Kafka, made of the other modules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import anyio
from aiokafka.protocol.admin import CreateTopicsRequest, DescribeConfigsRequest

from outfitter_proto.bus.kafka import authorization, obstacles
from outfitter_proto.bus.kafka.connecting.cluster import EARLIEST, LATEST, REQUEST_TIMEOUT, Cluster
from outfitter_proto.bus.kafka.connecting.connection import Connector
from outfitter_proto.bus.kafka.connecting.login import login_of
from outfitter_proto.bus.kafka.connecting.protocol import (
    OK,
    TOPIC_AUTHORIZATION_FAILED,
    TOPIC_EXISTS,
    MetadataRequest,
    refusal,
)
from outfitter_proto.bus.kafka.membership import KafkaMembership
from outfitter_proto.bus.kafka.reading.answer_allowance import Allowance
from outfitter_proto.bus.kafka.reading.reader import KafkaReader
from outfitter_proto.bus.kafka.writing import open_transactions
from outfitter_proto.bus.kafka.writing.open_transactions import LastTransaction
from outfitter_proto.bus.kafka.writing.publisher import BatchingPublisher
from outfitter_proto.bus.kafka.writing.transactions import TransactionalId
from outfitter_proto.bus.kafka.writing.writer import KafkaWriter
from outfitter_proto.bus.patience import Patience
from outfitter_proto.bus.port import (
    Bus,
    BusUnavailableError,
    Entry,
    Membership,
    Obstacle,
    Reader,
    Right,
    TopicInfo,
    TopicLayout,
    TopicSpec,
    UnknownTopicError,
    Writer,
)
from outfitter_proto.support.backoff import Backoff

WATCHDOG = REQUEST_TIMEOUT + 1.0
"""Time limit of one step of a commit in seconds."""
TAKE_WITHIN = 3 * REQUEST_TIMEOUT
"""Time limit for taking a writer identity in seconds; the caller retries with a back-off."""
RESEND_PAUSE_S = 0.1
"""Seconds until a request without an answer is sent again."""
TRANSACTION_TIMEOUT = 5.0
"""Seconds after which a broker aborts the transaction of a silent writer. Until then it hides later commits of other
writers in the same partition."""
DECIDED_WITHIN = 60.0
"""Seconds for which a partition's end may stay undecided. A coordinator checks for expired transactions every 10 s,
and in Kafka 3.9 it may be blocked for 30 s after a fault."""

_TOPIC = 2  # the type of resource in requests about configurations
_STABLE_POLL_S = 0.005, 0.1


class KafkaBus(Bus):
    """See `Bus`. `url` is `kafka://host:9092[,host2:9092…]`. Log-in settings come from `login` and the environment (see
    the module `login`). `client`: the client id of all connections but those of writers and members.
    `transaction_timeout` is in seconds."""

    def __init__(
        self,
        url: str,
        *,
        login: Mapping[str, str] | None = None,
        client: str = "outfitter",
        transaction_timeout: float = TRANSACTION_TIMEOUT,
    ) -> None:
        self.url = url
        self._login = login_of(url, login)
        self._connector = Connector(self._login, client)
        self._transaction_timeout = transaction_timeout
        self._cluster = Cluster(self._connector)
        self._publishers: dict[tuple[str, int], BatchingPublisher] = {}
        self._last: dict[str, LastTransaction] = {}
        self._allowances: defaultdict[int, Allowance] = defaultdict(Allowance)
        """The allowance of each partition: readers of all records read its input, writers write the answers to it."""

    async def missing_rights(self, rights: Sequence[Right]) -> list[str]:
        """See `Bus.missing_rights`."""
        return authorization.sentences(self._login, await authorization.missing(self._cluster, rights))

    @property
    def refusals(self) -> int:
        """See `Bus.refusals`."""
        return self._connector.refusals

    @property
    def patience(self) -> Patience:
        """See `Bus.patience`."""
        return self._connector.patience

    async def start(self) -> None:
        """Connect, and log in if configured."""
        await self._cluster.send(None, MetadataRequest([]))

    async def aclose(self) -> None:
        """Close the bus's own connections. The holders of readers and writers close those."""
        with anyio.CancelScope(shield=True):
            for publisher in self._publishers.values():
                await publisher.aclose()
            self._publishers.clear()
            await self._cluster.aclose()

    async def topic(self, name: str) -> TopicInfo:
        """Describe a topic. Without the right DescribeConfigs on it, `config` is empty."""
        metadata = await self._cluster.topic(name, fresh=True)
        response = await self._cluster.send(None, DescribeConfigsRequest([(_TOPIC, name, None)]))
        [(code, detail, _, _, entries)] = response.resources
        if code not in (OK, TOPIC_AUTHORIZATION_FAILED):
            raise refusal(self._login, code, topic=name, operation="DescribeConfigs", detail=detail)
        config = {setting: value for setting, value, *_ in entries or () if value is not None}
        return TopicInfo(name, metadata.id, len(metadata.leaders), metadata.replication, config)

    async def layouts(self, names: Collection[str]) -> dict[str, TopicLayout]:
        """See `Bus.layouts`: one request."""
        return {topic.name: TopicLayout(topic.id, len(topic.leaders)) for topic in await self._cluster.topics(names)}

    async def brokers(self) -> int:
        """The number of brokers in the metadata, which lists living brokers only."""
        return len((await self._cluster.send(None, MetadataRequest([]))).brokers)

    async def create_topics(self, specs: Sequence[TopicSpec]) -> list[str]:
        """Create the missing topics, and wait until each has leaders.

        It may take seconds. Without an answer the bus sends the request again for a while, which does no harm. A topic
        that exists after an attempt without an answer counts as created.
        """
        missing = [spec for spec in specs if not await self._exists(spec.name)]
        if not missing:
            return []
        new_topics: list[tuple[Any, ...]] = [
            (s.name, s.partitions, s.replication or -1, [], list(s.config.items())) for s in missing
        ]
        request = CreateTopicsRequest(new_topics, int(REQUEST_TIMEOUT * 1000), False)
        response, repeated = await self._send_until_answered(request)
        created: list[str] = []
        for name, code, *detail in response.topic_errors:
            if code not in (OK, TOPIC_EXISTS):
                raise refusal(self._login, code, topic=name, operation="Create", detail=detail[0] if detail else None)
            if code == OK or repeated:
                created.append(name)
        for name in created:
            await self._wait_for_leaders(name)
        return created

    async def obstacles(self, *, writer: str, sessions: Mapping[str, float]) -> list[Obstacle]:
        """See `Bus.obstacles`."""
        return await obstacles.find(self._cluster, writer, sessions, transaction_s=self._transaction_timeout)

    async def clamps_acknowledgements(self) -> bool:
        """See `Bus.clamps_acknowledgements`."""
        return await obstacles.clamps(self._cluster)

    async def publish(self, topic: str, partition: int, entry: Entry) -> int:
        """Write one record outside any transaction."""
        publisher = self._publishers.get((topic, partition))
        if publisher is None:
            publisher = self._publishers[topic, partition] = BatchingPublisher(self._cluster, topic, partition)
        return await publisher.publish(entry)

    async def offsets(self, topic: str, partition: int) -> tuple[int, int]:
        """The first offset and the high watermark of the newest leader."""
        await self._cluster.ask_majority(topic)
        first = await self._cluster.offset(topic, partition, EARLIEST)
        return first, await self._cluster.offset(topic, partition, LATEST)

    async def offset_at(self, topic: str, partition: int, moment_ms: int) -> int:
        """See `Bus.offset_at`. The end is asked for first, so that a record that comes meanwhile is not left out."""
        end = await self._cluster.offset(topic, partition, LATEST)
        found = await self._cluster.offset(topic, partition, max(0, moment_ms))
        return end if found < 0 else found

    async def open_reader(
        self, topic: str, partition: int, *, start: int | None, committed: bool, lenient: bool = False
    ) -> Reader:
        """A reader with connections of its own."""
        if start is None:
            start = await self._cluster.offset(topic, partition, EARLIEST)
        else:
            await self._check_partition(topic, partition)
        allowance = None if committed else self._allowances[partition]
        return KafkaReader(
            Cluster(self._connector), topic, partition, start,
            committed=committed, lenient=lenient or not committed, allowance=allowance,
        )  # fmt: skip

    async def open_writer(self, identity: str, partition: int, *, topics: Collection[str] = ()) -> Writer:
        """Take a transactional id; see `TransactionalId.take`.

        Raises:
            BusUnavailableError: the identity was not taken within `TAKE_WITHIN`; try again after a pause.
            BusConfigurationError: a right is missing.
        """
        held = TransactionalId(
            self._connector,
            identity,
            partition,
            timeout_s=self._transaction_timeout,
            last=self._last.get(identity),
        )
        taken = False
        try:
            with held.patience.limit(TAKE_WITHIN):
                await held.take(await authorization.writable(self._cluster, topics, partition) if topics else [])
            taken = True
        except TimeoutError as error:
            why = f": {held.trouble}" if held.trouble is not None else ""
            raise BusUnavailableError(
                f"{self.url}: could not take {identity!r} within {TAKE_WITHIN:g} s{why}"
            ) from error
        finally:
            self._remember(identity, held.last)
            if not taken:
                await held.aclose()
        name = f"{self.url}: writer {identity!r}"
        return KafkaWriter(name, partition, held, allowance=self._allowances[partition], watchdog=WATCHDOG)

    async def tenure(self, identity: str) -> str | None:
        """The transactional id's producer id and epoch, from its coordinator. Whoever takes the id, and a transaction
        that expires, raise the epoch, and so does each commit of version 2, whose writer then knows the new one."""
        holder = await open_transactions.holder(self._cluster, identity)
        return f"{holder[0]}/{holder[1]}" if holder is not None else None

    async def has_committed(self, identity: str) -> bool:
        """See `Bus.has_committed`. A coordinator knows only the last transaction, until a producer takes the id again
        or the id is silent for `transactional.id.expiration.ms` (7 d)."""
        backoff = Backoff(*_STABLE_POLL_S)
        with suppress(TimeoutError), self.patience.limit(DECIDED_WITHIN):
            while True:
                last = await open_transactions.last(self._cluster, identity)
                if last is None or not last.is_committing:
                    return last is not None and last.committed
                await anyio.sleep(backoff.next_delay())
        raise BusUnavailableError(f"{self.url}: the commit of {identity!r} is not complete after {DECIDED_WITHIN:g} s")

    def _remember(self, identity: str, last: LastTransaction | None) -> None:
        """Remember a last transaction that is not finished, because its coordinator forgets the result."""
        if last is None:
            self._last.pop(identity, None)
        else:
            self._last[identity] = last

    async def join(
        self, group: str, topic: str, *, replica: str | None, session_timeout: float, heartbeat_interval: float
    ) -> Membership:
        """Join a consumer group. The broker's settings limit the session time-out (default: 6 s to 30 min)."""
        await self._cluster.topic(topic, fresh=True)  # raises an error that explains an unusable broker or topic
        membership = KafkaMembership(self._connector, group)
        try:
            await membership.start(
                topic, replica=replica, session_timeout=session_timeout, heartbeat_interval=heartbeat_interval
            )
        except BaseException:
            await membership.aclose()
            raise
        return membership

    async def stable_end(self, topic: str, partition: int, *, taking: str | None = None) -> int:
        """Wait until the last stable offset reaches the current high watermark of the newest leader. The open
        transaction of `taking` is recognised by its producer id."""
        await self._cluster.ask_majority(topic)
        end = await self._cluster.offset(topic, partition, LATEST)
        backoff, suspicion = Backoff(*_STABLE_POLL_S), open_transactions.Suspicion(self._cluster, topic, partition)
        with suppress(TimeoutError), self.patience.limit(DECIDED_WITHIN):
            while (stable := await self._cluster.offset(topic, partition, LATEST, committed=True)) < end:
                if taking is not None and await open_transactions.belongs_to(self._cluster, taking, topic, partition):
                    return stable
                if taking is None and await suspicion.is_overdue():
                    break
                await anyio.sleep(backoff.next_delay())
            else:
                return end
        why = await open_transactions.sentence(self._cluster, topic, partition)
        raise BusUnavailableError(f"{self.url}: the end of {topic}/{partition} stays undecided: {why}")

    async def open_transaction(self, topic: str, partition: int) -> str | None:
        """See `Bus.open_transaction`."""
        end = await self._cluster.offset(topic, partition, LATEST)
        if await self._cluster.offset(topic, partition, LATEST, committed=True) >= end:
            return None
        return await open_transactions.sentence(self._cluster, topic, partition)

    async def _send_until_answered(self, request: Any) -> tuple[Any, bool]:
        """Send a repeatable request to any broker, again until `TAKE_WITHIN` if there is no answer. Returns the answer,
        and whether the request was sent more than once."""
        deadline = self.patience.now() + TAKE_WITHIN
        repeated = False
        while True:
            try:
                return await self._cluster.send(None, request), repeated
            except BusUnavailableError:
                if self.patience.now() > deadline:
                    raise
                repeated = True
                await anyio.sleep(RESEND_PAUSE_S)

    async def _exists(self, topic: str) -> bool:
        try:
            await self._cluster.topic(topic, fresh=True)
        except UnknownTopicError:
            return False
        return True

    async def _check_partition(self, topic: str, partition: int) -> None:
        await self._cluster.leader(topic, partition)

    async def _wait_for_leaders(self, topic: str, partitions: int = 1) -> None:
        with suppress(TimeoutError), self.patience.limit(TAKE_WITHIN):
            while True:
                if await self._exists(topic):
                    leaders = (await self._cluster.topic(topic)).leaders
                    if len(leaders) >= partitions and all(leaders.values()):
                        return
                await anyio.sleep(0.02)
        raise BusUnavailableError(f"{self.url}: topic {topic!r} was created and has no leaders yet")
