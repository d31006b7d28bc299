"""A TCP proxy that forgets idle connections in silence, as firewalls and load balancers do: no FIN, no RST, no answer.

    with ForgetfulProxy(port) as proxy:
        proxy.forget()

It needs a listener of the broker's for clients alone (`broker_behind`), or the brokers' own connections end, too.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from support.kafka.broker import QUICK_RETURN, Broker, KafkaBroker, answers, free_port
from support.polling import until


class _Flow:
    """One connection, as the proxy sees it."""

    def __init__(self) -> None:
        self.is_forgotten = False
        self.last_bytes = time.monotonic()


class ForgetfulProxy:
    """One listening port in front of a port on this machine. `idle_s`: flows that were idle for so long are forgotten
    at their next byte; None: only `forget` does that."""

    def __init__(self, listens: int, port: int, *, idle_s: float | None = None) -> None:
        self._port = port
        self.idle_s = idle_s
        self._flows: set[_Flow] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="forgetful-proxy", daemon=True)
        self._thread.start()
        self._server = self._do(asyncio.start_server(self._accept, "127.0.0.1", listens))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def forget(self) -> None:
        """Forget all present connections."""
        self._do(self._forget_all())

    def has_idle(self, seconds: float) -> bool:
        """Whether some connection has been idle for so long."""
        now = time.monotonic()
        return any(now - flow.last_bytes > seconds for flow in list(self._flows) if not flow.is_forgotten)

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _forget_all(self) -> None:
        for flow in self._flows:
            flow.is_forgotten = True

    async def _close(self) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        flow = _Flow()
        try:
            from_broker, to_broker = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            writer.close()
            return
        self._flows.add(flow)
        try:
            with suppress(OSError, asyncio.CancelledError):
                await asyncio.wait(
                    [
                        asyncio.ensure_future(self._pump(reader, to_broker, flow)),
                        asyncio.ensure_future(self._pump(from_broker, writer, flow)),
                    ],
                    return_when=asyncio.FIRST_COMPLETED,
                )
        finally:
            self._flows.discard(flow)
            writer.close()
            to_broker.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, flow: _Flow) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                if self.idle_s is not None and time.monotonic() - flow.last_bytes > self.idle_s:
                    flow.is_forgotten = True
                flow.last_bytes = time.monotonic()
                if not flow.is_forgotten:
                    writer.write(data)
                    await writer.drain()


@contextmanager
def broker_behind(folder: Path, *, idle_s: float | None = None) -> Iterator[tuple[KafkaBroker, ForgetfulProxy]]:
    """A broker whose clients go through a forgetful proxy, and the proxy."""
    clients, offered, own, controller = (free_port() for _ in range(4))
    settings = QUICK_RETURN | {
        "controller.quorum.voters": f"1@127.0.0.1:{controller}",
        "listeners": f"OWN://127.0.0.1:{own},CLIENTS://127.0.0.1:{clients},CONTROLLER://127.0.0.1:{controller}",
        "advertised.listeners": f"OWN://127.0.0.1:{own},CLIENTS://127.0.0.1:{offered}",
        "listener.security.protocol.map": "OWN:PLAINTEXT,CLIENTS:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "inter.broker.listener.name": "OWN",
    }
    broker = Broker(folder, settings, port=own)
    try:
        broker.start()
        until(lambda: answers(f"127.0.0.1:{clients}"), broker.log_tail)  # it opens its listeners one after the other
        with ForgetfulProxy(offered, clients, idle_s=idle_s) as proxy:
            yield KafkaBroker(f"127.0.0.1:{offered}"), proxy
    finally:
        broker.stop()
