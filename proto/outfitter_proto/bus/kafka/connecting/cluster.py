"""One client's view of the brokers: connections, partition leaders, requests and answers.

`REQUEST_TIMEOUT` limits each request. It is repeated only if that does no harm. It ends in an answer or in a
`BusError` with the address and the reason. Nothing runs in the background.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import anyio
from aiokafka.protocol.offset import OffsetRequest

from outfitter_proto.bus.addresses import Node
from outfitter_proto.bus.kafka.connecting import diagnosis
from outfitter_proto.bus.kafka.connecting.answers import row_of
from outfitter_proto.bus.kafka.connecting.connection import Connection, Connector, NobodyError
from outfitter_proto.bus.kafka.connecting.protocol import (
    MOVED,
    OK,
    TOPIC_AUTHORIZATION_FAILED,
    UNKNOWN_TOPIC,
    MetadataRequest,
    error_name,
    refusal,
)
from outfitter_proto.bus.patience import Patience
from outfitter_proto.bus.port import BusConfigurationError, BusError, BusUnavailableError, UnknownTopicError
from outfitter_proto.support.backoff import Backoff

REQUEST_TIMEOUT = 3.0
"""Time limit in seconds, of one request and of one connection attempt."""
ANSWER_WITHIN = 2 * REQUEST_TIMEOUT
"""Seconds for which a request is repeated after the leader has moved or a connection broke."""
EARLIEST, LATEST = -2, -1
MOST_ASKED = 5
"""Most brokers of a majority vote. We do not trust a single broker, because it may be behind."""

_BACKOFF_S = 0.02, 0.5


class TopicMetadata(NamedTuple):
    """A topic's metadata."""

    name: str
    id: str
    leaders: Mapping[int, Node | None]
    """The leader of each partition. None: it has no leader now."""
    replication: int
    """The number of copies of each partition."""


class UnansweredError(BusUnavailableError):
    """No answer to a request that was sent. The broker may have executed it, or may still do so."""


