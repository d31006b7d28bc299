"""A picture has all items of its source, however many pages they are."""

from __future__ import annotations

from outfitter_service.api.paging import MOST
from outfitter_service.cli._lib.overview.sources import BusSource
from support.api import fleet_of, follower_of, host_record

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
