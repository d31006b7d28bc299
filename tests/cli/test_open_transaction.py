"""A stranger's transaction stays open in the ledger, so nobody can read what managers wrote after it. Each command says
so, and how to end it, and none claims that there is no manager."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anyio
import pytest
from confluent_kafka import Producer

from outfitter_proto import topics
from outfitter_proto.bus import connect
from outfitter_proto.names import topics as names_of
from support.kafka.broker import KafkaBroker
from support.managers.process import OUTFITTER, environment

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(300)]

COMMANDS = {
    "run": (["run", "--resource", "gpu=1", "--", "true"], 125),
    "register": (["register", "--worker", "w", "--resource", "gpu=1", "--wait", "2"], 1),
    "status": (["status"], 1),
    "topics check": (["topics", "check"], 1),
    "doctor": (["doctor", "--config", "outfitter.toml"], 1),
    "verify": (["verify"], 125),
}
WITHIN_S = 50.0
"""A stranger's transaction is known as such after 20 s; the rest is for a busy machine. Without a limit of its own a
command waits for it as long as it stays open."""


@pytest.fixture(scope="module")
def said(kafka_broker: KafkaBroker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[int, str]]]:
    """The exit code and the output of each command, while the transaction is open."""
    cluster, folder = kafka_broker.new_cluster(), tmp_path_factory.mktemp("commands")
    (folder / "outfitter.toml").write_text("external-resources = []\n")

    async def make() -> None:
        async with connect(kafka_broker.url) as bus:
            await topics.create(bus, cluster, partitions=1)

    anyio.run(make)
    stranger = Producer(
        {
            "bootstrap.servers": kafka_broker.bootstrap,
            "transactional.id": f"stranger-{cluster}",
            "transaction.timeout.ms": 600_000,
        }
    )
    stranger.init_transactions(30)
    stranger.begin_transaction()
    stranger.produce(names_of(cluster).allocations, b"value", b"a stranger's")
    stranger.flush(30)
    try:
        with ThreadPoolExecutor(len(COMMANDS)) as pool:
            ended = {
                name: pool.submit(_ended, words, folder, kafka_broker.url, cluster)
                for name, (words, _) in COMMANDS.items()
            }
            yield {name: command.result() for name, command in ended.items()}
    finally:
        stranger.abort_transaction(30)


def _ended(words: list[str], folder: Path, bus: str, cluster: str) -> tuple[int, str]:
    done = subprocess.run(
        [*OUTFITTER, *words],
        env=environment(OUTFITTER_BUS=bus, OUTFITTER_CLUSTER=cluster, OUTFITTER_HOST=f"t-{os.getpid()}"),
        cwd=folder, check=False, text=True, timeout=WITHIN_S,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_it_names_the_transaction_and_how_to_end_it(said: dict[str, tuple[int, str]], command: str) -> None:
    code, text = said[command]
    assert "stays undecided: open transactions: producer id " in text, text
    assert "kafka-transactions --bootstrap-server" in text, text
    assert "no manager answers" not in text, text
    assert "start one with" not in text, text
    assert code == COMMANDS[command][1], text
