"""A picture has all items of its source, however many pages they are."""

from __future__ import annotations

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

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


async def test_dead_letters_that_cannot_be_read_cost_the_letters_only() -> None:
    follower = follower_of(fleet_of(host_record("h")))
    assert follower.fleet is not None
    follower.fleet.letters.unavailable = "topic 'outfitter.dead-letters' is not on the bus"
    async with (
        serving_api(follower) as client,
        of_api(str(client._base_url or ""), None, token=None, tls=None) as api,
    ):
        for source in (BusSource(follower, None), api):
            picture = await source.picture()
            assert ([host.host for host in picture.hosts], [*picture.letters]) == (["h"], [])


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
