"""What a restart leaves alone: live allocations, whatever the configuration says now; and what drivers see change."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.conftest import Serve
from support.checker.verdict import verdict
from support.managers.in_process import another, deregister, heartbeat, register, static
from support.managers.process import add_device, files_config

TWO = (
    'external-resources = ["gpu", "disk"]\n'
    '[external-resource.gpu]\namount = {gpu}\ndriver = "static"\nparam.count = {count}\n'
    '[external-resource.disk]\namount = 1\ndriver = "static"\nparam.count = 2\n'
)


async def test_other_amounts_after_a_restart_touch_no_live_allocation(serve: Serve) -> None:
    async with serve(TWO.format(gpu=1, count=4)) as manager:
        await manager.say(register("w"))
        before = await manager.state("w", "allocated")
        assert before["request"]["amounts"] == {"gpu": 1, "disk": 1}
    async with serve(TWO.format(gpu=3, count=4), identity=another()) as manager:
        await manager.say(register("w"), heartbeat("w"), register("next"))
        after = await manager.state("next", "allocated")
        assert len(after["resources"]["gpu"]) == 3
        assert (await manager.records())["h/w/1"] == before
    assert (await verdict(manager.bus.url)).violations == ()


async def test_a_resource_that_is_removed_stays_with_its_holder_and_is_denied_to_others(serve: Serve) -> None:
    async with serve(TWO.format(gpu=1, count=2)) as manager:
        await manager.say(register("w", gpu=1, disk=1), register("waiting", gpu=2))
        before = await manager.state("w", "allocated")
        await manager.state("waiting", "pending")
    async with serve(static(2, "disk"), identity=another()) as manager:
        # who waits for it is looked at again, with what is configured now
        record = await manager.state("waiting", "failed")
        assert record["reason_code"] == "unknown-resource"
        await manager.say(register("next", gpu=1), register("other", disk=2))
        assert (await manager.state("next", "failed"))["reason_code"] == "unknown-resource"
        assert (await manager.state("other", "pending"))["reason_code"] == "busy"
        assert (await manager.records())["h/w/1"] == before
        await manager.say(deregister("w"))
        await manager.state("other", "allocated")


async def test_a_device_that_is_gone_after_a_restart_stays_with_its_holder_and_is_lent_to_nobody(serve: Serve) -> None:
    async with serve(static(2)) as manager:
        await manager.say(register("a", gpu=1), register("b", gpu=1))
        await manager.state("b", "allocated")
    async with serve(static(1), identity=another()) as manager:
        gone = await manager.until(
            lambda records: (record := records["h/b/1"])["resources"]["gpu"][0].get("health") == "unknown" and record
        )
        assert gone["state"] == "allocated"
        assert gone["resources"]["gpu"][0]["id"] == "gpu:1"
        assert "health" not in (await manager.records())["h/a/1"]["resources"]["gpu"][0]
        await manager.say(register("next", gpu=1), deregister("b"))
        await manager.state("b", "ended")
        assert (await manager.records())["h/next/1"]["state"] == "pending"
        await manager.say(deregister("a"))
        assert (await manager.state("next", "allocated"))["resources"]["gpu"][0]["id"] == "gpu:0"


async def test_who_waits_is_served_after_a_restart_with_more_devices(serve: Serve) -> None:
    async with serve(static(1)) as manager:
        await manager.say(register("a", gpu=1), register("b", gpu=1))
        await manager.state("b", "pending")
    async with serve(static(2), identity=another()) as manager:
        await manager.state("b", "allocated")


async def test_a_restart_goes_on_with_what_was_said_meanwhile_and_says_nothing_twice(serve: Serve) -> None:
    async with serve(static(2)) as manager:
        await manager.say(register("a", gpu=1))
        await manager.state("a", "allocated")
    await manager.say(deregister("a"), register("b", gpu=2))
    async with serve(static(2), identity=another()) as manager:
        await manager.state("b", "allocated")
        steps = [(step["worker"], step["to"]) for step in await manager.history() if step["type"] == "transition"]
        assert steps == [("a", "allocated"), ("a", "ended"), ("b", "allocated")]


async def test_a_device_file_that_is_edited_changes_what_its_holder_is_told(serve: Serve, tmp_path: Path) -> None:
    config = files_config(tmp_path / "gpus", gpus=2)
    async with serve(config) as manager:
        await manager.say(register("w", gpu=1))
        first = await manager.state("w", "allocated")
        [held] = first["resources"]["gpu"]
        index = int(held["id"].removeprefix("GPU-"))
        add_device(tmp_path / "gpus", index, temperature="81")
        told = await manager.until(
            lambda records: (record := records["h/w/1"])["resources"]["gpu"][0].get("temperature") and record
        )
        assert (told["state"], told["token"], told["since"]) == ("allocated", first["token"], first["since"])
        assert told["resources"]["gpu"][0]["id"] == held["id"]
        assert told["env"] == first["env"]


async def test_a_device_that_falls_ill_is_said_so_to_its_holder_and_lent_to_nobody_until_it_heals(
    serve: Serve, tmp_path: Path
) -> None:
    config = files_config(tmp_path / "gpus", gpus=1) + 'min-healthy-time = "0s"\n'
    async with serve(config) as manager:
        await manager.say(register("w", gpu=1))
        await manager.state("w", "allocated")
        add_device(tmp_path / "gpus", 0, health="unhealthy", reason="XID 79")
        ill = await manager.until(
            lambda records: (info := records["h/w/1"]["resources"]["gpu"][0]).get("health") == "unhealthy" and info
        )
        assert "XID 79" in str(ill)
        await manager.say(deregister("w"), register("next", gpu=1))
        await manager.state("w", "ended")
        record = await manager.until(lambda records: records.get("h/next/1"))
        assert record["state"] == "pending"
        assert "0 of 1 healthy" in record["reason"]
        add_device(tmp_path / "gpus", 0)
        await manager.state("next", "allocated")


async def test_a_new_device_file_serves_who_waits(serve: Serve, tmp_path: Path) -> None:
    async with serve(files_config(tmp_path / "gpus", gpus=1)) as manager:
        await manager.say(register("a", gpu=1), register("b", gpu=1))
        await manager.state("b", "pending")
        add_device(tmp_path / "gpus", 7)
        assert (await manager.state("b", "allocated"))["resources"]["gpu"][0]["id"] == "GPU-7"


SCRIPT = """#!/bin/sh
seq -s, 0 $(($1 - 1))
"""
BY_SCRIPT = (
    'external-resources = ["{name}"]\n[external-resource.{name}]\namount = 1\n'
    'driver = "gpu"\nparam.discovery-script.path = "{script}"\n'
)
BY_UUID = (
    'external-resources = ["gpu"]\n[external-resource.gpu]\namount = 1\n'
    'driver = "static"\nparam.devices = "a;b"\nparam.device.a.id = "GPU-aaa"\nparam.device.b.id = "GPU-bbb"\n'
)


@pytest.mark.parametrize(
    ("resource", "after"), [("gpu", BY_UUID), ("card", BY_SCRIPT)], ids=["another driver", "another name"]
)
async def test_devices_under_new_ids_are_lent_when_whoever_holds_one_by_its_old_id_has_ended(
    serve: Serve, tmp_path: Path, resource: str, after: str
) -> None:
    script = tmp_path / "gpus.sh"
    script.write_text(SCRIPT)
    script.chmod(0o755)
    async with serve(BY_SCRIPT.format(name="gpu", script=script)) as manager:
        await manager.say(register("w", gpu=1))
        assert (await manager.state("w", "allocated"))["resources"]["gpu"][0]["id"] == "gpu:0"
    for _ in range(2):
        async with serve(after.format(name=resource, script=script), identity=another()) as manager:
            manager.metrics.show(manager.processor.state_counts)
            await manager.say(register("next", **{resource: 1}))
            waiter = await manager.until(
                lambda records: "held back" in (records.get("h/next/1", {}).get("reason") or "") and records["h/next/1"]
            )
            assert waiter["state"] == "pending"
            assert "h/w/1 holds gpu:0 of gpu" in waiter["reason"]
            listed = (await manager.records())["@host/h"]["resources"][resource]["devices"]
            assert {one["health"] for one in listed} == {"unknown"}
            await manager.reported()
            assert manager.metric("outfitter_devices", resource=resource, state="held-back") == len(listed)
    async with serve(after.format(name=resource, script=script), identity=another()) as manager:
        await manager.say(deregister("w"))
        await manager.state("next", "allocated")
    assert (await verdict(manager.bus.url)).violations == ()


def named(*names: str, **ids: str) -> str:
    """TOML of the resource `licence` with these devices of `static`, some with an id of their own."""
    given = "".join(f'param.device.{name}.id = "{own}"\n' for name, own in ids.items())
    return (
        'external-resources = ["licence"]\n[external-resource.licence]\namount = 1\ndriver = "static"\n'
        f'param.devices = "{";".join(names)}"\n{given}'
    )


async def test_a_named_device_that_is_taken_off_the_list_moves_no_other_to_its_holder(serve: Serve) -> None:
    async with serve(named("a", "b")) as manager:
        await manager.say(register("w1", licence=1), register("w2", licence=1))
        held = {w: (await manager.state(w, "allocated"))["resources"]["licence"][0] for w in ("w1", "w2")}
        assert {info["name"]: info["id"] for info in held.values()} == {"a": "licence:a", "b": "licence:b"}
    of_a, of_b = sorted(held, key=lambda worker: held[worker]["name"])
    async with serve(named("b"), identity=another()) as manager:
        gone = await manager.until(
            lambda records: (info := records[f"h/{of_a}/1"]["resources"]["licence"][0]).get("health") and info
        )
        assert (gone["name"], gone["health"]) == ("a", "unknown")
        await manager.say(deregister(of_a), register("w3", licence=1))
        await manager.state(of_a, "ended")
        assert (await manager.state("w3", "pending"))["reason_code"] == "busy"
        await manager.say(deregister(of_b))
        assert (await manager.state("w3", "allocated"))["resources"]["licence"][0]["name"] == "b"
    assert (await verdict(manager.bus.url)).violations == ()


@pytest.mark.parametrize("names", [("a", "b"), ("1", "0")], ids=["words", "numbers"])
async def test_named_devices_that_are_held_by_their_positions_are_lent_by_name_only_after_that(
    serve: Serve, names: tuple[str, str]
) -> None:
    by_position = {name: f"licence:{position}" for position, name in enumerate(names)}
    async with serve(named(*names, **by_position)) as manager:
        await manager.say(register("w1", licence=1))
        held = (await manager.state("w1", "allocated"))["resources"]["licence"][0]
        assert by_position[held["name"]] == held["id"]
    async with serve(named(*names), identity=another()) as manager:
        await manager.say(register("next", licence=1))
        waiter = await manager.until(
            lambda records: "held back" in (records.get("h/next/1", {}).get("reason") or "") and records["h/next/1"]
        )
        assert f"h/w1/1 holds {held['id']} of licence" in waiter["reason"]
        assert (await manager.records())["h/w1/1"]["resources"]["licence"][0]["name"] == held["name"]
        await manager.say(deregister("w1"))
        await manager.state("next", "allocated")
    assert (await verdict(manager.bus.url)).violations == ()


async def test_an_id_that_a_driver_gives_to_a_device_of_another_name_while_it_is_held_has_a_warning(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serve(named("a", a="LIC-1")) as manager:
        await manager.say(register("w", licence=1))
        await manager.state("w", "allocated")
        await manager.reported()
    assert "another name" not in capsys.readouterr().out
    async with serve(named("b", b="LIC-1"), identity=another()) as manager:
        await manager.until(lambda records: records["h/w/1"]["resources"]["licence"][0]["name"] == "b")
        await manager.reported()
    [line] = [line for line in capsys.readouterr().out.splitlines() if "another name" in line]
    assert "[warning" in line
    for word in ("device=LIC-1", "resource=licence", "before=a", "now=b", "host=h", "worker=w", "incarnation=1"):
        assert word in line
