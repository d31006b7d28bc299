"""Each command that talks to the bus, against five answers of a broker: it ends or reports in time, says the cause and
what to do, and never shows a person a traceback or a task group.

The answers are: it refuses connections, it is silent, it advertises addresses that nobody reaches, it has no
coordinator, it grants no right. The commands of one answer run beside each other, once for all tests here.
"""

from __future__ import annotations

import re
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import urlopen

import anyio
import pytest

from outfitter_proto import topics
from outfitter_proto.bus import connect
from outfitter_service.cli import COMMANDS
from support.kafka.broker import Broker, free_port
from support.kafka.secure_broker import SecureBroker, secure_broker
from support.managers.process import OUTFITTER, Manager, environment
from support.polling import until

__all__ = ["secure_broker"]
pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(600)]

AT_ONCE = 6
WITHIN_S = 120.0
"""For a command of which each waits some seconds, on a busy machine."""
CONFIG = """
external-resources = ["gpu"]
[external-resource.gpu]
amount = 1
driver-factory.class = "static"
param.count = 2
"""
ENDING = {
    "run": ["run", "--resource", "gpu=1", "--", "true"],
    "hold": ["hold", "--no-stdin", "--resource", "gpu=1"],
    "register": ["register", "--worker", "w", "--resource", "gpu=1"],
    "deregister": ["deregister", "--worker", "w"],
    "top": ["top", "--once"],
    "watch": ["watch"],
    "status": ["status"],
    "devices": ["devices"],
    "explain": ["explain", "w"],
    "history": ["history"],
    "replay": ["replay", "--at", "2026-01-01T00:00:00Z"],
    "dead-letters": ["dead-letters"],
    "cordon": ["cordon", "h", "--reason", "dust"],
    "uncordon": ["uncordon", "h"],
    "orders": ["orders"],
    "ledger forget": ["ledger", "forget", "--yes", "host/worker/run"],
    "backup": ["backup", "--out", "backup.jsonl"],
    "restore": ["restore", "whole.backup"],
    "topics create": ["topics", "create"],
    "topics check": ["topics", "check"],
    "verify": ["verify"],
    "doctor": ["doctor", "--config", "outfitter.toml"],
}
FOLLOWS_ON = {("no coordinator", "watch")}
"""Nothing is wrong for this command with this answer, and it has no end."""
SERVING = {
    "serve": ["serve", "--config", "outfitter.toml", "--http", "127.0.0.1:0", "--log-format", "text"],
    "serve --scope cluster": [
        "serve", "--scope", "cluster", "--config", "outfitter.toml", "--http", "127.0.0.1:0", "--log-format", "text",
    ],
    "api": ["api", "--listen", "127.0.0.1:0", "--log-format", "text"],
}  # fmt: skip
PROBES = {"serve": "readyz", "serve --scope cluster": "readyz", "api": "api/v1/status"}
WITHOUT_A_BUS = {"demo", "discover", "config", "schema", "completion", "kubernetes", "nvidia", "webhook", "yarn"}
CLUSTER = "answers"
NOBODY_KNOWS = "kafka-0.nosuch.invalid:9092"
NOT_FOR_PEOPLE = re.compile(
    r"Traceback|TaskGroup|ExceptionGroup|sub-exception|internal error|never retrieved|Task exception|Errno"
)


class Place(NamedTuple):
    """A bus that answers in one way, the environment's log-in there, and a folder to run in."""

    bus: str
    login: Mapping[str, str]
    folder: Path


class Said(NamedTuple):
    """What a command said: its exit code (None: it serves), its output, and what its probe says."""

    code: int | None
    text: str
    probe: str = ""


Saids = dict[str, Said]


def test_the_table_has_each_command_that_talks_to_the_bus() -> None:
    told = {command.partition(" ")[0] for command in (*ENDING, *SERVING)}
    assert told | WITHOUT_A_BUS == COMMANDS.keys()


