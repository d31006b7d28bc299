"""Which adapter serves which bus URL. An adapter is imported only to connect with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from outfitter_proto.bus.addresses import brokers
from outfitter_proto.bus.port import Bus

SYNTAX = "kafka://host:9092[,host2:9092] or sqlite:///path/to/bus.db"


class Scheme(NamedTuple):
    """One kind of bus."""

    prefix: str
    """How its URLs begin."""
    is_local: bool
    """Whether it is a file of this machine. Other buses take `kafka.…` settings."""
    check: Callable[[str], object]
    """Raises ValueError for a URL that is wrong, as far as that shows without the adapter."""
    connect: Callable[[str, Mapping[str, str] | None, bool], Bus]
    """Makes the adapter for a URL, from the login, and whether to create a bus that is not there."""


def _check_path(url: str) -> None:
    if not url.startswith("sqlite:///"):
        raise ValueError(f"is no bus; write {SYNTAX}")


def _connect_kafka(url: str, login: Mapping[str, str] | None, _create: bool) -> Bus:
    from outfitter_proto.bus.kafka import KafkaBus

    return KafkaBus(url, login=login)


def _connect_embedded(url: str, _login: Mapping[str, str] | None, create: bool) -> Bus:
    from outfitter_proto.bus.embedded import EmbeddedBus

    return EmbeddedBus(url, create=create)


SCHEMES = (
    Scheme("kafka://", is_local=False, check=brokers, connect=_connect_kafka),
    Scheme("sqlite:", is_local=True, check=_check_path, connect=_connect_embedded),
)


def find(url: str) -> Scheme | None:
    """The row of the table that a URL belongs to."""
    return next((scheme for scheme in SCHEMES if url.startswith(scheme.prefix)), None)


def is_local(url: str) -> bool:
    """Whether the URL names a file of this machine."""
    scheme = find(url)
    return scheme is not None and scheme.is_local
