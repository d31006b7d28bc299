"""`outfitter serve` and the other commands as processes, on a broker that lets nobody in unasked."""

from __future__ import annotations

import json
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import pytest
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from confluent_kafka import Producer

from outfitter_proto.bus import Entry, connect
from outfitter_proto.bus.kafka import KafkaBus
from outfitter_proto.names import managers_topic
from outfitter_proto.names import topics as names_of
from outfitter_service.runtime.dead_letter_quota import A_MINUTE
from support.bus.committed import committed
from support.kafka.secure_broker import SecureBroker, right
from support.managers.api import running
from support.managers.process import Manager, ManagerError, StartManager, files_config
from support.managers.secured import HOST

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

MEBIBYTE = 1024 * 1024
PIECES = A_MINUTE * 9 // 10
"""Few enough for a dead letter each."""
MORE_MEMORY = 128 * MEBIBYTE
"""What may be added to a manager's resident memory by messages that unpack to hundreds of mebibytes."""


def table(login: Mapping[str, str]) -> str:
    """A login as the end of a configuration."""
    return "[kafka]\n" + "".join(f'{name} = "{value}"\n' for name, value in login.items())


def variables(login: Mapping[str, str]) -> dict[str, str]:
    """The same as a process's environment."""
    return {f"OUTFITTER_KAFKA_{name.replace('-', '_').upper()}": value for name, value in login.items()}


@pytest.fixture
async def manager(secure_broker: SecureBroker, cluster: str, tmp_path: Path, start_manager: StartManager) -> Manager:
    """A manager that logs in with SCRAM over TLS, with the least rights."""
    of, user = names_of(cluster), f"m-{secrets.token_hex(4)}"
    secure_broker.allow(
        *(right(f"User:{user}", "Write", "topic", topic) for topic in of if topic != of.registrations),
        *(right(f"User:{user}", "Read", "topic", topic) for topic in (of.registrations, of.allocations)),
        right(f"User:{user}", "DescribeConfigs", "topic", f"{cluster}.", prefixed=True),
        right(f"User:{user}", "Write", "transactional-id", f"{cluster}-host-{HOST}"),
        right(f"User:{user}", "Write", "transactional-id", f"{cluster}-sweeper-", prefixed=True),
        right(f"User:{user}", "Read", "topic", f"{cluster}.managers"),
    )
    config = files_config(tmp_path / "gpus", gpus=4) + table(secure_broker.scram(user))
    return start_manager(
        config, bus=secure_broker.at("sasl"), host=HOST, cluster=cluster, arguments=("--log-level", "debug")
    )


async def test_every_command_works_with_its_own_log_in_and_none_tells_a_secret(
    manager: Manager, secure_broker: SecureBroker, cluster: str, tmp_path: Path
) -> None:
    of, worker, monitor = names_of(cluster), f"w-{secrets.token_hex(4)}", f"o-{secrets.token_hex(4)}"
    secure_broker.allow(
        right(f"User:{worker}", "Write", "topic", of.registrations),
        right(f"User:{worker}", "Read", "topic", of.allocations),
        right(f"User:{monitor}", "Read", "topic", f"{cluster}.", prefixed=True),
        right(f"User:{monitor}", "DescribeConfigs", "topic", f"{cluster}.", prefixed=True),
    )
    (tmp_path / "empty.toml").write_text("")
    nothing_else = {"OUTFITTER_CONFIG": str(tmp_path / "empty.toml")}
    by_variable = nothing_else | variables(secure_broker.scram(worker))
    del by_variable["OUTFITTER_KAFKA_SASL_PASSWORD_FILE"]
    by_variable["OUTFITTER_KAFKA_SASL_PASSWORD"] = secure_broker.passwords[worker]
    looking = nothing_else | variables(secure_broker.oauth(monitor))
    said = []

    def outfitter(*arguments: str, env: Mapping[str, str], code: int = 0) -> str:
        done = manager.outfitter(*arguments, env=env)
        said.append(done.stdout + done.stderr)
        assert done.returncode == code, done.stderr
        return done.stdout

    program = (
        "from outfitter import RuntimeContext\n"
        "with RuntimeContext(operator='x') as context:\n"
        "    print(len(context.get_external_resource_infos('gpu')))\n"
    )
    run = ("run", "--resource", "gpu=2", "--", sys.executable, "-c", program)
    assert outfitter(*run, env=by_variable) == "2\n"
    outfitter("status", env=looking)
    with running(tmp_path, manager.bus_url, "--cluster", cluster, env=looking) as api:
        manager.wait_for(lambda: api.is_ready)
        pages = ("hosts", "workers", "history", "dead-letters", "writers")
        assert [api.get(f"/api/v1/{page}")[0] for page in pages] == [200] * len(pages)
        assert api.get("/api/v1/status")[1]["outage"] is None
        said.append(api.log)
    assert json.loads(outfitter("topics", "check", "--json", env=looking))["differences"] is not None
    config = str(manager.config)
    password = {"OUTFITTER_KAFKA_SASL_PASSWORD": secure_broker.passwords[worker]}
    shown = outfitter("config", "show", config, env=password)
    assert "kafka.sasl-password-file" in shown
    outfitter("config", "show", config, "--json", env=password)
    outfitter("config", "check", config, env={})
    wrong = looking | {"OUTFITTER_KAFKA_SASL_TOKEN_FILE": str(secure_broker.write("t", b"eyJ.secret.token"))}
    outfitter("status", env=wrong, code=1)
    assert "the token is refused" in said[-1]
    outfitter("--debug", "status", env=by_variable | {"OUTFITTER_KAFKA_SASL_PASSWORD": "wrong-horse"}, code=1)
    assert f"User:{worker} in: a wrong password" in said[-1]
    everything = "".join(said) + manager.log_tail() + manager.metrics()
    token = (secure_broker.folder / f"{monitor}.token").read_text()
    for secret in (*secure_broker.passwords.values(), token, "eyJ.secret.token", "wrong-horse"):
        assert secret not in everything