# --- the answers ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def advertised(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The addresses of one broker, as host:port: of a listener as it should be, and of one whose advertised name nobody
    knows. The broker has Kafka's own defaults, for which two more brokers would be needed."""
    port, wrong, controller = free_port(), free_port(), free_port()
    listeners = {"PLAINTEXT": port, "WRONG": wrong, "CONTROLLER": controller}
    settings = {
        "controller.quorum.voters": f"1@127.0.0.1:{controller}",
        "listeners": ",".join(f"{name}://127.0.0.1:{at}" for name, at in listeners.items()),
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port},WRONG://{NOBODY_KNOWS}",
        "listener.security.protocol.map": ",".join(f"{name}:PLAINTEXT" for name in listeners),
        "transaction.state.log.replication.factor": "3",
        "offsets.topic.replication.factor": "3",
    }
    broker = Broker(tmp_path_factory.mktemp("kafka"), settings, port=port)
    try:
        broker.start()
        anyio.run(_with_topics, broker.url, {})
        yield broker.bootstrap, f"127.0.0.1:{wrong}"
    finally:
        broker.stop()


async def _with_topics(url: str, login: Mapping[str, str]) -> None:
    async with connect(url, login) as bus:
        await topics.create(bus, CLUSTER, partitions=1)


@contextmanager
def refusing(_: pytest.FixtureRequest) -> Iterator[tuple[str, dict[str, str]]]:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # nobody listens, and nobody else can
        yield f"kafka://127.0.0.1:{bound.getsockname()[1]}", {}


@contextmanager
def silent(_: pytest.FixtureRequest) -> Iterator[tuple[str, dict[str, str]]]:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        bound.listen(1000)  # the kernel accepts, and nobody answers
        yield f"kafka://127.0.0.1:{bound.getsockname()[1]}", {}


@contextmanager
def wrongly_advertised(request: pytest.FixtureRequest) -> Iterator[tuple[str, dict[str, str]]]:
    yield f"kafka://{request.getfixturevalue('advertised')[1]}", {}


@contextmanager
def without_coordinator(request: pytest.FixtureRequest) -> Iterator[tuple[str, dict[str, str]]]:
    yield f"kafka://{request.getfixturevalue('advertised')[0]}", {}


@contextmanager
def without_rights(request: pytest.FixtureRequest) -> Iterator[tuple[str, dict[str, str]]]:
    broker: SecureBroker = request.getfixturevalue("secure_broker")
    anyio.run(_with_topics, broker.at("open"), broker.administrator())
    yield broker.at("open"), broker.scram(f"nobody-{secrets.token_hex(4)}", listener="open")


ANSWERS: dict[str, tuple[Callable[..., Any], str]] = {
    "refused": (refusing, r"refuses connections; is it running\?"),
    "silent": (silent, r"does not answer within [0-9]+ s"),
    "wrongly advertised": (
        wrongly_advertised,
        rf"advertise {NOBODY_KNOWS} \(advertised.listeners\).*correct that setting",
    ),
    "no coordinator": (without_coordinator, r"COORDINATOR_NOT_AVAILABLE.*replication\.factor"),
    "no right": (without_rights, r"is not granted to User:nobody-\w+.*kafka-acls --add"),
}
"""How a broker answers, and the cause and the remedy as they are said."""


