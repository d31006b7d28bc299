"""What `outfitter webhook` takes of memory while strangers send large reviews and read no answer."""

from __future__ import annotations

import socket
from contextlib import ExitStack, suppress
from pathlib import Path

from msgspec import Struct

from bench import machine
from outfitter_service.http.connections import MOST
from support.webhook import Authority, Webhook, review

LIMIT_MIB = 64.0
"""The aim: so many MiB more."""
POD_BYTES = 4 * 1024 * 1024 - 8192
ASKING = {"outfitter.dev/resources": "gpu"}


class WebhookFigures(Struct):
    """`memory_before`, `memory_with_strangers`: of the process, in bytes. `answered`: whether an API server was."""

    memory_before: int
    memory_with_strangers: int
    answered: bool


def measure(folder: Path) -> WebhookFigures:
    """Hold as many connections as the webhook has, each with a pod of 4 MiB whose answer is not read."""
    folder.mkdir()
    authority = Authority(folder)
    webhook = Webhook(folder, authority)
    try:
        webhook.post(review(ASKING))
        before = machine.resident_bytes(webhook.pid)
        body = review(ASKING, {"name": "a", "resources": {"x": "A" * POD_BYTES}})
        head = (
            f"POST /mutate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        most = before
        with ExitStack() as held:
            for _ in range(MOST):
                plain = held.enter_context(socket.socket())
                plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                plain.connect(webhook.address())
                with suppress(OSError):  # it may be ended to make room
                    stranger = authority.context().wrap_socket(plain, server_hostname="localhost")
                    held.enter_context(stranger).sendall(head.encode() + body)
                most = max(most, machine.resident_bytes(webhook.pid))
            answered = webhook.post(review(ASKING))[0] == 200
            most = max(most, machine.resident_bytes(webhook.pid))
        return WebhookFigures(before, most, answered)
    finally:
        webhook.stop()
