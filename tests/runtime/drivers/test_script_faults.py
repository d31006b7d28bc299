"""A discovery script that hangs, floods, dies or lies costs its own resource only, and its workers are told why."""

from __future__ import annotations

from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from runtime.conftest import Serve
from support.managers.in_process import deregister, register
from support.processes.ending import wait_until_ended


def scripted(folder: Path, lines: str, extra: str = "") -> str:
    """TOML of `bad`, found by a script of these lines, and of `good`, which is always there."""
    script = folder / "discover.sh"
    script.write_text(f"#!/bin/sh\n{lines}\n")
    script.chmod(0o755)
    return (
        'external-resources = ["bad", "good"]\n'
        '[external-resource.good]\namount = 1\ndriver = "static"\nparam.count = 9\n'
        f'[external-resource.bad]\namount = 1\ndriver = "gpu"\nparam.discovery-script.path = "{script}"\n{extra}'
    )


SCRIPTS = {
    "exits with an error": ("echo broken >&2; exit 3", "broken"),
    "prints too much": ("yes 0123456789 | head -c 3000000", "printed more than"),
    "prints garbage": ("printf '\\377\\376'", "not UTF-8"),
    "prints half an object": ('echo \'{"name": "gpu", "addresses":\'', "valid is"),
    "is killed": ("kill -KILL $$", "killed by SIGKILL"),
    "hangs": ("sleep 600", "did not end within 0.3 s"),
    "names nothing": ("echo", "names 0"),
    "prints a message word by word": ("echo Found,2,GPUs", "named 'Found', which is a word without a digit"),
    "prints all": ("echo all", "named 'all'"),
    "prints a range": ("echo 0-3", "named '0-3', which is a range"),
    "names a GPU twice": ("echo GPU-8a56,GPU-8A56", "one GPU to CUDA"),
}


@pytest.mark.parametrize("case", SCRIPTS)
async def test_a_script_that_fails_is_named_in_its_workers_record_and_others_are_served(
    serve: Serve, tmp_path: Path, case: str
) -> None:
    lines, said = SCRIPTS[case]
    config = scripted(tmp_path, lines, 'param.discovery-script.timeout = "300ms"')
    async with serve(config) as manager:
        await manager.say(register("w", bad=1), register("both", bad=1, good=1))
        for index in range(5):
            await manager.say(register(f"g{index}", good=1))
        for index in range(5):
            await manager.state(f"g{index}", "allocated")
        record = await manager.until(
            lambda records: said in (records.get("h/w/1", {}).get("reason") or "") and records["h/w/1"]
        )
        assert record["state"] in {"pending", "failed"}
        assert record["resources"] == {}
        both = await manager.until(
            lambda records: said in (records["h/both/1"]["reason"] or "") and records["h/both/1"]
        )
        assert both["resources"] == {}
        assert manager.metric("outfitter_driver_failures_total", resource="bad", call="retrieve") > 0
        assert manager.metric("outfitter_driver_failures_total", resource="good", call="inventory") == 0
        assert manager.metric("outfitter_driver_seconds_count", resource="bad", call="retrieve") > 0


async def test_a_script_that_leaves_children_is_answered_and_the_children_are_ended(
    serve: Serve, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    async with serve(
        scripted(tmp_path, f"sleep 600 & echo $! >> {pids}; sleep 600 & echo $! >> {pids}; echo 0")
    ) as manager:
        await manager.say(register("w", bad=1))
        assert [info["index"] for info in (await manager.state("w", "allocated"))["resources"]["bad"]] == ["0"]
    wait_until_ended(*map(int, pids.read_text().split()))


async def test_a_script_that_works_again_serves_those_who_wait(serve: Serve, tmp_path: Path) -> None:
    flag = tmp_path / "works"
    async with serve(scripted(tmp_path, f"test -e {flag} || kill -KILL $$; echo 0,1")) as manager:
        await manager.say(register("w", bad=2))
        await manager.state("w", "pending")
        flag.touch()
        assert len((await manager.state("w", "allocated"))["resources"]["bad"]) == 2


async def test_a_script_that_hangs_for_one_workers_amount_serves_all_who_want_fewer(
    serve: Serve, tmp_path: Path
) -> None:
    lines = "[ $1 -gt 100 ] && exec sleep 60; seq -s, 0 $(($1-1))"
    async with serve(scripted(tmp_path, lines, 'param.discovery-script.timeout = "300ms"')) as manager:
        await manager.say(register("big", bad=1000), *[register(f"w{index}", bad=1) for index in range(5)])
        for index in range(5):
            await manager.state(f"w{index}", "allocated")
        await manager.say(register("late", bad=1))
        await manager.state("late", "allocated")
        records = await manager.until(lambda found: found["h/big/1"]["reason_code"] == "driver-failed" and found)
        assert "did not end within 0.3 s" in records["h/big/1"]["reason"]
        held = [record["resources"].get("bad", []) for key, record in records.items() if key.startswith("h/")]
        assert len({info["id"] for infos in held for info in infos}) == 6


async def test_withdrawing_from_a_script_that_hangs_is_not_delayed_by_it(serve: Serve, tmp_path: Path) -> None:
    async with serve(scripted(tmp_path, "sleep 600")) as manager:
        await manager.say(register("w", bad=1), deregister("w"))
        assert (await manager.state("w", "ended"))["reason_code"] == "withdrawn"


async def test_a_resource_that_waits_is_asked_for_again_after_a_failure_for_good(serve: Serve, tmp_path: Path) -> None:
    flag = tmp_path / "works"
    config = scripted(tmp_path, f"test -e {flag} && echo 0,1 || echo", 'on-failure = "wait"')
    async with serve(config) as manager:
        await manager.say(register("w", bad=2))
        await manager.until(lambda records: records.get("h/w/1", {}).get("reason_code") == "driver-failed")
        flag.touch()
        await manager.state("w", "allocated")


async def test_a_script_that_keeps_the_books_is_asked_again_while_others_hold_devices(
    serve: Serve, tmp_path: Path
) -> None:
    """Who holds them is in the ledger: the driver has forgotten it at a restart."""
    taken = tmp_path / "taken"
    held = f"[ -e {taken} ] && [ $(cat {taken}) != $OUTFITTER_WORKER ]"
    lines = f"[ $1 = release ] && exec rm -f {taken}; {held} && exit 1; echo $OUTFITTER_WORKER > {taken}; echo 0"
    config = scripted(tmp_path, lines, 'param.discovery-script.contract = "allocate-release"')
    async with serve(config) as manager:
        await manager.say(register("w", bad=1))
        await manager.state("w", "allocated")
    async with serve(config) as manager:
        await manager.say(register("v", bad=1))
        await manager.until(lambda records: records.get("h/v/1", {}).get("reason_code") == "driver-failed")
        await manager.say(register("u", bad=1), deregister("w"))
        await manager.state("v", "allocated")
        await manager.say(deregister("v"))
        await manager.state("u", "allocated")


async def test_no_script_outlives_its_manager(serve: Serve, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    async with serve(scripted(tmp_path, f"echo $$ > {pid}.new; mv {pid}.new {pid}; sleep 600")) as manager:
        await manager.say(register("w", bad=1))
        with anyio.fail_after(10):
            while not pid.exists():  # noqa: ASYNC110 - another process makes it
                await anyio.sleep(0.01)
    wait_until_ended(int(pid.read_text()))