@pytest.fixture(scope="module")
def backup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A backup of a ledger with one worker."""
    folder = tmp_path_factory.mktemp("manager")
    manager = Manager(folder, CONFIG, cluster=CLUSTER)
    try:
        manager.start()
        assert manager.outfitter("register", "--worker", "w", "--lease", "none").returncode == 0
        assert manager.outfitter("backup", "--out", "whole.backup").returncode == 0
        yield folder / "whole.backup"
    finally:
        manager.kill9()


# --- what the commands say --------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=ANSWERS)
def answer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Saids]]:
    """The name of an answer, and what each command says to it."""
    begin, _ = ANSWERS[request.param]
    with begin(request) as (bus, login), ThreadPoolExecutor(AT_ONCE) as pool:
        place = Place(bus, login, tmp_path_factory.mktemp("commands"))
        (place.folder / "outfitter.toml").write_text(CONFIG)
        shutil.copy(request.getfixturevalue("backup"), place.folder / "whole.backup")
        ends = {name: words for name, words in ENDING.items() if (request.param, name) not in FOLLOWS_ON}
        ended = {name: pool.submit(_to_its_end, place, words) for name, words in ends.items()}
        serving = {name: pool.submit(_until_it_says, place, name, _expected(request.param, name)) for name in SERVING}
        yield request.param, {name: said.result() for name, said in (serving | ended).items()}


def _expected(answer: str, command: str) -> str:
    """The words that a command says to an answer."""
    return OTHERWISE.get(answer, {}).get(command, (0, ANSWERS[answer][1]))[1]


def _environment(place: Place) -> dict[str, str]:
    login = {f"OUTFITTER_KAFKA_{name.replace('-', '_').upper()}": value for name, value in place.login.items()}
    host = f"t-{secrets.token_hex(5)}"
    return environment(OUTFITTER_BUS=place.bus, OUTFITTER_CLUSTER=CLUSTER, OUTFITTER_HOST=host, **login)


def _to_its_end(place: Place, words: list[str]) -> Said:
    done = subprocess.run(
        [*OUTFITTER, *words], env=_environment(place), cwd=place.folder, check=False, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=WITHIN_S,
    )  # fmt: skip
    return Said(done.returncode, done.stdout)


def _until_it_says(place: Place, name: str, cause: str) -> Said:
    """Serve until the log and the probe say the cause, or until it ends."""
    log = place.folder / f"{name.replace(' ', '')}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*OUTFITTER, *SERVING[name]], env=_environment(place), cwd=place.folder,
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    probe = ""

    def said() -> bool:
        nonlocal probe
        probe = _probe(log, PROBES[name]) or probe
        in_log = name == "api" or re.search(cause, log.read_text(), re.DOTALL)
        return bool(re.search(cause, probe, re.DOTALL) and in_log)

    try:
        with suppress(AssertionError):  # the test says what is missing
            until(lambda: process.poll() is not None or said(), str, within_s=WITHIN_S)
        return Said(process.poll(), log.read_text(), probe)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(WITHIN_S)


def _probe(log: Path, path: str) -> str:
    """What the process that writes this log answers at `path`; empty while nobody listens there."""
    address = re.search(r"http://127\.0\.0\.1:[0-9]+", log.read_text())
    if address is None:
        return ""
    try:
        with urlopen(f"{address[0]}/{path}", timeout=10) as page:  # noqa: S310 - http, as the pattern says
            return page.read().decode()
    except HTTPError as refused:
        return refused.read().decode()
    except OSError:  # it ends
        return ""


# --- the table ---------------------------------------------------------------------------------------------------


_UNSERVED = "no manager answers for host"
OTHERWISE: dict[str, dict[str, tuple[int | None, str]]] = {
    "wrongly advertised": {"topics create": (0, "exist already")},
    "no coordinator": {
        **dict.fromkeys(("run", "hold"), (125, _UNSERVED)),
        "register": (0, "no manager of host .* has answered yet"),
        "deregister": (1, _UNSERVED),
        "explain": (1, "there is no worker"),
        "replay": (1, "the ledger is empty"),
        "ledger forget": (1, "has no record"),
        **dict.fromkeys(("cordon", "uncordon"), (1, "is unknown")),
        "orders": (0, "no order stands"),
        **dict.fromkeys(("top", "status", "devices", "history", "dead-letters", "topics create"), (0, "")),
        **dict.fromkeys(("backup", "verify"), (0, "")),
        "api": (None, '"ready":true'),
    },
}
"""What commands say that such a broker does not hinder, or that only read there: exit code, and some words."""


@pytest.mark.parametrize("command", [*ENDING, *SERVING])
def test_it_says_the_cause_and_the_remedy(answer: tuple[str, Saids], command: str) -> None:
    name, saids = answer
    if (name, command) in FOLLOWS_ON:
        return
    said = saids[command]
    print(f"=== {name} / {command}: {said.code}\n{said.text}\n{said.probe}")
    code: int | None = None if command in SERVING else COMMANDS[command.partition(" ")[0]].failure
    code, words = OTHERWISE.get(name, {}).get(command, (code, ANSWERS[name][1]))
    assert NOT_FOR_PEOPLE.search(said.text + said.probe) is None, said
    assert re.search(words, said.text + said.probe, re.DOTALL), said
    assert said.code == code or (command in SERVING and said.code == 1), said
