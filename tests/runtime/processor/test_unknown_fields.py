"""A misspelt field costs a worker nothing but is told: in its record, in the log, as a metric, by the commands."""

from __future__ import annotations

import json
from typing import Any

import anyio
import pytest

from outfitter import RuntimeContext
from outfitter_proto import names
from outfitter_proto.bus import Entry, connect
from outfitter_proto.codec.unknown import UNNAMED
from runtime.conftest import Serve
from support.checker.verdict import verdict
from support.managers.in_process import deregister, heartbeat, register, static
from support.managers.process import Manager

MISSPELT = "unknown field $.resorces was ignored; did you mean resources?"


def misspelt(worker: str, **fields: Any) -> dict[str, Any]:
    return {**register(worker, lease_s=None), "resorces": {"gpu": {"amount": 2}}, **fields}


async def test_a_registration_is_obeyed_without_them_and_its_record_names_them(serve: Serve) -> None:
    async with serve(static()) as in_process:
        await in_process.say(misspelt("w"), register("plain", gpu=1))
        record = await in_process.state("w", "allocated")
        assert record["warnings"] == [MISSPELT]
        assert "warnings" not in await in_process.state("plain", "allocated")
        await in_process.say(deregister("w"))
        assert (await in_process.state("w", "ended"))["warnings"] == [MISSPELT]
        await in_process.reported()
        assert in_process.metric("outfitter_unknown_fields_total", kind="register") == 1
        assert in_process.metric("outfitter_dead_letters_total") == 0
        assert (await verdict(in_process.bus.url)).violations == ()


async def test_one_that_waits_or_fails_names_them_too(serve: Serve) -> None:
    async with serve(static()) as in_process:
        await in_process.say(
            register("all", gpu=2), misspelt("waits"), misspelt("fails", resources={"gpu": {"amount": 99}})
        )
        for worker, state in (("waits", "pending"), ("fails", "failed")):
            assert (await in_process.state(worker, state))["warnings"] == [MISSPELT]


async def test_a_deregistration_that_misspells_its_run_says_so_in_the_reason_of_what_it_ended(serve: Serve) -> None:
    async with serve(static()) as in_process:
        await in_process.say(register("w", gpu=1))
        await in_process.state("w", "allocated")
        await in_process.say({**deregister("w", None), "incarnaton": "0", "reason": "done"})
        reason = (await in_process.state("w", "ended"))["reason"]
        assert reason == "deregistered: done; unknown field $.incarnaton was ignored; did you mean incarnation?"


async def test_heartbeats_and_deregistrations_are_counted_and_logged(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serve(static()) as in_process:
        await in_process.say(register("w", gpu=1), {**heartbeat("w"), "load": 1}, {**deregister("w"), "resaon": "done"})
        await in_process.state("w", "ended")
        await in_process.reported()
        assert in_process.metric("outfitter_unknown_fields_total", kind="heartbeat") == 1
        assert in_process.metric("outfitter_unknown_fields_total", kind="deregister") == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if "unknown fields" in line]
    assert len(lines) == 2
    assert "did you mean reason?" in lines[1]


async def test_a_flood_of_them_is_counted_and_not_logged_line_by_line(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serve(static()) as in_process:
        await in_process.say(register("w", gpu=1))
        for _ in range(4):
            await in_process.say(*[{**heartbeat("w"), "load": n} for n in range(50)])
        await in_process.say(
            deregister("w"), misspelt("later"), {**heartbeat("nobody"), "load": 1}, {**heartbeat("w"), "host": 7}
        )
        await in_process.state("w", "ended")
        record = await in_process.state("later", "allocated")
        assert record["warnings"] == [UNNAMED]  # told without a name, which takes long to find
        # nor does it cost the dead letters their places, or themselves
        *_, letter = await in_process.dead_letters(2)
        assert letter["field"] == "$.host"
        await in_process.reported()
        assert in_process.metric("outfitter_unknown_fields_total", kind="heartbeat") == 201
        assert in_process.metric("outfitter_unknown_fields_total", kind="register") == 1
        assert in_process.metric("outfitter_dead_letters_omitted_total") == 0
    assert capsys.readouterr().out.count("a message has unknown fields") == 20


def test_the_commands_and_a_context_show_them(
    manager: Manager, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def say() -> None:
        async with connect(manager.bus_url) as bus:
            body = json.dumps(misspelt("w", host=manager.host)).encode()
            await bus.publish(names.topics().registrations, 0, Entry(manager.host.encode(), body))

    anyio.run(say)
    manager.wait_for_state("w", "allocated")
    assert MISSPELT in manager.outfitter("status").stdout
    assert f"Warning about its registration: {MISSPELT}." in manager.outfitter("explain", "w").stdout
    assert json.loads(manager.outfitter("explain", "w", "--json").stdout)[0]["warnings"] == [MISSPELT]
    for name, value in {"BUS": manager.bus_url, "HOST": manager.host, "WORKER": "w", "INCARNATION": "1"}.items():
        monkeypatch.setenv(f"OUTFITTER_{name}", value)  # as `outfitter run` does
    with RuntimeContext() as context:
        assert context.warnings == (MISSPELT,)
    assert f"{manager.host}/w/1: {MISSPELT}" in caplog.text