async def test_a_manager_that_may_not_log_in_ends_with_one_line_that_says_why(
    secure_broker: SecureBroker, cluster: str, tmp_path: Path
) -> None:
    config = files_config(tmp_path / "gpus") + table(secure_broker.plain("admin", "wrong"))
    manager = Manager(tmp_path / "refused", config, bus=secure_broker.at("open"), host=HOST, cluster=cluster)
    with pytest.raises(ManagerError, match="ended with 1 before it was ready"):
        manager.start()
    lines = [line for line in manager.log_tail().splitlines() if line.startswith("outfitter: kafka://")]
    assert len(lines) == 1
    assert "does not let User:admin in: an unknown user or a wrong password" in lines[0]


# --- what unpacks to more than there should be -----------------------------------------------------------------


def packed(codec: int, values: list[bytes]) -> bytes:
    builder = DefaultRecordBatchBuilder(
        magic=2, compression_type=codec, is_transactional=0, producer_id=-1, producer_epoch=-1, base_sequence=-1,
        batch_size=2**31 - 1,
    )  # fmt: skip
    for number, value in enumerate(values):
        builder.append(number, None, HOST.encode(), value, [])
    return bytes(builder.build())


async def publish(bus: KafkaBus, topic: str, batch: bytes) -> None:
    request = ProduceRequest(transactional_id=None, required_acks=-1, timeout=30_000, topics=[(topic, [(0, batch)])])
    row = await bus._cluster.ask_leader(topic, 0, request)
    assert row[1] == 0


async def dead_letters(bus: KafkaBus, topic: str) -> list[dict[str, Any]]:
    return [json.loads(message.value or b"{}") for message in await committed(bus, topic)]


async def test_packed_bombs_are_dead_letters_in_bounded_memory_and_do_not_come_again_at_a_restart(
    manager: Manager, secure_broker: SecureBroker, cluster: str
) -> None:
    """200 MB of zeros in 64 kB with zstd, what fits there with gzip and lz4, and many of 2 MB."""
    of = names_of(cluster)
    bombs = [packed(4, [bytes(200_000_000)]), packed(1, [bytes(60_000_000)]), packed(3, [bytes(15_000_000)])]
    bombs += [packed(4, [bytes(2_000_000)])] * PIECES
    assert all(len(bomb) < 64 * 1024 for bomb in bombs)
    crowd = packed(4, [b""] * 60_000)
    before = most_memory(manager)
    async with connect(secure_broker.at("open"), secure_broker.administrator()) as bus:
        assert isinstance(bus, KafkaBus)
        for bomb in (*bombs, crowd):
            await publish(bus, of.registrations, bomb)
        letters: list[dict[str, Any]] = []
        async with await bus.open_reader(of.dead_letters, 0, start=None, committed=True) as reader:
            with anyio.fail_after(60):
                while len(letters) < len(bombs) + 1:
                    letters += [json.loads(message.value or b"{}") for message in await reader.fetch()]
        most = most_memory(manager)
        print(f"resident memory: {before / MEBIBYTE:.0f} MiB before, at most {most / MEBIBYTE:.0f} MiB")
        assert most - before < MORE_MEMORY
        offsets = [letter["source"]["offset"] for letter in letters]
        assert len(offsets) == len(set(offsets))
        manager.kill9()
        manager.start()
        await publish(bus, of.registrations, crowd)  # whoever answers it has passed all before it
        body = {
            "type": "register",
            "host": HOST,
            "worker": "w",
            "incarnation": "1",
            "resources": {"gpu": {"amount": 1}},
        }
        await bus.publish(of.registrations, 0, Entry(HOST.encode(), json.dumps(body).encode()))
        deadline = time.monotonic() + 30
        while not any(b'"allocated"' in (m or b"") for m in await values(bus, of.allocations)):
            assert time.monotonic() < deadline
        again = offsets
        with anyio.fail_after(60):
            while max(again) == max(offsets):
                again = [letter["source"]["offset"] for letter in await dead_letters(bus, of.dead_letters)]
        assert sorted(again)[:-1] == sorted(offsets)
    assert most_memory(manager) - before < MORE_MEMORY


