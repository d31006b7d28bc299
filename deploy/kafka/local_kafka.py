#!/usr/bin/env python3
"""A Kafka broker on this machine, and Kafka's own command-line tools, from jars that Maven resolves.

For development, demonstrations and the test suite: one node that is broker and controller in one (KRaft), on the
loopback interface, without log-in or TLS, with one replica of everything. It is no way to run Kafka in production.

Needs Java 17 or later and Maven; uses nothing but Python's standard library, so that it runs before anything of
this project is installed. Every command replaces this process by the Java one, so a signal reaches Kafka itself.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

HERE = Path(__file__).resolve().parent
CACHE = HERE.parents[1] / ".cache" / "kafka"
POM = HERE / "pom.xml"
CLUSTER_ID = "b3V0Zml0dGVyLWxvY2FsLQ"  # any 16 bytes in base64: a data directory belongs to one cluster

BROKER_JVM = ("-Xms128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
TOOL_JVM = ("-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
QUIET = ("-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",)
BROKER_LOG = (
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
    "-Dorg.slf4j.simpleLogger.dateTimeFormat=HH:mm:ss.SSS",
    "-Dorg.slf4j.simpleLogger.log.kafka.server.KafkaRaftServer=info",
)
ARCHIVED_WITHIN_S = 120.0
"""Seconds that the broker of the class archive may take to answer, and again to end. Two idle cores take 10 s."""
TOOLS = {
    "topics": "org.apache.kafka.tools.TopicCommand",
    "configs": "kafka.admin.ConfigCommand",
    "acls": "org.apache.kafka.tools.AclCommand",
    "features": "org.apache.kafka.tools.FeatureCommand",
    "transactions": "org.apache.kafka.tools.TransactionsCommand",
    "console-producer": "org.apache.kafka.tools.ConsoleProducer",
    "console-consumer": "org.apache.kafka.tools.consumer.ConsoleConsumer",
}


def jars(version: str | None = None) -> Path:
    """The folder with Kafka's jars, resolved by Maven the first time and again whenever pom.xml has changed.

    `version` None: the one that pom.xml names.

    Raises:
        SystemExit: Maven is missing or failed; the message holds the end of what it said.
    """
    suffix = f"-{version}" if version else ""
    folder = CACHE / f"lib-{hashlib.sha256(POM.read_bytes()).hexdigest()[:12]}{suffix}"
    if folder.is_dir():
        return folder
    with _alone():
        if folder.is_dir():
            return folder
        print("resolving Kafka's jars with Maven (54 MB, once) ...", file=sys.stderr, flush=True)
        unfinished = Path(tempfile.mkdtemp(dir=CACHE, prefix="resolving-"))
        try:
            maven = subprocess.run(
                [
                    _program("mvn", "Maven"), "--quiet", "--batch-mode", "--file", str(POM),
                    "dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={unfinished}",
                    *([f"-Dkafka.version={version}"] if version else []),
                ],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
            )  # fmt: skip
            if maven.returncode != 0:
                raise SystemExit(f"Maven could not resolve Kafka's jars:\n{maven.stdout[-4000:]}")
            unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def archive(version: str | None = None) -> Path:
    """A broker's classes as the JVM has them in memory (class data sharing): with it a broker starts in half the time.

    The first start makes it, beside the jars. A JVM that it does not fit, such as another Java's, does without.

    Raises:
        SystemExit: no broker starts, or its JVM archives nothing; the message holds the end of what it said.
    """
    lib = jars(version)
    archived = lib.with_name(f"{lib.name}.jsa")
    with _alone():
        if not archived.exists():
            with tempfile.TemporaryDirectory(dir=CACHE, prefix="archiving-") as scratch:
                _archived_by_a_broker(lib, Path(scratch)).rename(archived)
    return archived


def _archived_by_a_broker(lib: Path, scratch: Path) -> Path:
    port, classes, log = free_port(), scratch / "classes.jsa", lib.with_name(f"{lib.name}.log")
    properties = _formatted(lib, scratch / "data", settings(port, free_port(), scratch / "data", {}))
    command = [*_jvm(lib, *BROKER_JVM, f"-XX:ArchiveClassesAtExit={classes}"), "kafka.Kafka", str(properties)]
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as broker:
        try:
            _wait_until_it_answers(broker, port)
            broker.terminate()
            broker.wait(ARCHIVED_WITHIN_S)
        except (TimeoutError, subprocess.TimeoutExpired) as error:
            raise _not_archived(f"{error} (port {port})", log) from None
        finally:
            broker.kill()  # does nothing to a process that has ended
    if not classes.exists():
        raise _not_archived(f"its JVM wrote no archive and ended with {broker.returncode}", log)
    return classes


def _wait_until_it_answers(broker: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + ARCHIVED_WITHIN_S
    while broker.poll() is None and not _answers(port):
        if time.monotonic() > deadline:
            raise TimeoutError(f"it has not answered for {ARCHIVED_WITHIN_S:g} s")
        time.sleep(0.1)


def _not_archived(why: str, log: Path) -> SystemExit:
    return SystemExit(
        f"could not archive the broker's classes: {why}. Its log is {log}: mend what it says, or give the machine more "
        f"memory or less work, and run the same command again. The log ends with:\n"
        f"{log.read_text(errors='replace')[-4000:]}"
    )


def settings(port: int, controller_port: int, data: Path, overrides: Mapping[str, str]) -> dict[str, str]:
    """The broker's configuration: one node, loopback only, nothing made by accident."""
    internal = {
        f"{prefix}.{name}": value
        for prefix, names in {
            "offsets.topic": ("replication.factor", "num.partitions"),
            "transaction.state.log": ("replication.factor", "num.partitions", "min.isr"),
            "share.coordinator.state.topic": ("replication.factor", "num.partitions", "min.isr"),
        }.items()
        for name in names
        for value in ("4" if name == "num.partitions" else "1",)
    }
    return {
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.quorum.voters": f"1@127.0.0.1:{controller_port}",
        "controller.listener.names": "CONTROLLER",
        "inter.broker.listener.name": "PLAINTEXT",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}",
        "log.dirs": str(data),
        "num.partitions": "1",
        **internal,
        # A mistyped topic name must be an error, not a new topic with the wrong settings.
        "auto.create.topics.enable": "false",
        "group.initial.rebalance.delay.ms": "0",
        # A test that waits for a member's end of session shall not wait for Kafka's 6 s.
        "group.min.session.timeout.ms": "1000",
        # One developer's broker may look for timed-out transactions and dirty logs often.
        "transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000",
        "log.cleaner.backoff.ms": "1000",
        "log.cleaner.dedupe.buffer.size": str(16 * 1024 * 1024),
        **overrides,
    }


