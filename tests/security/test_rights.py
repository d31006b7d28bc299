"""The rights that deploy/security.md grants: with them everything works, without any one of them it is said which, and
what holders of a worker's rights cannot do with them."""

from __future__ import annotations

import json
import re
import secrets
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from confluent_kafka.admin import AclBinding

from outfitter.session.worker_session import WorkerSession
from outfitter_proto import rights, topics
from outfitter_proto.bus import Bus, BusAuthorizationError, BusConfigurationError, Entry, Right
from outfitter_proto.bus.kafka import KafkaBus
from outfitter_proto.bus.kafka.writing import open_transactions
from outfitter_proto.keys import host_writer, partition_writer
from outfitter_proto.names import managers_group
from outfitter_proto.names import topics as names_of
from outfitter_proto.records import Register, ResourceRequest
from outfitter_service.cli._lib.diagnosis.bus import rights as doctors_rights
from outfitter_service.cli._lib.diagnosis.finding import Machine, Verdict
from outfitter_service.query import ledger_view
from support.bus.committed import committed
from support.documents import ROOT
from support.kafka.secure_broker import SecureBroker, right
from support.managers.secured import HOST, WITHIN, client, managing

pytestmark = pytest.mark.kafka

PAGE = ROOT / "deploy" / "security.md"
PAGES_HOST = "gpu-3"


def granted(cluster: str = "outfitter", host: str = PAGES_HOST) -> dict[str, list[tuple[str, str, str, bool]]]:
    """The page's commands, by principal: operation, kind, name of `cluster` and `host`, whether prefixed."""
    found: dict[str, list[tuple[str, str, str, bool]]] = {}
    for line in re.findall(r"^grant (User:.*)$", PAGE.read_text(), re.MULTILINE):
        principal, *words = shlex.split(line)
        options = dict(zip(words[::2], words[1::2], strict=True))
        operation = options.pop("--operation")
        prefixed = options.pop("--resource-pattern-type", "literal") == "prefixed"
        [(kind, name)] = options.items()
        name = name.replace("outfitter", cluster, 1).replace(PAGES_HOST, host)
        found.setdefault(principal.removeprefix("User:"), []).append((operation, kind.lstrip("-"), name, prefixed))
    return found


ROLES = granted()
MANAGER = f"manager-{PAGES_HOST}"
SCOPES = {MANAGER: "host", "manager": "cluster"}


def is_needed(each: tuple[str, str, str, bool]) -> bool:
    """Whether a manager does not start without it."""
    return each[0] != "DescribeConfigs" and "sweeper" not in each[2]


NEEDED = [each for each in ROLES[MANAGER] if is_needed(each)]


def looked_for(role: str, cluster: str, host: str = HOST) -> list[Right]:
    """What a manager of that role looks for at its start."""
    if SCOPES[role] == "host":
        return [*rights.of_manager(cluster, [host_writer(host)]), *rights.of_sweeper(cluster)]
    return rights.of_manager(cluster, [partition_writer(0)], [managers_group(cluster)])


def acls(broker: SecureBroker, role: str, user: str, cluster: str, leave_out: int | None = None) -> list[AclBinding]:
    """Grant `user` what the page grants to `role`, but for one; give what was granted."""
    wanted = granted(cluster, HOST)[role]
    given = [
        right(f"User:{user}", operation, kind, name, prefixed=prefixed)
        for number, (operation, kind, name, prefixed) in enumerate(wanted)
        if number != leave_out
    ]
    if given:
        broker.allow(*given)
    return given


async def asked(bus: Bus, cluster: str, worker: str = "w") -> WorkerSession:
    """A session of a worker that asks for one device; not entered."""
    body = Register(host=HOST, worker=worker, incarnation="1", resources={"gpu": ResourceRequest(amount=1)})
    return WorkerSession(bus, body, cluster=cluster, manager_patience=None)


def user() -> str:
    return f"u-{secrets.token_hex(4)}"


# --- the page ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", SCOPES)
def test_the_page_grants_a_manager_what_it_looks_for_at_its_start(role: str) -> None:
    found = [each for each in ROLES[role] if each[0] != "DescribeConfigs"]
    for (op, kind, name, _), wanted in zip(found, looked_for(role, "outfitter", PAGES_HOST), strict=True):
        assert (op, kind) == wanted[:2]
        assert wanted.name.startswith(name)


