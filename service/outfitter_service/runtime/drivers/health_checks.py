"""Asks a resource's health script about each device, round after round, and adds its word to the driver's reports.

A device is as ill as the worse of both words, and its reason has both. A script that breaks neither makes a device
healthy nor, at once, unknown: its last word counts until it has failed several times in a row.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NoReturn

import anyio
from msgspec import structs

from outfitter_proto.records import Health
from outfitter_service.core import model as m
from outfitter_service.runtime.drivers.health_script import LONGEST_WORDS, HealthScript, Word
from outfitter_service.runtime.drivers.translation import REASON_LENGTH, SHORTEST_DELAY_S, DriverCallError, foreign_code

AT_ONCE = 4
"""Runs of one resource's script at the same time."""
FAILED_RUNS = 3
"""After so many runs in a row that said nothing of a device, nobody knows how it is."""
FIRST_TURNS, FIRST_GRACE_S = 4, 5.0
"""The script's first word about a device is awaited for its time limit in each turn of `AT_ONCE` devices, in so many
turns at most, and for some seconds beyond. So neither a restart nor a new device makes anything unknown: holders would
be told, and what was unknown counts as ill for a while."""
SHORTEST_REPORT_S = 1.0
"""Seconds between two reports in one round. Each has all devices."""
MOST_NAMED = 8
"""Most devices that one warning names."""

NOT_LOOKED = Word(Health.UNKNOWN, "has not looked at it yet")
_WORST = (Health.UNHEALTHY, Health.UNKNOWN, Health.HEALTHY)

Ask = Callable[[m.KnownDevice], Awaitable[Word]]
"""Runs the script for a device. It raises `DriverCallError` if the script has said nothing."""


class Opinion:
    """What the script says of one device, by its last runs."""

    def __init__(self, awaited_until: float) -> None:
        """`awaited_until`: the device is not reported before the script's first word or this time."""
        self.awaited_until = awaited_until
        self.word = NOT_LOOKED
        """What counts."""
        self.failures = 0
        """Runs in a row that said nothing."""
        self._since = ""

    def is_awaited(self, now: float) -> bool:
        return self.word == NOT_LOOKED and now < self.awaited_until

    def said(self, word: Word) -> None:
        """A run has said this. The first reason stays while the device is ill: a temperature differs in each run, and
        each reason would change the records of host and holder."""
        self.failures = 0
        if word.health != self.word.health:
            self.word = word

    def failed(self, why: str) -> None:
        """A run has said nothing. What is ill stays so, and what was well is unknown once that happens again and
        again."""
        if not self.failures:
            self._since = time.strftime("%Y-%m-%d %H:%M:%S")
        self.failures += 1
        is_well = self.word.health == Health.HEALTHY
        if self.word == NOT_LOOKED or (is_well and self.failures >= FAILED_RUNS):
            self.word = Word(Health.UNKNOWN, f"has failed since {self._since}: {why[:LONGEST_WORDS]}")


def merged(device: m.KnownDevice, word: Word) -> m.KnownDevice:
    """The device, as ill as the worse of what its driver and its health script say, with both reasons."""
    if word.health == Health.HEALTHY:
        return device
    said = f"health script: {word.reason}"
    health = min(device.health, word.health, key=_WORST.index)
    reason = f"{device.reason}; {said}" if device.reason and device.health != Health.HEALTHY else said
    return structs.replace(device, health=health, reason=reason[:REASON_LENGTH])


