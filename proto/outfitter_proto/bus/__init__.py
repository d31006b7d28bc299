"""The bus port and its two adapters. `connect` picks the adapter from a URL and imports only that one."""

from __future__ import annotations

import os
from collections.abc import Mapping

from outfitter_proto.bus import schemes
from outfitter_proto.bus.port import (
    Bus,
    BusAccessError,
    BusAuthenticationError,
    BusAuthorizationError,
    BusConfigurationError,
    BusError,
    BusUnavailableError,
    CommitUnknownError,
    Entry,
    FencedError,
    MemberReplacedError,
    Membership,
    Message,
    MissingBusError,
    OffsetOutOfRangeError,
    Reader,
    Right,
    TooLargeError,
    TopicInfo,
    TopicShape,
    TopicSpec,
    UnknownTopicError,
    Writer,
)

DEFAULT_BUS = "sqlite:////var/lib/outfitter/bus.db"
"""One system-wide file, never one a user: two users' workers must meet on the same bus."""


def connect(url: str | None = None, login: Mapping[str, str] | None = None, *, create: bool = True) -> Bus:
    """The bus at `url`, else at `OUTFITTER_BUS`, else `DEFAULT_BUS`. Connects to nothing yet.

    `kafka://host:9092,host2:9092` or `sqlite:///absolute/path/bus.db` (three slashes, then the path). `login` says
    how to be let in by Kafka's brokers, by the names of `kafka.access.SETTINGS`; the environment says the rest.
    `create` False: use an embedded bus that is there, and make none; starting says that there is none.

    Raises:
        BusConfigurationError: the URL names no bus we know, or nobody can log in like this.
    """
    url = url or os.environ.get("OUTFITTER_BUS") or DEFAULT_BUS
    scheme = schemes.find(url)
    if scheme is None:
        raise BusConfigurationError(f"{url!r} is no bus URL: write {schemes.SYNTAX}")
    return scheme.connect(url, login, create)


__all__ = [
    "DEFAULT_BUS",
    "Bus",
    "BusAccessError",
    "BusAuthenticationError",
    "BusAuthorizationError",
    "BusConfigurationError",
    "BusError",
    "BusUnavailableError",
    "CommitUnknownError",
    "Entry",
    "FencedError",
    "MemberReplacedError",
    "Membership",
    "Message",
    "MissingBusError",
    "OffsetOutOfRangeError",
    "Reader",
    "Right",
    "TooLargeError",
    "TopicInfo",
    "TopicShape",
    "TopicSpec",
    "UnknownTopicError",
    "Writer",
    "connect",
]