def test_kafkas_own_tool_takes_a_command_of_the_page(secure_broker: SecureBroker) -> None:
    admin = secure_broker.write(
        "admin.properties",
        "security.protocol=SASL_PLAINTEXT\nsasl.mechanism=PLAIN\nsasl.jaas.config="
        "org.apache.kafka.common.security.plain.PlainLoginModule required username=admin "
        f'password="{secure_broker.passwords["admin"]}";\n'.encode(),
    )
    [function] = re.findall(r"^grant\(\) \{\n  kafka-acls (.*) \"\$@\"\n\}$", PAGE.read_text(), re.MULTILINE)
    line = f"{function} User:by-the-book --operation DescribeConfigs --topic t. --resource-pattern-type prefixed"
    line = line.replace("broker-1.example:9093", secure_broker.bootstrap).replace("admin.properties", str(admin))
    tool = ROOT / "deploy" / "kafka" / "local_kafka.py"
    done = subprocess.run([sys.executable, tool, "acls", *shlex.split(line)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "principal=User:by-the-book" in done.stdout.replace(" ", "")
    assert "operation=DESCRIBE_CONFIGS" in done.stdout


# --- everything works with them ----------------------------------------------------------------------------


@pytest.mark.parametrize("manager_role", SCOPES)
async def test_with_the_least_rights_a_worker_gets_its_device_and_a_monitor_sees_it(
    manager_role: str, secure_broker: SecureBroker, cluster: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    people = {role: user() for role in ROLES}
    for role, name in people.items():
        acls(secure_broker, role, name, cluster)
    acls(secure_broker, "operator", people["worker"], cluster)
    login = secure_broker.oauth(people[manager_role])
    async with managing(
        secure_broker.at("sasl"), login, cluster, tmp_path, host=HOST, scope=SCOPES[manager_role]
    ) as manager:
        assert manager.failure is None
        async with (
            client(secure_broker, secure_broker.oauth(people["worker"])) as bus,
            await asked(bus, cluster) as ours,
        ):
            with anyio.fail_after(WITHIN):
                assert (await ours.wait()).state == "allocated"
            async with client(secure_broker, secure_broker.oauth(people["operator"])) as reading:
                assert {s.record.state for s in (await ledger_view.read(reading, cluster)).allocations} == {"allocated"}
            async with client(secure_broker, secure_broker.oauth(people["monitor"])) as watching:
                assert {s.record.worker for s in (await ledger_view.read(watching, cluster)).allocations} == {"w"}
                told = [item.setting for item in await topics.check(watching, cluster)]
                assert "(settings)" not in told
                group = [Right("Describe", "group", managers_group(cluster))]
                assert await watching.missing_rights(group) == []
                assert len(await bus.missing_rights(group)) == 1
        assert manager.count("outfitter_authentication_failures_total") == 0
    assert manager.failure is None
    printed = capfd.readouterr().out
    assert "ready" in printed
    assert "not shown to this principal" not in printed
    assert "is not granted" not in printed


# --- each one removed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("role", "number"),
    [(role, n) for role in SCOPES for n, each in enumerate(ROLES[role]) if is_needed(each)],
    ids=[f"{role}: {each[0]} {each[2]}" for role in SCOPES for each in ROLES[role] if is_needed(each)],
)
async def test_without_a_right_a_manager_says_which_and_does_not_start(
    role: str, number: int, secure_broker: SecureBroker, cluster: str, tmp_path: Path
) -> None:
    name = user()
    acls(secure_broker, role, name, cluster, leave_out=number)
    async with client(secure_broker, secure_broker.oauth(name)) as bus:
        wanted = looked_for(role, cluster)
        with anyio.fail_after(WITHIN):
            while len(await bus.missing_rights(wanted)) > 1:  # noqa: ASYNC110 - until what was granted has arrived
                await anyio.sleep(0.05)
    login = secure_broker.oauth(name)
    async with managing(secure_broker.at("sasl"), login, cluster, tmp_path, host=HOST, scope=SCOPES[role]) as manager:
        pass
    operation, kind, on = wanted[number]
    assert isinstance(manager.failure, BusAuthorizationError)
    said = str(manager.failure)
    assert f"{operation} on {kind} {on!r} is not granted to User:{name}" in said
    assert f"kafka-acls --add --allow-principal 'User:{name}' --operation {operation} --{kind} {on}" in said
    assert said.count("is not granted") == 1


@pytest.mark.parametrize("left_out", [None, 1, 6], ids=["nothing", "a right that it needs", "a right to sweep"])
async def test_the_doctor_finds_the_right_that_is_missing_and_how_it_is_granted(
    left_out: int | None, secure_broker: SecureBroker, cluster: str, tmp_path: Path
) -> None:
    name = user()
    wanted = [each for each in granted(cluster, HOST)[MANAGER] if each[0] != "DescribeConfigs"]
    given = [each for number, each in enumerate(wanted) if number != left_out]
    secure_broker.allow(*(right(f"User:{name}", op, kind, on, prefixed=prefixed) for op, kind, on, prefixed in given))
    login = "".join(f'{key} = "{value}"\n' for key, value in secure_broker.oauth(name).items())
    config = tmp_path / "outfitter.toml"
    config.write_text(f'bus = "{secure_broker.at("sasl")}"\ncluster = "{cluster}"\nhost = "{HOST}"\n[kafka]\n{login}')
    found = await anyio.to_thread.run_sync(lambda: [*doctors_rights(Machine(config=str(config), given={}))])
    if left_out is None:
        assert found == []
        return
    operation, kind, on = looked_for(MANAGER, cluster)[left_out]
    verdict = Verdict.WARNING if "sweeper" in on else Verdict.PROBLEM
    assert [(item.verdict, item.seen) for item in found] == [
        (verdict, f"{operation} on {kind} {on!r} is not granted to User:{name}")
    ]
    assert f"kafka-acls --add --allow-principal 'User:{name}' --operation {operation}" in found[0].remedy


async def test_without_any_right_a_manager_lists_all_that_it_needs(
    secure_broker: SecureBroker, cluster: str, tmp_path: Path
) -> None:
    login = secure_broker.oauth("nobody")
    async with managing(secure_broker.at("sasl"), login, cluster, tmp_path, host=HOST) as manager:
        pass
    assert str(manager.failure).count("is not granted to User:nobody") == len(NEEDED)


async def test_without_describe_configs_a_manager_starts_and_warns(
    secure_broker: SecureBroker, cluster: str, tmp_path: Path
) -> None:
    name = user()
    [optional] = [n for n, each in enumerate(ROLES[MANAGER]) if each[0] == "DescribeConfigs"]
    acls(secure_broker, MANAGER, name, cluster, leave_out=optional)
    async with client(secure_broker, secure_broker.oauth(name)) as bus:
        assert {item.found for item in await topics.check(bus, cluster)} == {"not shown to this principal"}
    async with managing(secure_broker.at("sasl"), secure_broker.oauth(name), cluster, tmp_path, host=HOST) as manager:
        assert manager.failure is None


async def test_without_the_rights_to_sweep_a_manager_serves_and_says_that_it_takes_no_part_in_it(
    secure_broker: SecureBroker, cluster: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    name = user()
    needed = [each for each in granted(cluster, HOST)[MANAGER] if is_needed(each)]
    secure_broker.allow(*(right(f"User:{name}", op, kind, on, prefixed=prefixed) for op, kind, on, prefixed in needed))
    async with managing(secure_broker.at("sasl"), secure_broker.oauth(name), cluster, tmp_path, host=HOST) as manager:
        assert manager.failure is None
        printed = ""
        with anyio.fail_after(WITHIN):
            while "takes no part in sweeping" not in printed:
                printed += capfd.readouterr().out
                await anyio.sleep(0.05)
        for on in (f"{cluster}-sweepers", f"{cluster}-sweeper-0"):
            assert f"'{on}' is not granted to User:{name}" in printed


async def test_a_principal_without_a_transactional_id_is_told_so_by_the_writer_itself(
    secure_broker: SecureBroker, cluster: str
) -> None:
    async with client(secure_broker, secure_broker.oauth("eve")) as bus:
        with pytest.raises(BusAuthorizationError, match="Write on transactional-id 'w' is not granted to User:eve"):
            await bus.open_writer("w", 0)


async def test_without_its_write_a_worker_is_told_when_it_registers(secure_broker: SecureBroker, cluster: str) -> None:
    name = user()
    acls(secure_broker, "operator", name, cluster)
    async with client(secure_broker, secure_broker.oauth(name)) as bus:
        missing = rf"(Describe|Write) on topic '{cluster}.registrations' is not granted to User:{name}"
        with anyio.fail_after(WITHIN), pytest.raises(BusAuthorizationError, match=missing):
            async with await asked(bus, cluster):
                pass


async def test_without_its_read_an_operator_is_told_when_it_begins(secure_broker: SecureBroker, cluster: str) -> None:
    name = user()
    acls(secure_broker, "worker", name, cluster)
    denied = rf"Describe on topic '{cluster}.allocations' is not granted to User:{name}"
    async with client(secure_broker, secure_broker.oauth(name)) as bus:
        with anyio.fail_after(WITHIN), pytest.raises(BusAuthorizationError, match=denied):
            async with await asked(bus, cluster):
                pass
        with anyio.fail_after(WITHIN), pytest.raises(BusAuthorizationError, match=denied):
            await bus.open_reader(names_of(cluster).allocations, 0, start=None, committed=True)


async def test_who_may_describe_but_not_read_is_told_instead_of_left_waiting(
    secure_broker: SecureBroker, cluster: str
) -> None:
    name = user()
    acls(secure_broker, "worker", name, cluster)
    secure_broker.allow(right(f"User:{name}", "Describe", "topic", names_of(cluster).allocations))
    async with client(secure_broker, secure_broker.oauth(name)) as bus:
        with anyio.fail_after(WITHIN), pytest.raises(BusAuthorizationError, match="Read on topic"):
            async with await asked(bus, cluster) as ours:
                await ours.wait()


async def test_without_describe_configs_a_monitor_sees_that_settings_are_not_shown(
    secure_broker: SecureBroker, cluster: str
) -> None:
    name = user()
    acls(secure_broker, "monitor", name, cluster, leave_out=1)
    async with client(secure_broker, secure_broker.oauth(name)) as bus:
        await ledger_view.read(bus, cluster)
        assert {item.found for item in await topics.check(bus, cluster)} == {"not shown to this principal"}


async def test_a_right_taken_away_while_a_manager_works_stops_commits_whole_until_it_is_back(
    secure_broker: SecureBroker, cluster: str, tmp_path: Path
) -> None:
    """Kafka commits what is left of a transaction after a refused record: aborting is ours."""
    of = names_of(cluster)
    name, worker = user(), user()
    acls(secure_broker, MANAGER, name, cluster)
    for role in ("worker", "operator"):
        acls(secure_broker, role, worker, cluster)
    history = right(f"User:{name}", "Write", "topic", of.history)
    login = secure_broker.oauth(name)
    async with (
        managing(secure_broker.at("sasl"), login, cluster, tmp_path, host=HOST) as manager,
        client(secure_broker, secure_broker.oauth(worker)) as bus,
    ):
        before = {s.record.worker for s in (await ledger_view.read(bus, cluster)).allocations}
        secure_broker.withdraw(history)
        failed = 'outcome="unavailable"'
        async with await asked(bus, cluster) as ours:
            with anyio.fail_after(WITHIN):
                while _failed_commits(manager.service.metrics.exposition().decode(), failed) < 2:  # noqa: ASYNC110
                    await anyio.sleep(0.05)
            assert {s.record.worker for s in (await ledger_view.read(bus, cluster)).allocations} == before == set()
            secure_broker.allow(history)
            with anyio.fail_after(WITHIN):
                assert (await ours.wait()).state == "allocated"
        assert manager.failure is None
    async with client(secure_broker, secure_broker.administrator(), "open") as looking:
        grants = [
            entry
            for entry in await everything(looking, of.history)
            if entry.get("record", {}).get("state") == "allocated"
        ]
        assert len(grants) == 1


def _failed_commits(exposition: str, labels: str) -> float:
    match = re.search(rf"^outfitter_commits_total\{{{labels}\}} (\S+)$", exposition, re.MULTILINE)
    return float(match[1]) if match else 0.0


async def everything(bus: Bus, topic: str) -> list[dict[str, Any]]:
    """All committed values of partition 0, as JSON."""
    return [json.loads(message.value or b"{}") for message in await committed(bus, topic)]


# --- what a worker's rights are not worth ---------------------------------------------------------------------


async def test_a_workers_rights_cannot_forge_fence_or_read(secure_broker: SecureBroker, cluster: str) -> None:
    name = user()
    acls(secure_broker, "worker", name, cluster)
    of = names_of(cluster)
    async with client(secure_broker, secure_broker.oauth(name)) as eve:
        assert await eve.publish(of.registrations, 0, Entry(b"h", b"{}")) == 0
        for topic in (of.allocations, of.history, of.dead_letters):
            with pytest.raises(BusAuthorizationError, match=f"'{topic}' is not granted"):
                await eve.publish(topic, 0, Entry(b"h/w/1", b"FORGED"))
        with pytest.raises(BusAuthorizationError, match=f"'{cluster}-host-{HOST}' is not granted"):
            await eve.open_writer(f"{cluster}-host-{HOST}", 0)
        async with await eve.open_reader(of.registrations, 0, start=0, committed=False) as reader:
            with pytest.raises(BusAuthorizationError, match=f"Read on topic '{of.registrations}' is not granted"):
                await reader.fetch(timeout=WITHIN)
        with pytest.raises(BusAuthorizationError):
            await eve.open_reader(of.allocations, 0, start=None, committed=True)


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
    answer = await bus._cluster.ask_leader(topic, 0, request, lambda found: found.topics[0][1][0][1])
    _, code, offset, *_ = answer.topics[0][1][0]
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
