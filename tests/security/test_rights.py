"""The rights that deploy/security.md grants: with them everything works, and without any of them it is said which."""

from __future__ import annotations

import re
import secrets
import shlex
import subprocess
import sys
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

import support.orders
from outfitter_proto import topics
from outfitter_proto.bus import Bus, BusAuthorizationError, Entry, Right, connect
from outfitter_proto.names import managers_group
from outfitter_proto.names import topics as names_of
from outfitter_proto.partitioning import partition_of
from outfitter_proto.records import CordonOrder
from outfitter_service.cli._lib.diagnosis.bus import rights as doctors_rights
from outfitter_service.cli._lib.diagnosis.finding import Grade, Machine
from outfitter_service.query import ledger_view, orders, unserved_hosts
from support.documents import ROOT
from support.kafka.secure_broker import SecureBroker, right
from support.managers.granted import (
    MANAGER,
    NEEDED,
    PAGE,
    PAGES_HOST,
    ROLES,
    SCOPES,
    acls,
    asked,
    everything,
    granted,
    is_needed,
    looked_for,
    user,
)
from support.managers.secured import HOST, WITHIN, client, managing
from support.processes import command_line

pytestmark = pytest.mark.kafka

Deed = Callable[[Bus, str], Awaitable[object]]
"""What somebody tries on the bus of a cluster."""


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


async def test_with_the_least_rights_a_host_is_served_in_a_partition_that_another_host_has_swept(
    secure_broker: SecureBroker, tmp_path: Path
) -> None:
    """A sweeper's commit leaves a marker in `dead-letters`, and the second manager has no right to read that topic."""
    cluster = f"t-{secrets.token_hex(4)}"
    admin, partitions = secure_broker.administrator(), 2
    other = next(name for n in range(99) if partition_of(name := f"{HOST}-{n}", 2) != partition_of(HOST, 2))
    async with connect(secure_broker.at("open"), admin) as bus:
        await topics.create(bus, cluster, partitions=partitions)
        logins = []
        for host in (HOST, other):
            name = user()
            acls(secure_broker, MANAGER, name, cluster, host=host)
            logins.append(secure_broker.oauth(name))
        swept = partition_of(other, partitions)
        (tmp_path / "first").mkdir()
        async with managing(secure_broker.at("sasl"), logins[0], cluster, tmp_path / "first", host=HOST):
            registrations = names_of(cluster).registrations
            await bus.publish(registrations, swept, Entry(HOST.encode(), b"{}"))  # in the wrong partition
            with anyio.fail_after(WITHIN):
                while (await bus.offsets(names_of(cluster).dead_letters, swept))[1] == 0:  # noqa: ASYNC110
                    await anyio.sleep(0.05)
            async with managing(secure_broker.at("sasl"), logins[1], cluster, tmp_path, host=other) as second:
                assert second.failure is None
                assert second.service.ready


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


@pytest.mark.parametrize(
    "left_out",
    [None, 1, 6, 8, 9],
    ids=["nothing", "a right that it needs", "a right to sweep", "the right to say that it lives", "the one to obey"],
)
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
    verdict = Grade.WARNING if "sweeper" in on or on.endswith((".managers", ".control")) else Grade.PROBLEM
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


