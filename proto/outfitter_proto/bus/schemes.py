"""The adapter for each bus URL. Only connecting imports an adapter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from outfitter_proto.bus.addresses import FILE_SYNTAX, KAFKA_SYNTAX, brokers
from outfitter_proto.bus.port import Bus, Create

SYNTAX = f"{KAFKA_SYNTAX} or {FILE_SYNTAX}"
"""The valid URLs, for messages."""


class Scheme(NamedTuple):
    """One kind of bus."""

    prefix: str
    """The beginning of its URLs."""
    is_local: bool
    """Whether it is a file of this machine. Other buses take `kafka.…` settings."""
    check: Callable[[str], object]
    """Raises ValueError for a wrong URL, as far as it can be checked without the adapter."""
    connect: Callable[[str, Mapping[str, str] | None, Create, str], Bus]
    """Makes the adapter from the URL, the log-in settings, what it may create of a missing bus, and the client id."""


def _check_path(url: str) -> None:
    if not url.startswith("sqlite:///"):
        raise ValueError(f"is no bus; write {SYNTAX}")


def _connect_kafka(url: str, login: Mapping[str, str] | None, _create: Create, client: str) -> Bus:
    from outfitter_proto.bus.kafka import KafkaBus

    return KafkaBus(url, login=login, client=client)


def _connect_embedded(url: str, _login: Mapping[str, str] | None, create: Create, _client: str) -> Bus:
    from outfitter_proto.bus.embedded import EmbeddedBus

    return EmbeddedBus(url, create=create)


SCHEMES = (
    Scheme("kafka://", is_local=False, check=brokers, connect=_connect_kafka),
    Scheme("sqlite:", is_local=True, check=_check_path, connect=_connect_embedded),
)


def find(url: str) -> Scheme | None:
    """The row of the table for a URL; None: no bus has this URL."""
    return next((scheme for scheme in SCHEMES if url.startswith(scheme.prefix)), None)


def is_local(url: str) -> bool:
    """Whether the URL names a file of this machine."""
    scheme = find(url)
    return scheme is not None and scheme.is_local
