"""The name of the lock that a manager of one host holds on its machine, and whether somebody holds it."""

from __future__ import annotations

import hashlib
import socket

PREFIX = "\0outfitter-manager/"
"""How the name of each lock begins."""


def socket_name(host: str) -> str:
    """The abstract socket's name, with a digest of the host if it exceeds the 107 bytes that unix(7) allows."""
    name = f"{PREFIX}{host}"
    return name if len(name) <= 107 else f"{PREFIX}sha256/{hashlib.sha256(host.encode()).hexdigest()}"


def is_held(host: str) -> bool:
    """Whether a process in this network namespace holds the lock. Every user may, so it is a sign and no proof."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(socket_name(host))
        except OSError:
            return False
    return True
