"""What holders of the rights that deploy/security.md grants, or of single ones, cannot do with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import pytest
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.record.default_records import DefaultRecordBatchBuilder

from outfitter_proto.bus import Bus, BusAuthorizationError, BusConfigurationError, Entry
from outfitter_proto.bus.kafka import KafkaBus
from outfitter_proto.bus.kafka.writing import open_transactions
from outfitter_proto.names import topics as names_of
from outfitter_service.query import ledger_view
from support.bus.committed import committed
from support.kafka.secure_broker import SecureBroker, right
from support.managers.granted import (
    MANAGER,
    acls,
    asked,
    everything,
    user,
)
from support.managers.secured import HOST, WITHIN, client, managing

pytestmark = pytest.mark.kafka


async def test_whose_transaction_is_open_is_not_told_to_who_may_not_read_and_that_is_said(
    secure_broker: SecureBroker, cluster: str
) -> None:
    name, topic = user(), names_of(cluster).allocations
    secure_broker.allow(right(f"User:{name}", "Describe", "topic", topic))
    async with client(secure_broker, secure_broker.oauth(name)) as bus:
        assert isinstance(bus, KafkaBus)
        said = await open_transactions.sentence(bus._cluster, topic, 0)
    assert "the broker does not say whose transaction is open there: " in said
    assert f"Read on topic '{topic}' is not granted to User:{name}" in said


async def test_nobodys_wrong_messages_keep_a_manager_from_serving_the_others(
    secure_broker: SecureBroker, cluster: str, tmp_path: Path
) -> None:
    """Another host's name under this host's key, no key, rubbish, packed zeros, and a flood of others' heartbeats."""
    of = names_of(cluster)
    name, worker, eve = user(), user(), user()
    acls(secure_broker, MANAGER, name, cluster)
    for role, who in (("worker", worker), ("operator", worker), ("worker", eve)):
        acls(secure_broker, role, who, cluster)
    login = secure_broker.oauth(name)
    forged = json.dumps({"type": "register", "host": "other", "worker": "w", "incarnation": "1"}).encode()
    other = json.dumps({"type": "heartbeat", "host": "other", "worker": "w", "incarnation": "1"}).encode()
    async with (
        managing(secure_broker.at("sasl"), login, cluster, tmp_path, host=HOST) as manager,
        client(secure_broker, secure_broker.oauth(eve)) as attacker,
        client(secure_broker, secure_broker.oauth(worker)) as bus,
        await asked(bus, cluster) as ours,
    ):
        assert isinstance(attacker, KafkaBus)
        bad: set[int] = set()
        for entry in (
            Entry(HOST.encode(), forged),
            Entry(None, forged),
            Entry(HOST.encode(), b"\xff{"),
            Entry(None, None),
        ):
            bad.add(await attacker.publish(of.registrations, 0, entry))
        packed = await _publish_packed(attacker, of.registrations, bytes(20_000_000))
        bad.add(packed)
        async with anyio.create_task_group() as flood:
            for _ in range(20):
                flood.start_soon(_flood, attacker, of.registrations, Entry(b"other", other))
        with anyio.fail_after(WITHIN):
            assert (await ours.wait()).state == "allocated"
        async with await asked(bus, cluster, "second") as second:
            with anyio.fail_after(WITHIN):
                assert (await second.wait()).state == "allocated"
        assert manager.failure is None
        async with client(secure_broker, secure_broker.administrator(), "open") as looking:
            letters: dict[int, Any] = {}
            with anyio.fail_after(WITHIN):
                while not bad <= set(letters):
                    found = await everything(looking, of.dead_letters)
                    letters = {letter["source"]["offset"]: letter for letter in found}
            assert len(letters) == len(found)
            assert letters[packed]["code"] == "unreadable"
            assert "unpacks to more than" in letters[packed]["reason"]
    async with client(secure_broker, secure_broker.administrator(), "open") as looking:
        workers = {stored.record.worker for stored in (await ledger_view.read(looking, cluster)).allocations}
        assert workers == {"w", "second"}


async def _flood(bus: Bus, topic: str, entry: Entry) -> None:
    for _ in range(50):
        async with anyio.create_task_group() as many:
            for _ in range(10):
                many.start_soon(bus.publish, topic, 0, entry)


async def _publish_packed(bus: KafkaBus, topic: str, value: bytes) -> int:
    """One record in a batch packed with zstd: our own publisher packs nothing."""
    builder = DefaultRecordBatchBuilder(
        magic=2, compression_type=4, is_transactional=0, producer_id=-1, producer_epoch=-1, base_sequence=-1,
        batch_size=2**31 - 1,
    )  # fmt: skip
    builder.append(0, None, b"k", value, [])
    request = ProduceRequest(
        transactional_id=None, required_acks=-1, timeout=10_000, topics=[(topic, [(0, bytes(builder.build()))])]
    )
    _, code, offset, *_ = await bus._cluster.ask_leader(topic, 0, request)
    assert code == 0
    return int(offset)


async def test_a_transactional_id_alone_fences_and_writes_nothing_and_a_topic_alone_forges(
    secure_broker: SecureBroker, cluster: str, tmp_path: Path
) -> None:
    """What the page says that these rights are worth; and that a manager which is fenced so goes on."""
    of = names_of(cluster)
    name, worker, fencer, forger = user(), user(), user(), user()
    acls(secure_broker, MANAGER, name, cluster)
    for role in ("worker", "operator"):
        acls(secure_broker, role, worker, cluster)
    secure_broker.allow(
        right(f"User:{fencer}", "Write", "transactional-id", f"{cluster}-host-{HOST}"),
        right(f"User:{forger}", "Write", "topic", of.allocations),
    )
    login = secure_broker.oauth(name)
    async with (
        managing(secure_broker.at("sasl"), login, cluster, tmp_path, host=HOST) as manager,
        client(secure_broker, secure_broker.oauth(worker)) as bus,
        client(secure_broker, secure_broker.oauth(fencer)) as fencing,
        client(secure_broker, secure_broker.oauth(forger)) as forging,
    ):
        async with await fencing.open_writer(f"{cluster}-host-{HOST}", 0) as taken:
            with pytest.raises(BusAuthorizationError, match=f"Write on topic '{of.allocations}'"):
                await taken.commit([(of.allocations, [Entry(b"h/w/1", b"FORGED")])])
        async with await asked(bus, cluster) as ours:
            with anyio.fail_after(WITHIN):
                assert (await ours.wait()).state == "allocated"
        assert manager.failure is None
        await forging.publish(of.allocations, 0, Entry(b"other/w/1", b"FORGED"))
        assert b"FORGED" in [message.value for message in await committed(bus, of.allocations)]


async def test_any_writer_of_registrations_can_speak_for_any_host_and_only_a_prefix_of_its_own_keeps_it_apart(
    secure_broker: SecureBroker, cluster: str
) -> None:
    """What Kafka cannot prevent, as the page says; and that the remedy is one."""
    eve, of = user(), names_of(cluster)
    acls(secure_broker, "worker", eve, cluster)
    body = json.dumps({"type": "deregister", "host": HOST, "worker": "somebody-else"}).encode()
    async with client(secure_broker, secure_broker.oauth(eve)) as bus:
        assert await bus.publish(of.registrations, 0, Entry(HOST.encode(), body)) >= 0
        with pytest.raises(BusConfigurationError, match=r"'other-tenant\.registrations' is not granted"):
            await bus.publish("other-tenant.registrations", 0, Entry(HOST.encode(), body))
