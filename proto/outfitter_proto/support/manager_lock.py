"""The name of the lock that a manager of one host holds on its machine, and who holds it."""

from __future__ import annotations

import hashlib
import socket
import struct

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


def peer_of(name: str) -> tuple[int, int] | None:
    """The process and the user behind a second socket of the same name, by which the holder names itself (SO_PEERCRED
    of unix(7)); None: nobody does. Process 0 is one that this process cannot see."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        try:
            peer.setblocking(False)
            peer.connect(name)
            pid, uid, _ = struct.unpack("=3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        except OSError:
            return None
    return pid, uid


def holder(host: str) -> int | None:
    """The process that holds the lock; 0: one that is not named, None: nobody does."""
    if not is_held(host):
        return None
    peer = peer_of(socket_name(host))
    return 0 if peer is None else peer[0]
