"""Looks up the name of a broker before connecting to it, so that a name that nobody knows, or a silent name server, is
told from a silent broker. Event loops themselves log an error if a lookup fails after its time limit.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from typing import Any

from outfitter_proto.bus.addresses import Node


async def look_up(node: Node, *, within: float) -> None:
    """Look up the node's name, if it is one. `within`: seconds.

    Raises:
        socket.gaierror: it is not known, or no name server answers in time.
    """
    try:
        ipaddress.ip_address(node.host.partition("%")[0])
    except ValueError:
        pass
    else:
        return
    lookup = asyncio.ensure_future(asyncio.get_running_loop().getaddrinfo(node.host, node.port))
    lookup.add_done_callback(_mark_error_seen)
    done, _ = await asyncio.wait([lookup], timeout=within)
    if not done:
        raise socket.gaierror(socket.EAI_AGAIN, f"no name server answers within {within:g} s")
    lookup.result()


def _mark_error_seen(lookup: asyncio.Future[Any]) -> None:
    if not lookup.cancelled():
        lookup.exception()
