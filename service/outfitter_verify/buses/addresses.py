"""Parses the brokers in a Kafka bus URL before connecting, because librdkafka retries a wrong address for ever."""

from __future__ import annotations

import ipaddress
import re

from outfitter_verify.buses import UnreadableError

DEFAULT_PORT = "9092"
_ADDRESS = re.compile(r"(?:\[(?P<ipv6>[^][]*)\]|(?P<host>[^][:]*))(?::(?P<port>[^:]*))?")
_HOST = re.compile(r"[\w-]{1,63}(\.[\w-]{1,63})*\.?")


def brokers(bus: str) -> list[tuple[str, int]]:
    """Host and port of each address in `kafka://host[:port][,host[:port]…]`, or in the same without `kafka://`.

    Raises:
        UnreadableError: an invalid address. The message has it and the valid form, but no password.
    """
    addresses = []
    for address in bus.removeprefix("kafka://").removesuffix("/").split(","):
        try:
            addresses.append(_broker(address))
        except ValueError as why:
            shown = "the URL" if set("@?") & set(bus) else f"{_short(bus)} has {_short(address)}, which"
            raise UnreadableError(
                f"{shown} {why}; write kafka://host:9092[,host2:9092], IPv6 addresses as [::1]:9092"
            ) from None
    return addresses


def _broker(address: str) -> tuple[str, int]:
    if not address.strip("/"):
        raise ValueError("names no broker, hence no host")
    if re.search(r"\s", address):
        raise ValueError("has white space in it")
    if set("@?") & set(address):
        raise ValueError("has more than hosts and ports: OUTFITTER_KAFKA_… variables have the log-in settings")
    if "/" in address:
        raise ValueError("names no host")
    match = _ADDRESS.fullmatch(address)
    if match is None:
        raise ValueError("is no IPv6 address in brackets")
    host, port = match["host"], match["port"] if match["port"] is not None else DEFAULT_PORT
    if match["ipv6"] is not None:
        host = _ipv6(match["ipv6"])
    elif len(host) > 253 or not _HOST.fullmatch(host) or not _can_be_resolved(host):
        raise ValueError("names no host")
    if not re.fullmatch(r"[0-9]{1,5}", port, re.ASCII) or not 1 <= int(port) <= 65_535:
        raise ValueError("has no port from 1 to 65535")
    return host, int(port)


def _can_be_resolved(host: str) -> bool:
    try:
        if re.fullmatch(r"[0-9]+(\.[0-9]+){3}", host):
            ipaddress.IPv4Address(host)
        host.encode("idna")
    except ValueError:
        return False
    return True


def _ipv6(text: str) -> str:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        raise ValueError("is no IPv6 address in brackets") from None
    return text


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:80]}…")
