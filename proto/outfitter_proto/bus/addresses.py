"""Parses the brokers in a Kafka bus URL. It imports no client, because the configuration check uses it too."""

from __future__ import annotations

import re
from typing import NamedTuple

DEFAULT_PORT = 9092
_LABEL = r"[\w-]{1,63}"
_HOST = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(\.{_LABEL})*\.?")
_PORT = re.compile(r"[0-9]{1,5}", re.ASCII)


class Node(NamedTuple):
    """The address of a broker."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def brokers(url: str) -> tuple[Node, ...]:
    """Parse `kafka://host[:port][,host[:port]…]`, with IPv6 addresses in brackets.

    Raises:
        ValueError: no broker, or an invalid one. The message has the wrong part and the valid form. It repeats nothing
            of a URL with a user name, a password or parameters.
    """
    if "@" in url or "?" in url:
        raise ValueError(
            "holds more than addresses; write kafka://host:9092[,host2:9092], and how to log in into "
            "kafka.sasl-username (OUTFITTER_KAFKA_SASL_USERNAME) and "
            "kafka.sasl-password-file (OUTFITTER_KAFKA_SASL_PASSWORD_FILE)"
        )
    addresses = url.removeprefix("kafka://").removesuffix("/")
    try:
        if addresses == url or not addresses.strip("/"):
            raise ValueError("names no broker")
        return tuple(_node(address) for address in addresses.split(","))
    except ValueError as error:
        raise ValueError(f"{error}; write kafka://host:9092[,host2:9092], IPv6 addresses as [::1]:9092") from None


def _node(address: str) -> Node:
    shown = repr(address if len(address) <= 80 else f"{address[:80]}…")
    if any(sign.isspace() for sign in address):
        raise ValueError(f"has white space in {shown}")
    host, colon, port = address.rpartition(":")
    if not colon or address.endswith("]"):
        host, port = address, str(DEFAULT_PORT)
    if "/" not in host and set(host) & set("[]:"):
        host = _ipv6(host, shown)
    elif not _HOST.fullmatch(host):
        raise ValueError(f"has {shown}, which names no host")
    if not _PORT.fullmatch(port) or not 0 < int(port) < 65536:
        raise ValueError(f"has {shown}, whose port is no number from 1 to 65535")
    return Node(host, int(port))


def _ipv6(host: str, shown: str) -> str:
    """The address without its brackets."""
    from ipaddress import IPv6Address  # rarely needed

    inner = host.removeprefix("[").removesuffix("]")
    try:
        if f"[{inner}]" != host:
            raise ValueError
        IPv6Address(inner)
    except ValueError:
        raise ValueError(f"has {shown}, which is no IPv6 address in brackets") from None
    return inner