def run_broker(
    port: int,
    data: Path,
    overrides: Mapping[str, str],
    *,
    version: str | None = None,
    heap: str = "512m",
    features: Sequence[str] = (),
) -> NoReturn:
    """Format `data` if it is new and become the broker, in the foreground, until a signal ends it. `features`: levels
    other than the newest, such as `transaction.version=1`."""
    lib, archived = jars(version), f"-XX:SharedArchiveFile={archive(version)}"
    properties = _formatted(lib, data, settings(port, free_port(), data, overrides), archived, features=features)
    print(f"Kafka on 127.0.0.1:{port}, data in {data}; Ctrl-C ends it", flush=True)
    _become([*_jvm(lib, f"-Xmx{heap}", *BROKER_JVM, *BROKER_LOG, archived), "kafka.Kafka", str(properties)])


def _formatted(
    lib: Path, data: Path, configuration: Mapping[str, str], *options: str, features: Sequence[str] = ()
) -> Path:
    """The file with the configuration, and `data` formatted if it is new. `options` are the JVM's."""
    data.mkdir(parents=True, exist_ok=True)
    properties = data.parent / f"{data.name}.properties"
    properties.write_text("".join(f"{key}={value}\n" for key, value in configuration.items()))
    if not (data / "meta.properties").exists():
        formatted = subprocess.run(
            [
                *_jvm(lib, *TOOL_JVM, *options), "kafka.tools.StorageTool",
                "format", "-t", CLUSTER_ID, "-c", str(properties), "--ignore-formatted",
                *(word for feature in features for word in ("--feature", feature)),
            ],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        if formatted.returncode != 0:
            raise SystemExit(f"could not format {data}:\n{formatted.stdout[-4000:]}")
    return properties


def _jvm(lib: Path, *options: str) -> list[str]:
    return [_program("java", "Java 17 or later"), *options, *QUIET, "-cp", str(lib / "*")]


def run_tool(name: str, arguments: Sequence[str]) -> NoReturn:
    """Become one of Kafka's own command-line tools."""
    _become([*_jvm(jars(), *TOOL_JVM), TOOLS[name], *arguments])


def free_port() -> int:
    """A TCP port that nobody listens on now, outside the range that outgoing connections take theirs from."""
    candidates = list(range(20_000, 30_000))
    start = int.from_bytes(os.urandom(4), "big") % len(candidates)
    for port in candidates[start:] + candidates[:start]:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise SystemExit("no free TCP port between 20000 and 29999 on 127.0.0.1")


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def _alone() -> Iterator[None]:
    """Of several processes that get here at once, such as a test run's, one goes on."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _program(name: str, what: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise SystemExit(f"{what} is needed: there is no `{name}` on PATH")
    return found


def _become(command: list[str]) -> NoReturn:
    sys.stdout.flush()
    os.execv(command[0], command)  # noqa: S606  (no shell: the signals are meant for Kafka itself)


def main(arguments: Sequence[str]) -> None:
    """Parse the command line. Tools get their arguments as they are, so they are told apart first."""
    if arguments and arguments[0] in TOOLS:
        run_tool(arguments[0], arguments[1:])
    parser = argparse.ArgumentParser(description="A local Kafka broker and its tools, from Maven's jars.")
    commands = parser.add_subparsers(dest="command", required=True)
    resolve = commands.add_parser("jars", help="resolve the jars and print the folder they are in")
    broker = commands.add_parser("broker", help="run a broker in the foreground until Ctrl-C")
    broker.add_argument("--port", type=int, default=9092, help="the port to listen on, on 127.0.0.1 (%(default)s)")
    broker.add_argument("--data", type=Path, default=CACHE / "data", help="where the data is kept (%(default)s)")
    broker.add_argument("--heap", default="512m", help="the most memory Java's heap takes (%(default)s)")
    for command in resolve, broker:
        command.add_argument("--kafka", metavar="VERSION", help="of Kafka, such as 3.9.1 (the one that pom.xml names)")
    broker.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a broker setting; repeatable")
    broker.add_argument(
        "--feature", action="append", default=[], metavar="NAME=LEVEL", help="a feature of new data; repeatable"
    )
    for name, main_class in TOOLS.items():
        commands.add_parser(name, help=f"run {main_class} with the arguments that follow")
    chosen = parser.parse_args(arguments)
    if chosen.command == "jars":
        print(jars(chosen.kafka))
        return
    overrides = dict(pair.partition("=")[::2] for pair in chosen.set)
    run_broker(
        chosen.port, chosen.data.resolve(), overrides, version=chosen.kafka, heap=chosen.heap, features=chosen.feature
    )


if __name__ == "__main__":
    main(sys.argv[1:])
