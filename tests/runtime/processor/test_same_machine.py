"""A machine that was renamed is told of the allocations that it still has under its old name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec import structs

from outfitter_proto.bus import Entry
from outfitter_service.runtime.identity import Identity, host_identity
from runtime.conftest import Serve
from support.managers.in_process import CLUSTER, TOPICS, InProcessManager, register, static

WARNS = "live allocations under another host name"


def identity(host: str, machine_id: str | None = "m", boot_id: str | None = "b") -> Identity:
    return structs.replace(host_identity(CLUSTER, host), machine_id=machine_id, boot_id=boot_id)


async def hold(manager: InProcessManager, worker: str, host: str = "old") -> dict[str, Any]:
    """A worker of `host` gets its devices: its record."""
    await manager.publish(json.dumps(register(worker, host=host, gpu=1)).encode(), key=host.encode())
    key = f"{host}/{worker}/1"
    record: dict[str, Any] = await manager.until(
        lambda records: records[key] if records.get(key, {}).get("state") == "allocated" else None
    )
    return record


def warnings(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if WARNS in line]


async def test_a_renamed_machine_is_told_once_what_its_old_name_holds(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serve(static(3), identity=identity("old")) as before:
        await hold(before, "a")
        await hold(before, "b")
        record = await hold(before, "c")
    async with serve(static(3), identity=identity("new")) as renamed:
        over = record | {"state": "ended"}
        await renamed.bus.publish(TOPICS.allocations, 0, Entry(b"old/c/1", json.dumps(over).encode()))
        await hold(renamed, "a", host="new")
        [line] = warnings(capsys)
        assert "other_host=old" in line
        assert "allocations=3" in line
        assert "--host" in line
        assert "[warning" in line
    async with serve(static(3), identity=identity("new")):
        [line] = warnings(capsys)
        assert "allocations=2" in line


@pytest.mark.parametrize(
    ("machine_id", "boot_id", "warned"),
    [("m", "b", True), ("m", None, True), ("other", "b", False), ("m", "the next", False), (None, "b", False)],
    ids=["same machine", "unknown boot", "another machine", "rebooted", "unknown machine"],
)
async def test_only_another_name_of_this_boot_of_this_machine_is_warned_of(
    serve: Serve, capsys: pytest.CaptureFixture[str], machine_id: str | None, boot_id: str | None, warned: bool
) -> None:
    async with serve(static(3), identity=identity("old")) as before:
        await hold(before, "a")
    async with serve(static(3), identity=identity("new", machine_id, boot_id)):
        assert bool(warnings(capsys)) is warned


async def test_machines_without_an_id_are_not_taken_for_one(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    async with serve(static(3), identity=identity("old", machine_id=None)) as before:
        await hold(before, "a")
    async with serve(static(3), identity=identity("new", machine_id=None)):
        assert warnings(capsys) == []


async def test_another_name_that_holds_nothing_is_not_warned_of(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serve(static(3), identity=identity("old")) as before:
        await before.publish(json.dumps(register("a", host="old", net=1)).encode(), key=b"old")
        await before.until(lambda records: "old/a/1" in records)
    async with serve(static(3), identity=identity("new")):
        assert warnings(capsys) == []


async def test_a_restart_under_the_same_name_is_not_warned_of(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    async with serve(static(3), identity=identity("old")) as before:
        await hold(before, "a")
    async with serve(static(3), identity=identity("old")):
        assert warnings(capsys) == []
