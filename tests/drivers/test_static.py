"""The static driver's devices are those that the configuration says."""

import pytest

from outfitter_drivers.api import Device, DriverParams, NotEnoughDevicesError, Worker
from outfitter_drivers.static import StaticDriver, StaticDriverFactory
from outfitter_proto.records import Health


def static(settings: dict[str, str]) -> StaticDriver:
    return StaticDriverFactory().create_external_resource_driver(DriverParams(settings))


async def devices(settings: dict[str, str], host: str = "h") -> list[Device]:
    async for found in static(settings).inventory(host):
        return list(found)
    raise AssertionError("no devices at all")


async def test_a_count_makes_as_many_devices_with_consecutive_indexes() -> None:
    assert [device.properties["index"] for device in await devices({"count": " 3 "})] == ["0", "1", "2"]
    assert await devices({"count": "0"}) == []


async def test_names_give_indexes_by_their_order_and_descriptions_give_the_rest() -> None:
    settings = {
        "devices": "b; a;",
        "device.a.model": "X",
        "device.a.id": "LIC-1",
        "device.a.aliases": "old-1;old-2",
        "device.a.env.LICENCE": "k=1",
        "device.a.cdi": "example.com/licence=a",
        "device.b.health": "unhealthy",
        "device.b.reason": "expired",
        "device.b.part_of": "LIC-1",
        "device.b.pci.bus_id": "0000:01:00.0",
    }
    b, a = await devices(settings)
    assert a == Device(
        properties={"index": "1", "name": "a", "model": "X"},
        id="LIC-1",
        name="a",
        aliases=("old-1", "old-2"),
        env={"LICENCE": "k=1"},
        cdi=("example.com/licence=a",),
    )
    assert (b.health, b.reason, b.properties["pci.bus_id"]) == (Health.UNHEALTHY, "expired", "0000:01:00.0")
    assert b.part_of == "LIC-1"
    assert "part_of" not in b.properties


async def test_described_devices_alone_are_counted_as_people_count() -> None:
    found = await devices({f"device.d{n}.model": "X" for n in (10, 9, 2)})
    assert [device.properties["name"] for device in found] == ["d2", "d9", "d10"]


async def test_a_named_device_is_the_same_at_any_position() -> None:
    (_, before), (after,) = await devices({"devices": "a;b"}), await devices({"devices": "b"})
    assert (before.name, after.name) == ("b", "b")
    (described,) = await devices({"device.b.model": "X"})
    assert described.name == "b"
    (of_host,) = await devices({"hosts.h.devices": "b"})
    assert of_host.name == "b"


async def test_a_counted_device_has_no_name_but_its_index() -> None:
    assert [(device.id, device.name) for device in await devices({"count": "2", "device.0.model": "X"})] == [
        (None, None),
        (None, None),
    ]


async def test_a_host_with_settings_of_its_own_has_those_and_no_others() -> None:
    settings = {"count": "8", "hosts.gpu-3.example.com.devices": "z", "hosts.gpu-3.example.com.device.z.model": "Y"}
    settings["hosts.empty.count"] = "0"
    assert len(await devices(settings)) == 8
    (z,) = await devices(settings, "gpu-3.example.com")
    assert z.properties == {"index": "0", "name": "z", "model": "Y"}
    assert await devices(settings, "empty") == []


async def test_unhealthy_devices_are_not_named_to_a_worker() -> None:
    driver = static({"devices": "a;b", "device.a.health": "unknown"})
    (info,) = await driver.retrieve_resource_info(1, Worker(host="h", resource="r"))
    assert info["name"] == "b"
    with pytest.raises(NotEnoughDevicesError, match="2 wanted, but the configuration gives host h 1 healthy ones"):
        await driver.retrieve_resource_info(2, Worker(host="h", resource="r"))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "no devices; valid is one of"),
        ({"cuont": "3"}, "cuont is an unknown setting; did you mean 'count'"),
        ({"count": "-1"}, "count is '-1'; valid is a whole number from 0 to 10000"),
        ({"count": "10001"}, "count is '10001'"),
        ({"count": "3", "devices": "a"}, "count is set, and so is devices"),
        ({"devices": "a;a"}, "devices names 'a' twice"),
        ({"devices": "a,b"}, "devices has 'a,b'.*split on ;"),
        ({"devices": "a", "device.b.x": "1"}, r"device\.b\.x describes 'b', which is not among the devices: a$"),
        ({"device.a": "1"}, r"device\.a is invalid"),
        ({"device.a.id": "1", "device.b.id": "1"}, r"device\.b\.id is '1', which a has already"),
        ({"device.a.index": "1", "device.b.x": "1"}, r"device\.a\.index is '1', which b has already"),
        ({"device.a.index": "1", "device.b.index": "1"}, r"device\.b\.index is '1', which a has already"),
        ({"device.a.health": "ill"}, r"device\.a\.health is 'ill'; valid are healthy, unhealthy, unknown"),
        ({"device.a.env.A=B": "1"}, r"device\.a\.env\.A=B"),
        ({"device.a.env.LD_PRELOAD": "1"}, r"device\.a\.env\.LD_PRELOAD is a variable that no driver may set: .*code"),
        ({"hosts.x": "1"}, r"hosts\.x is an unknown setting"),
        ({"hosts.x.count": "many"}, "count is 'many'"),
    ],
)
def test_a_wrong_setting_is_an_error_that_names_it(settings: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        static(settings)
