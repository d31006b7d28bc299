"""One outage is one piece of news, whoever meets it and however often."""

from __future__ import annotations

import logging
import subprocess
import sys

import anyio
import pytest
from structlog.testing import capture_logs

from outfitter_proto.bus import BusUnavailableError
from outfitter_service import logs
from outfitter_service.runtime.clock import Clock
from outfitter_service.runtime.outage_log import LOG_AGAIN_S, OutageLog
from runtime.conftest import Serve
from support.bus.faulty_bus import FaultyBus, no_faults
from support.managers.in_process import register, static


class Hands(Clock):
    """A clock that is set by hand."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


def test_many_activities_that_fail_again_and_again_are_one_outage() -> None:
    clock = Hands()
    outage = OutageLog(clock)
    with capture_logs() as said:
        for second in range(150):
            clock.now = 100.0 + second
            for activity in ("reading", "committing", f"sweeping {second % 12}"):
                outage.met(activity, f"{activity}: refused")
        for number in range(12):
            outage.passed(f"sweeping {number}")
        outage.passed("reading")
        outage.passed("reading")
        assert outage.on
        outage.drop("nothing")
        outage.passed("committing")
    loud = [line for line in said if line["log_level"] != "debug"]
    assert [line["event"] for line in loud] == [
        "the bus is away, trying until it works",
        "the bus is away for longer",
        "the bus is away for longer",
        "the bus works again",
    ]
    assert loud[0]["error"] == "reading: refused"
    assert loud[1]["after_s"] == LOG_AGAIN_S
    assert loud[3]["after_s"] == 149
    assert not outage.on


def test_what_is_not_wanted_any_more_ends_an_outage_without_a_word() -> None:
    outage = OutageLog(Hands())
    with capture_logs() as said:
        outage.met("sweeping", "gone")
        outage.drop("sweeping")
        outage.passed("sweeping")
    assert (len(said), outage.on) == (1, False)


@pytest.mark.parametrize("points", [("fetch:before",), ("commit:before",), ("fetch:before", "commit:before")])
async def test_an_outage_of_many_tries_is_one_line_when_it_begins_and_one_when_it_ends(
    bus: FaultyBus, serve: Serve, points: tuple[str, ...]
) -> None:
    async with serve(static(1)) as manager:
        tries, enough = 0, anyio.Event()

        async def refuse(at: str) -> None:
            nonlocal tries
            if at in {*points, "open_writer:before"}:
                tries += 1
                if tries >= 5:
                    enough.set()
                raise BusUnavailableError("gone fishing")

        with capture_logs() as said:
            bus.script = refuse
            await manager.say(register("a", gpu=1))
            with anyio.fail_after(60):
                await enough.wait()
            bus.script = no_faults
            await manager.state("a", "allocated")
            await manager.ready()
            await manager.reported()
        loud = [line["event"] for line in said if line["log_level"] != "debug"]
        assert [event for event in loud if event not in ("allocated", "the bus is away for longer")] == [
            "the bus is away, trying until it works",
            "the bus works again",
        ]


@pytest.mark.parametrize(("threshold", "seen"), [("debug", True), ("info", False), ("error", False)])
def test_libraries_are_heard_at_debug_only(threshold: str, seen: bool, capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("json", threshold)
    logging.getLogger("aiokafka.consumer.group_coordinator").error("Group Coordinator Request failed")
    logging.getLogger("outfitter_proto.bus.kafka.connecting.connection").error("sent in the clear")
    logging.getLogger("outfitter.http").error("ours")
    said = capsys.readouterr().err
    assert ("Group Coordinator" in said) is seen
    assert "in the clear" in said
    assert "ours" in said


def test_a_command_shows_no_library_either() -> None:
    look = (
        "import logging; from outfitter_service.cli._lib.errors import show_log_lines as show; show()\n"
        "logging.getLogger('aiokafka.producer.sender').error('theirs')\n"
        "logging.getLogger('outfitter').warning('ours')"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stderr == "outfitter: ours\n"
