"""Parses addresses: the brokers in a Kafka bus URL, and HOST:PORT to listen on. It imports no client, because the
configuration check uses it too."""

from __future__ import annotations

import re
from typing import NamedTuple

DEFAULT_PORT = 9092
KAFKA_SYNTAX = "kafka://host:9092[,host2:9092]"
FILE_SYNTAX = "sqlite:///path/to/bus.db"
"""The valid URLs of both buses, for messages."""

_LABEL = r"[\w-]{1,63}"
_HOST = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(\.{_LABEL})*\.?")
_FOUR_NUMBERS = re.compile(r"[0-9]+(\.[0-9]+){3}")
_PORT = re.compile(r"[0-9]{1,5}", re.ASCII)


class Node(NamedTuple):
    """The address of a broker or a listener; an IPv6 host is without brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def brokers(url: str) -> tuple[Node, ...]:
    """Parse `kafka://host[:port][,host[:port]…]`, with IPv6 addresses in brackets.

    Raises:
        ValueError: the URL has no broker, or an invalid one. The message has the wrong part and the valid form, but no
            part of a URL with a user name, a password or parameters.
    """
    if "@" in url or "?" in url:
        raise ValueError(
            f"holds more than addresses; write {KAFKA_SYNTAX}, and how to log in into "
            "kafka.sasl-username (OUTFITTER_KAFKA_SASL_USERNAME) and "
            "kafka.sasl-password-file (OUTFITTER_KAFKA_SASL_PASSWORD_FILE)"
        )
    addresses = url.removeprefix("kafka://").removesuffix("/")
    try:
        if addresses == url or not addresses.strip("/"):
            raise ValueError("names no broker")
        return tuple(_node(address) for address in addresses.split(","))
    except ValueError as error:
        raise ValueError(f"{error}; write {KAFKA_SYNTAX}, IPv6 addresses as [::1]:9092") from None


def listener(text: str) -> Node:
    """Parse `host:port` to listen on, with IPv6 addresses in brackets. Port 0 is any free one.

    Raises:
        ValueError: any other text. The message has the wrong part and the valid form.
    """
    try:
        return _node(text.strip(), default_port=None, least_port=0)
    except ValueError as error:
        raise ValueError(f"{error}; write HOST:PORT, such as 127.0.0.1:9477 or [::1]:9477") from None


def is_loopback(address: str) -> bool:
    """Whether `host` or `host:port` is an address or a name of this machine alone."""
    host = address.strip()
    if not host.endswith("]"):
        head, colon, port = host.rpartition(":")
        if colon and port.isdigit() and (":" not in head or head.endswith("]")):
            host = head
    host = host.removeprefix("[").removesuffix("]").rstrip(".").lower()
    if host == "localhost":
        return True
    try:
        from ipaddress import ip_address  # rarely needed

        return ip_address(host).is_loopback
    except ValueError:
        return False


def _node(address: str, *, default_port: int | None = DEFAULT_PORT, least_port: int = 1) -> Node:
    shown = repr(address if len(address) <= 80 else f"{address[:80]}…")
    if any(sign.isspace() for sign in address):
        raise ValueError(f"has white space in {shown}")
    host, colon, port = address.rpartition(":")
    if not colon or address.endswith("]"):
        if default_port is None:
            raise ValueError(f"has {shown}, which names no port")
        host, port = address, str(default_port)
    if "/" not in host and set(host) & set("[]:"):
        host = _ipv6(host, shown)
    elif not _names_a_host(host):
        raise ValueError(f"has {shown}, which names no host")
    if not _PORT.fullmatch(port) or not least_port <= int(port) < 65536:
        raise ValueError(f"has {shown}, whose port is no number from {least_port} to 65535")
    return Node(host, int(port))


def _names_a_host(host: str) -> bool:
    if not _HOST.fullmatch(host):
        return False
    try:
        if _FOUR_NUMBERS.fullmatch(host):
            from ipaddress import IPv4Address  # rarely needed

            IPv4Address(host)
        elif not host.isascii():
            host.encode("idna")  # the resolver does the same, and would raise the same error
    except ValueError:
        return False
    return True


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
