"""The live screen keeps its last picture whatever its source answers, and says why and how old it is."""

from __future__ import annotations

import io
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import anyio
import pytest
from aiohttp import web
from rich.console import Console

from outfitter_service.api.access import Guard, read_token
from outfitter_service.api.application import MOST_CONNECTIONS, application
from outfitter_service.api.follower import Follower
from outfitter_service.cli._lib.errors import leaves
from outfitter_service.cli._lib.overview import live
from outfitter_service.cli._lib.overview.sources import BusSource, PictureSource, of_api
from outfitter_service.http.listener import Listening, serving
from outfitter_service.query.errors import OutfitterCliError
from support.api import OPEN, fleet_of, follower_of, host_record

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]

FRESH = "Nothing needs you."
OLD = "This picture is 5m old: "


class Screen(io.StringIO):
    """What the terminal was told to show since `until` last found something."""

    def __init__(self) -> None:
        super().__init__()
        self._read = 0
        self._written = anyio.Event()

    def write(self, text: str) -> int:
        self._written.set()
        return super().write(text)

    async def until(self, text: str) -> None:
        while (at := self.getvalue().find(text, self._read)) < 0:
            self._written = anyio.Event()
            await self._written.wait()
        self._read = at + len(text)


class Api:
    """An API, or what stands between it and its reader. `answer`: what it answers instead; None: the API itself."""

    def __init__(self) -> None:
        self.answer: Answer | None = None
        self.follower = follower_of(fleet_of(host_record("h")))
        self.follower.as_of = datetime.now(UTC) - timedelta(minutes=5, seconds=1)

    @asynccontextmanager
    async def serving(self, guard: Guard = OPEN) -> AsyncIterator[str]:
        @web.middleware
        async def between(request: web.Request, handler: Answer) -> web.StreamResponse:
            return await (self.answer or handler)(request)

        def made(connections: object) -> web.Application:
            app = application(self.follower, connections, guard)  # type: ignore[arg-type]
            app.middlewares.insert(0, between)
            return app

        async with serving(made, Listening(address="127.0.0.1:0", most=MOST_CONNECTIONS)) as address:
            yield f"http://{address}"


@asynccontextmanager
async def shown(source: PictureSource, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Screen]:
    """The live screen of a source, until `q` is typed after the block."""
    monkeypatch.setattr(live, "INTERVAL_S", 0.01)
    keyboard, stdin = os.openpty()
    screen = Screen()
    try:
        with open(stdin) as typed, anyio.fail_after(10):  # noqa: PTH123 - a descriptor
            monkeypatch.setattr("sys.stdin", typed)
            async with anyio.create_task_group() as tasks:
                console = Console(file=screen, force_terminal=True, width=120, height=24, highlight=False)
                tasks.start_soon(live.run, source, console)
                yield screen
                os.write(keyboard, b"q")
    finally:
        os.close(keyboard)


async def bad_gateway(_: web.Request) -> web.StreamResponse:
    return web.Response(status=502, text="<html>Bad Gateway</html>")


async def another_server(_: web.Request) -> web.StreamResponse:
    return web.Response(status=404, text="there is nothing here")


async def cut_page(_: web.Request) -> web.StreamResponse:
    return web.Response(text='{"cluster": "outf', content_type="application/json")


async def cut_connection(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b"{")
    assert request.transport is not None
    request.transport.close()
    return response


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (bad_gateway, "answers 502: <html>"),
        (another_server, "answers 404: there is nothing here"),
        (cut_page, "answers with something that is no page of Outfitter's API"),
        (cut_connection, "cannot be read: "),
    ],
)
async def test_the_last_picture_stays_whatever_the_source_answers(
    answer: Answer, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = Api()
    async with (
        api.serving() as url,
        of_api(url, None, token=None, tls=None) as source,
        shown(source, monkeypatch) as screen,
    ):
        await screen.until(FRESH)
        api.answer = answer
        await screen.until(OLD)
        await screen.until(why)
        await screen.until("FLEET 1")
        api.answer = None
        await screen.until(FRESH)


async def test_it_waits_for_its_first_picture_behind_a_proxy_without_its_api(monkeypatch: pytest.MonkeyPatch) -> None:
    api = Api()
    api.answer = bad_gateway
    async with (
        api.serving() as url,
        of_api(url, None, token=None, tls=None) as source,
        shown(source, monkeypatch) as screen,
    ):
        await screen.until("answers 502")
        api.answer = None
        await screen.until(FRESH)


async def test_it_ends_if_there_never_was_a_picture_and_there_will_be_none(monkeypatch: pytest.MonkeyPatch) -> None:
    api = Api()
    api.answer = another_server
    async with api.serving() as url, of_api(url, None, token=None, tls=None) as source:
        with pytest.raises(BaseExceptionGroup) as raised:
            async with shown(source, monkeypatch) as screen:
                await screen.until("never")
    (error,) = leaves(raised.value)
    assert isinstance(error, OutfitterCliError)
    assert "answers 404" in str(error)


async def test_a_token_that_is_renewed_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, of_api_now = tmp_path / "token", [b"1" * 32]
    file.write_bytes(of_api_now[0])
    api = Api()
    guard = Guard(token=lambda: of_api_now[-1], local=True)
    async with (
        api.serving(guard) as url,
        of_api(url, None, token=lambda: read_token(file), tls=None) as source,
        shown(source, monkeypatch) as screen,
    ):
        await screen.until(FRESH)
        of_api_now.append(b"2" * 32)
        await screen.until(OLD)
        await screen.until("answers 401")
        file.unlink()
        await screen.until("the token cannot be read")
        file.write_bytes(of_api_now[-1])
        await screen.until(FRESH)


async def test_a_host_that_has_not_appeared_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    follower: Follower = follower_of(fleet_of(host_record("h-1")))
    async with shown(BusSource(follower, "h-2"), monkeypatch) as screen:
        await screen.until("there is no host 'h-2'")
        follower.fleet = fleet_of(host_record("h-1"), host_record("h-2"))
        await screen.until(FRESH)
