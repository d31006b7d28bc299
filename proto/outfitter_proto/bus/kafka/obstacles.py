"""What keeps clients from working with brokers that answer: addresses that nobody reaches, settings, no coordinator.

Most of it shows only as silence: aiokafka, as other clients, tries again for ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import anyio
from aiokafka.protocol.admin import DescribeConfigsRequest

from outfitter_proto.bus.addresses import Node
from outfitter_proto.bus.kafka.connecting.cluster import REQUEST_TIMEOUT, Cluster
from outfitter_proto.bus.kafka.connecting.diagnosis import OldBrokerError
from outfitter_proto.bus.kafka.connecting.protocol import (
    COORDINATOR_LOADING,
    COORDINATOR_NOT_AVAILABLE,
    COORDINATORS,
    NOT_COORDINATOR,
    OK,
    FeaturesRequest,
    MetadataRequest,
    coordinator_of,
    error_in_words,
    features,
)
from outfitter_proto.bus.port import BusError, Obstacle
from outfitter_proto.support.backoff import Backoff
from outfitter_proto.support.causes import side_by_side

ADVERTISED = "advertised.listeners"
COORDINATOR_WITHIN = 2 * REQUEST_TIMEOUT
"""Seconds that a coordinator may take. The first question for one makes its topic."""
CLAMPED = "eligible.leader.replicas.version"
"""The feature with which brokers let min.insync.replicas be no higher than the number of copies (KIP-966)."""

_BROKER = 4  # the type of resource in requests about configurations
_NOT_YET = (COORDINATOR_LOADING, COORDINATOR_NOT_AVAILABLE, NOT_COORDINATOR)
_BACKOFF_S = 0.05, 0.5


async def find(cluster: Cluster, writer: str, sessions: Mapping[str, float], *, transaction_s: float) -> list[Obstacle]:
    """The obstacles for a transactional id, and for members of groups with these sessions in seconds.

    Raises:
        BusError: no broker answers.
    """
    brokers = {
        number: Node(host, port) for number, host, port, *_ in (await cluster.send(None, MetadataRequest([]))).brokers
    }
    found = await _unreachable(cluster, brokers)
    if len(found) == len(brokers):
        return found  # nothing else can be asked
    settings = await _settings(cluster, brokers)
    for kind, name in [("transactional-id", writer), *(("group", group) for group in sessions)]:
        found += await _without_coordinator(cluster, kind, name, settings, len(brokers))
    return found + list(_limits(settings, sessions, transaction_s))


async def clamps(cluster: Cluster) -> bool:
    """Whether brokers acknowledge what all copies have, if min.insync.replicas is higher than their number."""
    try:
        return features(await cluster.send(None, FeaturesRequest())).get(CLAMPED, 0) > 0
    except OldBrokerError:  # older than these features
        return False


async def _unreachable(cluster: Cluster, brokers: Mapping[int, Node]) -> list[Obstacle]:
    found: list[Obstacle] = []

    async def ask(node: Node) -> None:
        try:
            await cluster.send(node, MetadataRequest([]))
        except BusError as error:
            why = str(error).removeprefix(f"{cluster.url}: ")
            found.append(
                Obstacle("brokers", ADVERTISED, str(node), "an address that this machine reaches", why, _READVERTISE)
            )

    async with side_by_side() as tasks:
        for node in brokers.values():
            tasks.start_soon(ask, node)
    return sorted(found)


_READVERTISE = (
    "start that broker, or set its advertised.listeners to an address that its clients reach; a name must be known, "
    "and no firewall between"
)


async def _settings(cluster: Cluster, brokers: Mapping[int, Node]) -> Mapping[str, str]:
    """The settings of one broker; none without the right DescribeConfigs on the cluster."""
    for number, node in brokers.items():
        try:
            answer = await cluster.send(node, DescribeConfigsRequest([(_BROKER, str(number), None)]))
        except BusError:
            continue
        for code, *_, entries in answer.resources:
            if code == OK:
                return {name: value for name, value, *_ in entries if value is not None}
    return {}


async def _without_coordinator(
    cluster: Cluster, kind: str, name: str, settings: Mapping[str, str], brokers: int
) -> list[Obstacle]:
    """The reason why nobody coordinates this name, if that is so. A missing right is none."""
    users, factor, others, topic = COORDINATORS[kind]
    code = await _asked_for(cluster, kind, name, patient=int(settings.get(factor, brokers)) <= brokers)
    if code not in _NOT_YET:
        return []
    why = f"{users} have no coordinator (COORDINATOR_NOT_AVAILABLE), so {_CONSEQUENCES[kind]}"
    if int(settings.get(factor, brokers)) > brokers:
        changes = " and ".join((factor, *others))
        remedy = f"set {changes} to {brokers} in the configuration of each broker and restart it, or start more brokers"
        return [Obstacle(kind, factor, settings[factor], f"at most {brokers}, the number of brokers", why, remedy)]
    why = f"{error_in_words(code, 'FindCoordinator', kind=kind, brokers=brokers)}; so {_CONSEQUENCES[kind]}"
    remedy = f"see which brokers are away, and what `kafka-topics --describe --topic {topic}` says"
    return [Obstacle(kind, "coordinator", f"none for {users}", "one of the brokers", why, remedy)]


_CONSEQUENCES = {"transactional-id": "no manager can write", "group": "no manager can join its group"}


async def _asked_for(cluster: Cluster, kind: str, name: str, *, patient: bool) -> int:
    """The code of the answer, after some time if it says that there is none yet."""
    backoff = Backoff(*_BACKOFF_S)
    deadline = cluster.patience.now() + (COORDINATOR_WITHIN if patient else 0.0)
    while True:
        code = int((await cluster.send(None, coordinator_of(kind, name))).error_code)
        if code not in _NOT_YET or cluster.patience.now() >= deadline:
            return code
        await anyio.sleep(backoff.next_delay())


def _limits(settings: Mapping[str, str], sessions: Mapping[str, float], transaction_s: float) -> Iterator[Obstacle]:
    """The limits of the brokers that a manager does not keep."""
    name, needed = "transaction.max.timeout.ms", int(transaction_s * 1000)
    if (have := _number(settings, name)) is not None and have < needed:
        why = f"a manager's transactions may last {transaction_s:g} s, and the brokers refuse such ones"
        yield Obstacle("transactional-id", name, str(have), f"at least {needed}", why, _setting(name, needed))
    for group, session_s in sessions.items():
        asked = int(session_s * 1000)
        why = f"members of group {group} have a session of {session_s:g} s, and the brokers refuse such ones"
        name = "group.min.session.timeout.ms"
        if (have := _number(settings, name)) is not None and have > asked:
            yield Obstacle("group", name, str(have), f"at most {asked}", why, _setting(name, asked))
        name = "group.max.session.timeout.ms"
        if (have := _number(settings, name)) is not None and have < asked:
            yield Obstacle("group", name, str(have), f"at least {asked}", why, _setting(name, asked))


def _number(settings: Mapping[str, str], name: str) -> int | None:
    return int(settings[name]) if name in settings else None


def _setting(name: str, value: int) -> str:
    return f"set {name} to {value} in the configuration of each broker, and restart it"
