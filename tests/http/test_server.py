"""The manager's HTTP under strangers: whoever holds connections, or speaks no HTTP, keeps no probe from its answer."""

from __future__ import annotations

import asyncio
import gzip
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from aiohttp import ClientSession, web

from outfitter_service.http import listener
from outfitter_service.http.connections import HEAD_S, KEEP_ALIVE_S, MOST, Connections
from outfitter_service.http.listener import Listening, serving
from outfitter_service.http.server import listening
from outfitter_service.metrics import Metrics
from support.managers.process import Manager, StartManager

pytestmark = pytest.mark.slow

ASKED = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"
HALF = b"GET /metrics HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture
def strangers() -> Iterator[ExitStack]:
    with ExitStack() as held:
        yield held


def connect(manager: Manager, held: ExitStack) -> socket.socket:
    host, port = manager.url.removeprefix("http://").split(":")
    return held.enter_context(socket.create_connection((host, int(port)), timeout=30))


def sockets_of(manager: Manager) -> int:
    count = 0
    for link in Path(f"/proc/{manager.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed by now
            count += str(link.readlink()).startswith("socket:")
    return count


@pytest.mark.parametrize("said", [b"", b"GET", HALF, ASKED])
def test_a_thousand_held_connections_keep_no_probe_from_its_answer(
    start_manager: StartManager, strangers: ExitStack, said: bytes
) -> None:
    manager = start_manager(descriptors=(512, 512))
    for _ in range(1000):
        held = connect(manager, strangers)
        if said:
            held.sendall(said)
    for path in ("/livez", "/readyz", "/metrics"):
        assert manager._get(path)[0] == 200
    manager.wait_for(lambda: sockets_of(manager) < MOST + 32)


class Fake:
    """As much of a service as HTTP shows."""

    ready = True
    condition = "serving"
    metrics = Metrics()


async def test_a_request_that_never_ends_is_ended_and_so_is_an_idle_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listener, "KEEP_ALIVE_S", 3600.0)  # aiohttp's own limit, which counts another clock's seconds
    now = 0.0
    async with listening(Fake(), "127.0.0.1:0", clock=lambda: now) as address:  # type: ignore[arg-type]
        host, port = address.split(":")

        async def open_with(said: bytes) -> asyncio.StreamReader:
            reader, writer = await asyncio.open_connection(host, int(port))
            writers.append(writer)
            writer.write(said)
            return reader

        writers: list[asyncio.StreamWriter] = []
        silent, half = await open_with(b""), await open_with(HALF)
        kept = await open_with(ASKED)
        assert (await kept.readuntil(b"ok\n")).startswith(b"HTTP/1.1 200")
        now = HEAD_S
        for each in (silent, half):
            assert await rest(each) == b""
        now = KEEP_ALIVE_S - 1
        writers[2].write(ASKED)
        assert (await kept.readuntil(b"ok\n")).startswith(b"HTTP/1.1 200")
        now += KEEP_ALIVE_S - 1
        writers[2].write(ASKED)
        assert (await kept.readuntil(b"ok\n")).startswith(b"HTTP/1.1 200")
        now += KEEP_ALIVE_S
        assert await rest(kept) == b""
        for writer in writers:
            writer.close()


async def test_no_body_is_unpacked() -> None:
    """Most are refused unread, and a small one can hold gigabytes of zeros."""
    packed = gzip.compress(b"0" * 100_000)

    async def size(request: web.Request) -> web.Response:
        return web.Response(text=str(len(await request.read())))

    def application(_: Connections) -> web.Application:
        app = web.Application()
        app.router.add_post("/", size)
        return app

    async with serving(application, Listening(address="127.0.0.1:0")) as address, ClientSession() as client:
        headers = {"Content-Encoding": "gzip"}
        async with client.post(f"http://{address}/", data=packed, headers=headers) as response:
            assert await response.text() == str(len(packed))


async def test_it_listens_on_ipv6_in_brackets_and_refuses_what_is_no_address() -> None:
    async with listening(Fake(), "[::1]:0") as address:  # type: ignore[arg-type]
        assert re.fullmatch(r"\[::1\]:[1-9][0-9]*", address)
    for wrong in ("a b:0", "::1:0", "127.0.0.1", "300.0.0.1:0"):
        with pytest.raises(listener.HttpError, match="write HOST:PORT"):
            async with listening(Fake(), wrong):  # type: ignore[arg-type]
                pytest.fail("it listens")


async def test_who_has_been_silent_for_longest_makes_room_for_the_next_one() -> None:
    now = 0.0
    async with listening(Fake(), "127.0.0.1:0", clock=lambda: now) as address:  # type: ignore[arg-type]
        host, port = address.split(":")
        opened = []
        for number in range(MOST + 1):
            now = number / 100
            reader, writer = await asyncio.open_connection(host, int(port))
            opened.append((reader, writer))
            writer.write(ASKED)
            assert (await reader.readuntil(b"ok\n")).startswith(b"HTTP/1.1 200")
        first, second, last = opened[0], opened[1], opened[-1]
        assert await rest(first[0]) == b""
        for reader, writer in (second, last):
            writer.write(ASKED)
            assert (await reader.readuntil(b"ok\n")).startswith(b"HTTP/1.1 200")
        for _, writer in opened:
            writer.close()


async def rest(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""


def ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(4096) == b""
    except ConnectionResetError:
        return True


def test_a_client_that_keeps_its_connection_is_answered_again_and_again(
    start_manager: StartManager, strangers: ExitStack
) -> None:
    kept = connect(start_manager(), strangers)
    for _ in range(50):
        kept.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        assert kept.recv(4096).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "said",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /metrics HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n\0\0\0\0\r\n\r\n",
    ],
)
def test_what_is_no_http_writes_no_line_of_the_log(
    start_manager: StartManager, strangers: ExitStack, said: bytes
) -> None:
    manager = start_manager()
    before = manager.log.read_text()
    stranger = connect(manager, strangers)
    stranger.sendall(said)
    stranger.shutdown(socket.SHUT_WR)
    while not ended(stranger):
        pass
    assert manager._get("/livez")[0] == 200
    new = manager.log.read_text().removeprefix(before)
    assert "outfitter.http" not in new
    assert "Traceback" not in new
    assert "aiohttp" not in new


def test_the_first_page_leads_to_the_others(start_manager: StartManager) -> None:
    manager = start_manager()
    status, page = manager._get("/")
    assert status == 200
    for path in ("metrics", "livez", "readyz"):
        assert f'href="{path}"' in page
        assert manager._get(f"/{path}")[0] == 200
