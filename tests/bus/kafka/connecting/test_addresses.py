"""A bus URL that names no broker is refused at once, by whoever connects, the configuration, and the checker, each with
a reading of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest

from outfitter_proto.bus import BusConfigurationError
from outfitter_proto.bus.addresses import Node, brokers
from outfitter_proto.bus.kafka.connecting.login import login_of
from outfitter_service.config import ConfigurationError, connection
from outfitter_verify import UnreadableError, verify
from outfitter_verify.buses import addresses

GOOD = [
    ("kafka://h", [("h", 9092)]),
    ("kafka://h:1", [("h", 1)]),
    ("kafka://h:65535/", [("h", 65535)]),
    ("kafka://a:1,b,c:3/", [("a", 1), ("b", 9092), ("c", 3)]),
    ("kafka://broker-1.example.com.:9093", [("broker-1.example.com.", 9093)]),
    ("kafka://kafka_1:9092", [("kafka_1", 9092)]),
    ("kafka://bücher.example", [("bücher.example", 9092)]),
    ("kafka://127.0.0.1:9,10.0.0.1", [("127.0.0.1", 9), ("10.0.0.1", 9092)]),
    ("kafka://[::1]:9", [("::1", 9)]),
    ("kafka://[::1],[fe80::1%eth0]:9", [("::1", 9092), ("fe80::1%eth0", 9)]),
]

BAD = [
    # the URL, what a message names of it, what a message says of that
    ("kafka://", "", "no broker"),
    ("kafka:///", "", "no broker"),
    ("kafka://a:99999", "99999", "1 to 65535"),
    ("kafka://a:65536", "65536", "1 to 65535"),
    ("kafka://a:0", "'a:0'", "1 to 65535"),
    ("kafka://a:-1", "-1", "1 to 65535"),
    ("kafka://a:+1", "+1", "1 to 65535"),
    ("kafka://a:b", "'a:b'", "1 to 65535"),
    ("kafka://a:", "'a:'", "1 to 65535"),
    ("kafka://a:٣", "٣", "1 to 65535"),
    pytest.param("kafka://a:" + 5000 * "9", "99…", "1 to 65535", id="a long port"),
    ("kafka://:9092", "':9092'", "host"),
    ("kafka://[::1", "[::1", "brackets"),
    ("kafka://[::1:9", "[::1:9", "brackets"),
    ("kafka://::1]:9", "::1]:9", "brackets"),
    ("kafka://::1", "::1", "brackets"),
    ("kafka://fe80::1:9092", "fe80::1:9092", "brackets"),
    ("kafka://[]:9", "[]:9", "brackets"),
    ("kafka://[h]:9", "[h]:9", "brackets"),
    ("kafka://[::1]9", "[::1]9", "brackets"),
    ("kafka://[::1]:0", "'[::1]:0'", "1 to 65535"),
    ("kafka://a:1,b:x", "b:x", "1 to 65535"),
    ("kafka://a:1,b:x,c:3", "b:x", "1 to 65535"),
    ("kafka://a:1,,b:2", "''", "host"),
    ("kafka://a:1,", "''", "host"),
    ("kafka://,", "''", "host"),
    ("kafka://a:1, b:2", "' b:2'", "white space"),
    ("kafka://a :1", "'a :1'", "white space"),
    ("kafka://a:1\tx", "a:1", "white space"),
    ("kafka://a/b", "a/b", "host"),
    ("kafka://a//", "a/", "host"),
    ("kafka://a..b", "a..b", "host"),
    ("kafka://" + 70 * "a", "aaa", "host"),
    ("kafka://kafka://a:1", "kafka://a:1", "host"),
    ("kafka://300.0.0.1:1", "300.0.0.1", "host"),
    ("kafka://" + 63 * "ü", "üüü", "host"),
]  # fmt: skip

Reading = Callable[[str], Sequence[tuple[str, int]]]


def of_a_configuration(url: str) -> Sequence[tuple[str, int]]:
    return list(brokers(connection(None, {"bus": url}, {}).bus))


def of_the_checker(url: str) -> Sequence[tuple[str, int]]:
    return addresses.brokers(url)


READINGS: list[tuple[Reading, type[Exception]]] = [
    (lambda url: list(login_of(url, {}, {}).nodes), BusConfigurationError),
    (of_a_configuration, ConfigurationError),
    (of_the_checker, UnreadableError),
]
WHOSE = ["bus", "configuration", "checker"]


@pytest.mark.parametrize(("read", "_error"), READINGS, ids=WHOSE)
@pytest.mark.parametrize(("url", "nodes"), GOOD)
def test_a_url_names_brokers_and_9092_is_the_port_left_out(
    read: Reading, _error: type[Exception], url: str, nodes: list[tuple[str, int]]
) -> None:
    assert list(read(url)) == nodes
    assert [str(Node(*node)) for node in nodes if node[0] == "::1"] in ([], ["[::1]:9"], ["[::1]:9092"])


@pytest.mark.parametrize(("read", "error"), READINGS, ids=WHOSE)
@pytest.mark.parametrize(("url", "named", "why"), BAD)
def test_a_url_that_names_no_broker_is_refused_with_its_wrong_part_and_what_would_be_valid(
    read: Reading, error: type[Exception], url: str, named: str, why: str
) -> None:
    with pytest.raises(error) as refused:
        read(url)
    message = str(refused.value)
    assert "\n" not in message
    assert len(message) < 500
    for words in (url[:40].replace("\t", "\\t"), named, why, "kafka://host:9092"):
        assert words in message


@pytest.mark.parametrize(("url", "named", "why"), BAD[:3])
def test_the_checker_asks_nobody_where_there_is_nobody_to_ask(url: str, named: str, why: str) -> None:
    with pytest.raises(UnreadableError, match=why):
        verify(url, patience_s=3600)


@pytest.mark.parametrize("command", ["verify", "status", "devices", "watch", "history", "dead-letters"])
def test_a_command_ends_at_once_with_one_sentence(command: str) -> None:
    line = [sys.executable, "-m", "outfitter_service.cli", command, "--bus", "kafka://a:99999"]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == (125 if command == "verify" else 1)
    assert done.stdout == ""
    (sentence,) = done.stderr.splitlines()
    assert "kafka://a:99999" in sentence
    assert "1 to 65535" in sentence