class HealthChecks:
    """The health script of one resource on one host, beside its driver."""

    def __init__(self, script: HealthScript, ask: Ask, emit: Callable[[m.DriverReport], object], log: Any) -> None:
        """`emit` gets the driver's reports, with the script's words added."""
        self._script = script
        self._ask = ask
        self._emit = emit
        self._log = log
        self._report: m.DriverReport | None = None
        self._devices: tuple[m.KnownDevice, ...] = ()
        self._opinions: dict[str, Opinion] = {}
        self._has_told = False
        self._told_at = 0.0
        self._failing: frozenset[str] = frozenset()
        self._news = anyio.Event()

    def report(self, report: m.DriverReport) -> None:
        """The driver has reported. A failure without devices leaves those that it named last."""
        self._report = report
        if report.failure is None or report.devices:
            self._devices = report.devices
            turns = min(FIRST_TURNS, math.ceil(len(report.devices) / AT_ONCE))
            awaited_until = anyio.current_time() + turns * self._script.timeout_s + FIRST_GRACE_S
            self._opinions = {
                device.id: self._opinions.get(device.id) or Opinion(awaited_until) for device in report.devices
            }
        self._tell()
        self._news.set()

    def _tell(self) -> None:
        """Emit the driver's last report with the script's words. Devices whose first words are awaited are left out, as
        if the driver named them a moment later; while it is so of any device of the first report, so is all of it."""
        if self._report is None:
            return
        self._told_at = now = anyio.current_time()
        known = [device for device in self._devices if not self._opinions[device.id].is_awaited(now)]
        if self._has_told or len(known) == len(self._devices):
            self._has_told = self._has_told or self._report.failure is None
            devices = tuple([merged(device, self._opinions[device.id].word) for device in known])
            self._emit(structs.replace(self._report, devices=devices))
        elif self._report.failure is not None:
            self._emit(structs.replace(self._report, devices=()))

    async def run(self) -> NoReturn:
        """Ask about all devices again and again, and about new ones as soon as the driver names them, for ever."""
        due = anyio.current_time()
        while True:
            self._news = anyio.Event()
            if is_round := anyio.current_time() >= due:
                due = anyio.current_time() + self._script.interval_s
            first_of_each = {device.id: device for device in reversed(self._devices)}
            asked_about = [
                first_of_each[name]
                for name, opinion in self._opinions.items()
                if is_round or opinion.word == NOT_LOOKED
            ]
            await self._ask_about(asked_about)
            await anyio.sleep(SHORTEST_DELAY_S)
            with anyio.move_on_after(due - anyio.current_time()):
                await self._news.wait()

    async def _ask_about(self, devices: Sequence[m.KnownDevice]) -> None:
        """Ask about these devices, some at a time."""
        if not devices:
            return
        left = iter(devices)
        failures: dict[str, str] = {}

        async def ask_about_some() -> None:
            for device in left:
                try:
                    word = await self._ask(device)
                except DriverCallError as error:
                    failures[device.id] = error.failure.reason
                    self._hear(device.id, error.failure.reason)
                else:
                    self._hear(device.id, word)

        async with anyio.create_task_group() as tasks:
            for _ in range(AT_ONCE):
                tasks.start_soon(ask_about_some)
        self._tell()
        self._warn(failures)

    def _hear(self, name: str, said: Word | str) -> None:
        """A run has ended. `said`: its word, or why there is none."""
        opinion = self._opinions.get(name)
        if opinion is None:
            return  # the driver does not name it any more
        before = opinion.word
        if isinstance(said, Word):
            opinion.said(said)
        else:
            opinion.failed(said)
        if opinion.word != before and anyio.current_time() >= self._told_at + SHORTEST_REPORT_S:
            self._tell()

    def _warn(self, failures: Mapping[str, str]) -> None:
        """Log that the script has begun to fail, and that it answers again. `failures`: of the runs just now."""
        failing = frozenset([name for name, opinion in self._opinions.items() if opinion.failures])
        begun = [name for name in failures if name in failing and name not in self._failing]
        if begun:
            self._log.warning(
                "health script failed", error=failures[begun[0]], devices=begun[:MOST_NAMED], number=len(failing)
            )
        elif self._failing and not failing:
            self._log.info("health script answers again")
        self._failing = failing


async def words_of(
    script: HealthScript, host: str, resource: str, devices: Sequence[m.KnownDevice], *, within_s: float
) -> dict[str, Word]:
    """What the script says of each device, asked once, for commands. Of whom it says nothing within that time, nobody
    knows how it is."""
    left = iter(devices)
    words = {device.id: Word(Health.UNKNOWN, f"has not answered within {within_s:g} s") for device in devices}

    async def ask_about_some() -> None:
        for device in left:
            try:
                words[device.id] = await asked(script, host, resource, device)
            except DriverCallError as error:
                words[device.id] = Word(Health.UNKNOWN, f"has failed: {error.failure.reason[:LONGEST_WORDS]}")

    with anyio.move_on_after(within_s):
        async with anyio.create_task_group() as tasks:
            for _ in range(AT_ONCE):
                tasks.start_soon(ask_about_some)
    return words


async def asked(script: HealthScript, host: str, resource: str, device: m.KnownDevice) -> Word:
    """What the script says of a device.

    Raises:
        DriverCallError: it says nothing.
    """
    with foreign_code():
        return await script.ask(host, resource, device)