def most_memory(manager: Manager) -> int:
    """The most that the manager's process has ever had in memory; bytes."""
    [kibibytes] = re.findall(r"^VmHWM:\s+(\d+) kB$", Path(f"/proc/{manager.pid}/status").read_text(), re.MULTILINE)
    return int(kibibytes) * 1024


async def values(bus: KafkaBus, topic: str) -> list[bytes | None]:
    return [message.value for message in await committed(bus, topic)]


async def test_a_stock_clients_packed_registrations_are_answered(
    manager: Manager, secure_broker: SecureBroker, cluster: str
) -> None:
    of, codecs = names_of(cluster), ("gzip", "snappy", "lz4", "zstd")
    for codec in codecs:
        producer = Producer(
            {
                "bootstrap.servers": secure_broker.bootstrap, "security.protocol": "SASL_PLAINTEXT",
                "sasl.mechanism": "PLAIN", "sasl.username": "admin", "sasl.password": secure_broker.passwords["admin"],
                "compression.type": codec, "partitioner": "murmur2_random", "log_level": 0,
            }
        )  # fmt: skip
        labels = {f"label-{n}": "packs well" for n in range(40)}
        body = {"type": "register", "host": HOST, "worker": codec, "incarnation": "1", "labels": labels}
        producer.produce(of.registrations, json.dumps(body).encode(), HOST.encode())
        assert producer.flush(20) == 0
    async with connect(secure_broker.at("open"), secure_broker.administrator()) as bus:
        assert isinstance(bus, KafkaBus)
        deadline = time.monotonic() + 30
        answered: set[str] = set()
        while answered != set(codecs):
            assert time.monotonic() < deadline
            records = [json.loads(value) for value in await values(bus, of.allocations) if value]
            answered = {record["worker"] for record in records if record.get("state") == "allocated"}


# --- HTTP --------------------------------------------------------------------------------------------------------


async def test_nothing_that_is_asked_over_http_changes_anything(manager: Manager) -> None:
    assert manager.url.startswith("http://127.0.0.1:")
    async with aiohttp.ClientSession(manager.url) as session:
        for path in ("/metrics", "/livez", "/readyz", "/", "/allocations"):
            for method in ("POST", "PUT", "PATCH", "DELETE"):
                async with session.request(method, path, data=b"x" * 100) as answer:
                    assert answer.status in (404, 405)
        async with session.get("/readyz") as answer:
            assert answer.status == 200


async def test_who_may_not_read_signs_of_life_is_told_nothing_of_them(
    secure_broker: SecureBroker, cluster: str, tmp_path: Path, start_manager: StartManager
) -> None:
    of, names = names_of(cluster), [f"{kind}-{secrets.token_hex(4)}" for kind in ("manager", "knows", "knows-not")]
    user, knows, knows_not = names
    secure_broker.allow(
        *(right(f"User:{user}", "Write", "topic", topic) for topic in (*of, managers_topic(cluster))),
        *(right(f"User:{name}", "Read", "topic", topic) for name in names for topic in of),
        right(f"User:{knows}", "Read", "topic", managers_topic(cluster)),
        right(f"User:{user}", "Write", "transactional-id", f"{cluster}-host-{HOST}"),
    )
    config = files_config(tmp_path / "gpus", gpus=1) + table(secure_broker.scram(user))
    often = {"OUTFITTER_BEAT_INTERVAL": "5s"}
    manager = start_manager(config, bus=secure_broker.at("sasl"), host=HOST, cluster=cluster, variables=often)
    manager.wait_for(lambda: manager.metric("outfitter_signs_of_life_total", outcome="ok"))
    (tmp_path / "empty.toml").write_text("")
    env = {"OUTFITTER_CONFIG": str(tmp_path / "empty.toml")}

    def status(name: str) -> subprocess.CompletedProcess[str]:
        done = manager.outfitter("status", env=env | variables(secure_broker.scram(name)))
        assert done.returncode == 0, done.stderr
        return done

    before = status(knows_not)
    manager.kill9()
    manager.wait_for(lambda: "was killed, or hangs" in status(knows).stderr)
    after = status(knows_not)
    assert "was killed" not in after.stderr
    assert after.stderr == before.stderr
