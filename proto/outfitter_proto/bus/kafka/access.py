"""Where the brokers are and how to log in: the bus URL and the environment, turned into aiokafka's arguments.

Secrets never stand in the URL: it is printed in messages and status pages.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from outfitter_proto.bus.port import BusConfigurationError

DEFAULT_PORT = 9092
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")

_PREFIX = "OUTFITTER_KAFKA_"
_SETTINGS = (
    "SECURITY_PROTOCOL", "SASL_MECHANISM", "SASL_USERNAME", "SASL_PASSWORD", "SASL_PASSWORD_FILE",
    "CA_FILE", "CERT_FILE", "KEY_FILE",
)  # fmt: skip


class Node(NamedTuple):
    """The address of a broker."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Access(NamedTuple):
    """The addresses to begin with, and aiokafka's arguments for logging in (empty: plaintext)."""

    url: str
    nodes: tuple[Node, ...]
    options: Mapping[str, Any]


def access(url: str, environment: Mapping[str, str] = os.environ) -> Access:
    """Read `kafka://host[:port][,host[:port]…]` and the `OUTFITTER_KAFKA_…` settings of the environment.

    Raises:
        BusConfigurationError: the URL or a setting is not usable; the message names it and what is valid.
    """
    return Access(url, _nodes(url), _options(environment))


def _nodes(url: str) -> tuple[Node, ...]:
    rest = url.removeprefix("kafka://")
    if rest == url or not rest.strip("/"):
        raise BusConfigurationError(f"{url!r} is no Kafka URL: write kafka://host:9092[,host2:9092]")
    return tuple(_node(url, part) for part in rest.rstrip("/").split(","))


def _node(url: str, part: str) -> Node:
    if "@" in part or "/" in part or "?" in part:
        raise BusConfigurationError(
            f"{part.rpartition('@')[2]!r} in the Kafka URL is no host:port; "
            f"user names and passwords belong into {_PREFIX}SASL_USERNAME and {_PREFIX}SASL_PASSWORD_FILE"
        )
    host, colon, port = part.rpartition(":")
    if not colon or part.endswith("]"):
        host, port = part, str(DEFAULT_PORT)
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise BusConfigurationError(f"{part!r} in {url!r} is no host:port")
    return Node(host.removeprefix("[").removesuffix("]"), int(port))


def _options(environment: Mapping[str, str]) -> dict[str, Any]:
    given = {name: environment[_PREFIX + name] for name in _SETTINGS if environment.get(_PREFIX + name)}
    protocol = given.get("SECURITY_PROTOCOL", "PLAINTEXT")
    if protocol not in PROTOCOLS:
        raise BusConfigurationError(f"{_PREFIX}SECURITY_PROTOCOL={protocol!r}: valid are {', '.join(PROTOCOLS)}")
    options: dict[str, Any] = {"security_protocol": protocol}
    if protocol.endswith("SSL"):
        options["ssl_context"] = _tls(given)
    if protocol.startswith("SASL"):
        options |= _login(given)
    unused = [name for name in given if name != "SECURITY_PROTOCOL" and not _matters(name, protocol)]
    if unused:
        raise BusConfigurationError(
            f"{_PREFIX}{unused[0]} has no effect with security protocol {protocol}: set {_PREFIX}SECURITY_PROTOCOL"
        )
    return options if protocol != "PLAINTEXT" else {}


def _matters(name: str, protocol: str) -> bool:
    return protocol.startswith("SASL") if name.startswith("SASL") else protocol.endswith("SSL")


def _tls(given: Mapping[str, str]) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=given.get("CA_FILE"))
        if "CERT_FILE" in given:
            context.load_cert_chain(given["CERT_FILE"], given.get("KEY_FILE"))
    except OSError as error:
        raise BusConfigurationError(f"cannot use {_PREFIX}CA_FILE, CERT_FILE or KEY_FILE: {error}") from error
    return context


def _login(given: Mapping[str, str]) -> dict[str, Any]:
    mechanism = given.get("SASL_MECHANISM", "SCRAM-SHA-512")
    if mechanism not in MECHANISMS:
        raise BusConfigurationError(f"{_PREFIX}SASL_MECHANISM={mechanism!r}: valid are {', '.join(MECHANISMS)}")
    password = given.get("SASL_PASSWORD")
    if password is None and "SASL_PASSWORD_FILE" in given:
        try:
            password = Path(given["SASL_PASSWORD_FILE"]).read_text().rstrip("\r\n")
        except OSError as error:
            raise BusConfigurationError(f"{_PREFIX}SASL_PASSWORD_FILE: {error}") from error
    if password is None or "SASL_USERNAME" not in given:
        raise BusConfigurationError(
            f"to log in, {_PREFIX}SASL_USERNAME and {_PREFIX}SASL_PASSWORD_FILE (or {_PREFIX}SASL_PASSWORD) must be set"
        )
    return {
        "sasl_mechanism": mechanism,
        "sasl_plain_username": given["SASL_USERNAME"],
        "sasl_plain_password": password,
    }
