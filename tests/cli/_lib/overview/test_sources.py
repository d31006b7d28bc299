"""A picture has all items of its source, however many pages they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from outfitter_service.api import routes
from outfitter_service.api.items import QueueItem
from outfitter_service.api.paging import MOST
from outfitter_service.cli._lib.overview import sources
from outfitter_service.cli._lib.overview.sources import BusSource, NoPictureError, of_api
from outfitter_service.query.errors import OutfitterCliError
from support.api import fleet_of, follower_of, host_record, serving_api

HOSTS = [f"host-{number:04}" for number in range(MOST + 1)]


async def test_a_picture_has_the_items_of_all_pages() -> None:
    follower = follower_of(fleet_of(*(host_record(name, gpus=2) for name in HOSTS)))
    picture = await BusSource(follower, None).picture()
    assert [host.host for host in picture.hosts] == HOSTS
    assert len(picture.devices) == 2 * len(HOSTS)


async def test_a_picture_of_one_host_has_nothing_of_others() -> None:
    follower = follower_of(fleet_of(*(host_record(name, gpus=2) for name in HOSTS[:2])))
    picture = await BusSource(follower, HOSTS[1]).picture()
    assert [host.host for host in picture.hosts] == HOSTS[1:2]
    assert {device.host for device in picture.devices} == set(HOSTS[1:2])


async def test_dead_letters_that_cannot_be_read_cost_nothing_else() -> None:
    follower = follower_of(fleet_of(host_record("h", ill=1)))
    assert follower.fleet is not None
    follower.fleet.letters.unavailable = "topic 'outfitter.dead-letters' is not on the bus"
    async with (
        serving_api(follower) as client,
        of_api(str(client._base_url or ""), None, token=None, tls=None) as api,
    ):
        for source in (BusSource(follower, None), api):
            picture = await source.picture()
            assert ([host.host for host in picture.hosts], len(picture.troubles)) == (["h"], 1)


async def test_a_host_that_is_not_there_has_no_picture() -> None:
    follower = follower_of(fleet_of(host_record("gpu-1")))
    with pytest.raises(NoPictureError, match=r"there is no host 'gpu-l'.*did you mean gpu-1"):
        await BusSource(follower, "gpu-l").picture()


async def test_an_answer_of_an_api_is_read_whole_and_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    async def large(_: web.Request) -> web.Response:
        return web.json_response({"items": [], "padding": "x" * 500_000})

    app = web.Application()
    app.router.add_get("/api/v1/queue", large)
    async with TestServer(app) as server, of_api(str(server.make_url("")), None, token=None, tls=None) as source:
        assert (await source.page(QueueItem, "queue", {})).items == []
        monkeypatch.setattr(sources, "LARGEST", 400_000)
        with pytest.raises(OutfitterCliError, match="more than 400,000 bytes"):
            await source.page(QueueItem, "queue", {})


def endless(body: Callable[[int], Any]) -> web.Application:
    """An API whose lists never end. `body`: of the page with this number."""
    count = 0

    async def page(_: web.Request) -> web.Response:
        nonlocal count
        count += 1
        return web.json_response(body(count))

    async def status(_: web.Request) -> web.Response:
        return web.json_response(msgspec.to_builtins(routes.status(follower_of(fleet_of()), None, None, {})))

    app = web.Application()
    app.router.add_get("/api/v1/status", status)
    app.router.add_get("/api/v1/{name}", page)
    return app


HOST = msgspec.to_builtins(routes._host(fleet_of(host_record("h")), "h"))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (lambda _: {"items": [HOST], "next": "again"}, "do not end"),
        (lambda count: {"items": [], "next": str(count)}, "do not end"),
        (lambda count: {"items": [HOST], "next": str(count)}, "more than .* bytes"),
    ],
)
async def test_pages_without_an_end_end_the_picture(
    body: Callable[[int], Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "MOST_TAKEN", 50_000)
    async with TestServer(endless(body)) as server, of_api(str(server.make_url("")), None, token=None, tls=None) as api:
        with pytest.raises(OutfitterCliError, match=said):
            await api.picture()


async def test_a_picture_that_takes_too_long_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PICTURE_S", 0.2)
    app = endless(lambda count: {"items": [HOST], "next": str(count)})
    async with TestServer(app) as server, of_api(str(server.make_url("")), None, token=None, tls=None) as api:
        with pytest.raises(NoPictureError, match="its pages do not end within"):
            await api.picture()