class Cluster:
    """A client's own connections to the brokers behind one URL."""

    def __init__(self, connector: Connector, client: str | None = None, patience: Patience | None = None) -> None:
        """`client`: the client id; None: the bus's. `patience`: the clock of a client with several of these."""
        self.login = connector.login
        self.url = connector.login.url
        self.patience = patience or Patience(connector.patience)
        self._connector = connector
        self._client = client
        self._connections: dict[Node, Connection] = {}
        self._retired: set[Connection] = set()
        self._connecting: dict[Node, anyio.Lock] = {}
        self._topics: dict[str, TopicMetadata] = {}

    async def send(self, node: Node | None, request: Any) -> Any:
        """Send one request to `node` (None: any broker), once.

        Raises:
            UnansweredError: no answer, with the address and the reason.
            BusUnavailableError: nothing was sent, with the address and the reason.
            BusAuthenticationError: one side failed to authenticate.
            BusConfigurationError: the broker is too old, or a file with a secret cannot be read.
        """
        connection, where = await self._connection(node)
        return await self._ask(connection, where, request)

    async def _ask(self, connection: Connection, where: Node, request: Any) -> Any:
        try:
            return await connection.send(request)
        except diagnosis.FAILURES as error:
            why = diagnosis.unavailable(self.login, where, error, timeout=REQUEST_TIMEOUT)
            if isinstance(error, diagnosis.UNKNOWN_THERE):
                raise why from error
            self._drop(connection)
            raise UnansweredError(str(why)) from error

    async def topic(self, name: str, *, fresh: bool = False) -> TopicMetadata:
        """A topic's metadata, cached until a request proves them outdated."""
        if not fresh and name in self._topics:
            return self._topics[name]
        connection, where = await self._connection(None)
        return self._learn(name, where, await self._ask(connection, where, MetadataRequest([name])))

    async def topics(self, names: Collection[str]) -> list[TopicMetadata]:
        """The current metadata of those topics that exist and that we may describe."""
        connection, where = await self._connection(None)
        response = await self._ask(connection, where, MetadataRequest(list(names)))
        hidden = (UNKNOWN_TOPIC, TOPIC_AUTHORIZATION_FAILED)
        described = {name for code, name, *_ in response.topics if code not in hidden}
        return [self._learn(name, where, response) for name in names if name in described]

    async def ask_majority(self, name: str) -> None:
        """Ask a majority of the brokers (of `MOST_ASKED` at most) for the topic's leaders, because one broker may be
        behind. `topic` then returns the newest answer.

        Raises:
            BusError: no broker answered.
        """
        directory = self._connector.directory
        if len(directory.brokers()) <= 1:
            await self.topic(name, fresh=True)  # also learns the other brokers
        nodes = directory.brokers()[:MOST_ASKED]
        if len(nodes) > 1 and not await self._vote(name, nodes):
            await self.topic(name, fresh=True)  # from whoever answers: all may have new addresses

    async def _vote(self, name: str, nodes: Sequence[Node]) -> int:
        """Ask these brokers for the topic's leaders, until a majority has answered. Returns how many have."""
        answers = 0

        async def ask(node: Node) -> None:
            nonlocal answers
            try:
                connection = await self._connect(node)
                self._learn(name, node, await self._ask(connection, node, MetadataRequest([name])))
            except BusError:
                return
            answers += 1
            if answers > len(nodes) // 2:
                tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            for node in nodes:
                tasks.start_soon(ask, node)
        return answers

    def _learn(self, name: str, where: Node, response: Any) -> TopicMetadata:
        """The topic in a metadata answer, without leaders that have a known successor."""
        directory = self._connector.directory
        brokers = {node_id: Node(host, port) for node_id, host, port, *_ in response.brokers}
        directory.learn(brokers)
        for code, topic, topic_id, _, partitions, *_ in response.topics:
            if topic != name:
                continue
            if code == UNKNOWN_TOPIC:
                break
            if code not in (OK, 5):  # 5: some partition has no leader now
                raise refusal(self.login, code, topic=name)
            text = base64.urlsafe_b64encode(topic_id).decode().rstrip("=")  # as Kafka's own tools print it
            cached = self._topics.get(name)
            leaders = dict(cached.leaders) if cached is not None and cached.id == text else {}
            for _error, number, leader, epoch, *_rest in partitions:
                if directory.note_epoch(text, number, epoch):
                    leaders[number] = brokers.get(leader)
                else:
                    leaders.setdefault(number, None)
                    directory.doubt(where)
            replication = min((len(replicas) for *_, replicas, _, _, _ in partitions), default=0)
            self._topics[name] = TopicMetadata(name, text, leaders, replication)
            return self._topics[name]
        self._topics.pop(name, None)
        raise UnknownTopicError(f"{self.url}: there is no topic {name!r}; make it with `outfitter topics create`")

    async def ask_leader(self, topic: str, partition: int, request: Any, *, repeatable: bool = True) -> Any:
        """Ask the partition's leader, and again if it has moved. Returns the partition's row of the answer; its second
        field is an error code, any but those. None: a fetch was throttled; the next one waits as long as it must.

        `repeatable` False: do not repeat a request that was under way when its connection broke.
        """
        backoff = Backoff(*_BACKOFF_S)
        deadline = self.patience.now() + ANSWER_WITHIN
        while True:
            failure: BusUnavailableError
            leader: Node | None = None
            try:
                leader = await self.leader(topic, partition)
            except BusUnavailableError as error:
                failure = error
            else:
                failure = BusUnavailableError(f"{self.url}: {topic}/{partition} has no leader now")
            if leader is not None:
                try:
                    row = row_of(await self.send(leader, request))
                except BusUnavailableError as error:
                    self._topics.pop(topic, None)
                    if isinstance(error, UnansweredError) and not repeatable:
                        raise
                    failure = error
                else:
                    code = row[1] if row is not None else OK
                    if code not in MOVED:
                        return row
                    failure = BusUnavailableError(f"{self.url}: {topic}/{partition} at {leader}: {error_name(code)}")
            self._topics.pop(topic, None)
            pause = backoff.next_delay()
            if self.patience.now() + pause > deadline:
                raise failure
            await anyio.sleep(pause)

    async def offset(self, topic: str, partition: int, which: int, *, committed: bool = False) -> int:
        """The `EARLIEST` or `LATEST` offset, or that of the first record since a time, in milliseconds since the epoch
        (-1: there is none). With `committed` the latest is the last stable offset."""
        request = OffsetRequest(-1, int(committed), [(topic, [(partition, which)])])
        _, code, _, offset, *_ = await self.ask_leader(topic, partition, request)
        if code != OK:
            raise refusal(self.login, code, topic=topic)
        return int(offset)

    async def aclose(self) -> None:
        """Close the connections. Bounded."""
        closing = [connection.close() for connection in (*self._connections.values(), *self._retired)]
        self._connections.clear()
        self._retired.clear()
        waiting = [future for future in closing if future is not None]
        if waiting:
            with anyio.CancelScope(shield=True):
                await asyncio.wait(waiting, timeout=1)

    def forget(self) -> None:
        """Drop all connections at once, with their open requests."""
        for connection in list(self._connections.values()):
            self._drop(connection)

    async def leader(self, topic: str, partition: int) -> Node | None:
        """The broker that leads a partition, by the cached metadata if the partition is in it. None: nobody does.

        Raises:
            UnknownTopicError: there is no such topic or partition.
        """
        leaders = (await self.topic(topic)).leaders
        if partition not in leaders:  # somebody may have added it since
            leaders = (await self.topic(topic, fresh=True)).leaders
        if partition not in leaders:
            raise UnknownTopicError(
                f"{self.url}: topic {topic!r} has the partitions 0 to {len(leaders) - 1}, not {partition}"
            )
        return leaders[partition]

    async def _connection(self, node: Node | None) -> tuple[Connection, Node]:
        """An open connection and its broker."""
        if node is not None:
            return await self._connect(node), node
        directory = self._connector.directory
        for open_node in sorted(self._connections, key=directory.doubtful):
            if (connection := await self._usable(open_node)) is not None:
                return connection, open_node

        async def connect(candidate: Node) -> tuple[Connection, Node]:
            return await self._connect(candidate, despite_doubt=True), candidate

        try:
            return await self._connector.from_any(connect)
        except NobodyError as nobody:
            errors = nobody.errors
        if len(errors) == 1 or isinstance(errors[0], BusConfigurationError):
            raise errors[0]
        reasons = "; ".join(str(error).removeprefix(f"{self.url}: ") for error in errors)
        raise BusUnavailableError(f"{self.url}: {reasons}") from errors[0]

    async def _connect(self, node: Node, *, despite_doubt: bool = False) -> Connection:
        async with self._connecting.setdefault(node, anyio.Lock()):
            connection = await self._usable(node)
            if connection is None:
                connection = await self._connector.connect(
                    node,
                    timeout=REQUEST_TIMEOUT,
                    client_id=self._client,
                    patience=self.patience,
                    despite_doubt=despite_doubt,
                )
                self._connections[node] = connection
            return connection

    async def _usable(self, node: Node) -> Connection | None:
        """The existing connection. If its log-in is about to end, it still gets answers but no new requests."""
        connection = self._connections.get(node)
        if connection is None or not await connection.works():
            return None
        if not connection.stale:
            return connection
        self._connections.pop(node, None)
        if connection.idle:
            connection.close()
        else:
            self._retired.add(connection)
            asyncio.get_running_loop().call_later(2 * REQUEST_TIMEOUT, self._drop, connection)
        return None

    def _drop(self, connection: Connection) -> None:
        for node, open_connection in list(self._connections.items()):
            if open_connection is connection:
                del self._connections[node]
        self._retired.discard(connection)
        connection.close()