async def test_without_the_right_to_sweep_a_manager_serves_and_says_that_it_takes_no_part_in_it(
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
        assert f"'{cluster}-sweeper-0' is not granted to User:{name}" in printed


async def ask(bus: Bus, cluster: str) -> None:
    async with await asked(bus, cluster) as ours:
        await ours.wait()


async def look_for_lost(bus: Bus, cluster: str) -> None:
    await unserved_hosts.find(bus, cluster, served=[], since=datetime.now(UTC))


async def read_orders(bus: Bus, cluster: str) -> None:
    await orders.read(bus, cluster, datetime.now(UTC))


async def read(bus: Bus, cluster: str) -> None:
    await bus.open_reader(names_of(cluster).allocations, 0, start=None, committed=True)


async def eavesdrop(bus: Bus, cluster: str) -> None:
    async with await bus.open_reader(names_of(cluster).registrations, 0, start=0, committed=False) as reader:
        await reader.fetch(timeout=WITHIN)


def publish(topic: str) -> Deed:
    return lambda bus, cluster: bus.publish(f"{cluster}.{topic}", 0, Entry(b"h/w/1", b"FORGED"))


def write_as(writer: str) -> Deed:
    return lambda bus, cluster: bus.open_writer(f"{cluster}-{writer}", 0)


TO_DESCRIBE = ("Describe", "topic", "allocations")
REFUSED: dict[str, tuple[str, tuple[str, str, str] | None, Deed, str]] = {
    "nobody writes as a host": ("", None, write_as("w"), "Write on transactional-id '{}-w'"),
    "an operator asks": ("operator", None, ask, "(Describe|Write) on topic '{}.registrations'"),
    "a worker waits": ("worker", None, ask, "Describe on topic '{}.allocations'"),
    "a worker reads": ("worker", None, read, "Describe on topic '{}.allocations'"),
    "who may describe waits": ("worker", TO_DESCRIBE, ask, "Read on topic '{}.allocations'"),
    "an operator looks for what was lost": ("operator", None, look_for_lost, "^Read on topic '{}.dead-letters'"),
    "a worker forges a grant": ("worker", None, publish("allocations"), "topic '{}.allocations'"),
    "a worker forges history": ("worker", None, publish("history"), "topic '{}.history'"),
    "a worker forges a dead letter": ("worker", None, publish("dead-letters"), "topic '{}.dead-letters'"),
    "a worker fences a manager": ("worker", None, write_as(f"host-{HOST}"), f"'{{}}-host-{HOST}'"),
    "a worker gives an order": ("worker", None, publish("control"), "(Describe|Write) on topic '{}.control'"),
    "an operator reads orders": ("operator", None, read_orders, "(Describe|Read) on topic '{}.control'"),
    "who looks on gives an order": ("monitor", None, publish("control"), "Write on topic '{}.control'"),
    "who gives orders forges a grant": ("oncall", None, publish("allocations"), "Write on topic '{}.allocations'"),
    "a worker listens to others": ("worker", None, eavesdrop, "Read on topic '{}.registrations'"),
}
"""Who has the rights of which role, and one more; what he tries; the right that he is told to lack."""


@pytest.mark.parametrize("case", REFUSED)
async def test_who_lacks_a_right_is_told_which_and_how_it_is_granted(
    case: str, secure_broker: SecureBroker, cluster: str
) -> None:
    role, more, tries, says = REFUSED[case]
    name = user()
    if role:
        acls(secure_broker, role, name, cluster)
    if more is not None:
        secure_broker.allow(right(f"User:{name}", *more[:2], f"{cluster}.{more[2]}"))
    told = rf"{says.format(cluster)} is not granted to User:{name}: .*kafka-acls --add .* --operation"
    async with client(secure_broker, secure_broker.oauth(name)) as bus:
        with anyio.fail_after(WITHIN), pytest.raises(BusAuthorizationError, match=told):
            await tries(bus, cluster)


async def test_whoever_may_takes_devices_out_and_lends_them_again_with_the_least_rights(
    secure_broker: SecureBroker, cluster: str, tmp_path: Path
) -> None:
    name = user()
    acls(secure_broker, "oncall", name, cluster)
    async with client(secure_broker, secure_broker.administrator(), "open") as admin:
        await support.orders.write(admin, support.orders.host(), cluster=cluster)
    login = "".join(f'{key} = "{value}"\n' for key, value in secure_broker.oauth(name).items())
    config = tmp_path / "outfitter.toml"
    config.write_text(f'bus = "{secure_broker.at("sasl")}"\ncluster = "{cluster}"\n[kafka]\n{login}')

    async def run(*words: str) -> subprocess.CompletedProcess[str]:
        return await anyio.to_thread.run_sync(lambda: command_line.outfitter(*words, cwd=tmp_path))

    given = await run("cordon", support.orders.HOST, "--reason", "XID 79", "--wait", "1ms")
    assert given.returncode == 75
    assert "has never read orders" in given.stderr
    assert given.stdout.strip() in (await run("orders")).stdout
    assert (await run("uncordon", support.orders.HOST, "--wait", "0")).returncode == 0


@pytest.mark.parametrize("left_out", [1, 2], ids=["Read", "Write"])
async def test_who_may_not_give_orders_is_told_which_right_is_missing(
    left_out: int, secure_broker: SecureBroker, cluster: str, tmp_path: Path
) -> None:
    name = user()
    acls(secure_broker, "oncall", name, cluster, leave_out=left_out)
    others = CordonOrder(id="1", host=support.orders.HOST, author="bob@ops-2", reason="mine", at=datetime.now(UTC))
    async with client(secure_broker, secure_broker.administrator(), "open") as admin:
        await support.orders.write(admin, support.orders.host(), others, cluster=cluster)
    login = "".join(f'{key} = "{value}"\n' for key, value in secure_broker.oauth(name).items())
    (tmp_path / "outfitter.toml").write_text(
        f'bus = "{secure_broker.at("sasl")}"\ncluster = "{cluster}"\n[kafka]\n{login}'
    )
    words = ("cordon", support.orders.HOST, "--reason", "XID 79")
    done = await anyio.to_thread.run_sync(lambda: command_line.outfitter(*words, cwd=tmp_path))
    operation = ROLES["oncall"][left_out][0]
    assert (done.returncode, done.stdout) == (1, "")
    assert f"{operation} on topic '{cluster}.control' is not granted to User:{name}" in done.stderr
    assert f"kafka-acls --add --allow-principal 'User:{name}' --operation {operation}" in done.stderr
    async with client(secure_broker, secure_broker.administrator(), "open") as admin:
        assert [order["id"] for order in await everything(admin, f"{cluster}.control")] == ["1"]


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
