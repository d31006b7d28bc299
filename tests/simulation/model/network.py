"""What is between a process and the broker: time, and what goes wrong on the way.

A request whose answer does not come in time was lost, or its answer was, or it is still on its way and arrives late:
the sender cannot tell. A copy that arrives late has always been given up by its sender before, as with TCP.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any, NamedTuple

from outfitter_proto.bus import BusUnavailableError
from simulation.loop import Loop, Process
from simulation.model.errors import REQUEST_TIMED_OUT, RefusedError

REQUEST_TIMEOUT_S = 3.0
RESET_S = 0.2
"""A connection that breaks says so sooner than the time-out does."""
LATEST_S = 12.0
THROTTLED_S = 1.0
"""Most seconds for which a quota of request time holds a connection back."""
SLOWEST = 5.2
"""How many times the typical latency a message takes one way at most, unless it is late."""


class LostError(Exception):
    """No answer came: nobody knows what became of the request."""


class Weather(NamedTuple):
    """How bad the network is: seconds one way (typically), and the share of requests to which each thing happens."""

    latency_s: float = 0.002
    request_lost: float = 0.0
    answer_lost: float = 0.0
    late: float = 0.0
    refused: float = 0.0
    """The broker answers with an error of its own, be it that it did what was asked or not."""
    throttled: float = 0.0
    """The share of answers after which the broker reads nothing from that process for a while, because of a quota."""
    requests: tuple[str, ...] = ()
    """The requests that are meant (empty: all)."""


CALM = Weather()

Watch = Callable[[Process, str, str], None]
"""Told of every request: (process, what, stage), stage being `sent`, `done` or `answered`."""


class Network:
    """All connections. `weather` may change at any time; `down`: nothing reaches the broker. `refusing`: who asks then
    is told so soon, as when the broker's process is gone, and not its machine."""

    def __init__(self, loop: Loop, seed: int) -> None:
        self.loop = loop
        self.world = loop.within(loop.world)
        self.weather = CALM
        self.refusing = False
        self.waiting: dict[asyncio.Future[Any], None] = {}  # in order, as a set of objects is not
        self._down_since: float | None = None
        self._outages: list[tuple[float, float]] = []
        self.dice = random.Random(f"{seed}/network")
        self.quota_dice = random.Random(f"{seed}/quotas")
        self.watch: Watch = lambda *_: None
        self.trace: Callable[[str, str], None] | None = None
        self.lost = 0
        self.late = 0

    @property
    def down(self) -> bool:
        return self._down_since is not None

    @down.setter
    def down(self, down: bool) -> None:
        now = self.loop.time()
        if down and self._down_since is None:
            self._down_since = now
            for each in self.waiting if self.refusing else ():
                self.loop.call_later(RESET_S, _give_up, each, context=self.world)
        elif not down and self._down_since is not None:
            self._outages.append((self._down_since, now))
            self._down_since = None

    def up_s(self, begin: float, end: float) -> float:
        """For how many seconds between two moments the broker could be reached; all outages are over."""
        return end - begin - sum(max(0.0, min(end, back) - max(begin, down)) for down, back in self._outages)


class Link:
    """One process's way to the broker. `cut`: nothing gets through, in neither direction. `deaf`: what it reads does
    not, because that comes from another broker than the one that takes what it writes."""

    def __init__(self, network: Network, process: Process) -> None:
        self.network = network
        self.process = process
        self.cut = False
        self.deaf = False
        self.closed = False
        self._throttled_until = 0.0

    def loses(self, what: str) -> bool:
        """Whether a request, or the answer to it, does not get through now."""
        return self.network.down or self.cut or (self.deaf and what == "Fetch")

    async def ask(self, what: str, answer: Callable[[], Any]) -> Any:
        """Have `answer` called on the broker's side, and return what it returned.

        Raises:
            LostError: no answer; it may have been done, or be done yet.
            RefusedError, OutOfRangeError: what the broker said.
            BusUnavailableError: the simulation is over.
        """
        network, loop, process = self.network, self.network.loop, self.process
        dice, weather = network.dice.random, network.weather
        if self.closed:
            raise BusUnavailableError("the simulation is over")
        while (left := self._throttled_until - loop.time()) > 0:  # noqa: ASYNC110  (the clock sets no event)
            await asyncio.sleep(left)
        mine: asyncio.Future[Any] = loop.create_future()
        world = self.network.world
        fate = dice() if not weather.requests or what in weather.requests else 1.0
        there = weather.latency_s * (0.2 + dice() ** 3 * 5)
        lost = late = hushed = refused = False
        if fate < weather.request_lost:
            lost = True
        elif fate < weather.request_lost + weather.answer_lost:
            hushed = True
        elif fate < weather.request_lost + weather.answer_lost + weather.late:
            late, there = True, RESET_S + dice() * LATEST_S
        elif fate < 1.0:
            refused = dice() < weather.refused

        def arrive() -> None:
            if network.down or (self.loses(what) and not late):
                return
            try:
                result = answer() if not refused or dice() < 0.5 else RefusedError(REQUEST_TIMED_OUT)
            except Exception as error:  # noqa: BLE001 - the broker's answer, whatever it is
                result = error
            if late or hushed:
                network.trace and network.trace(
                    process.name, f"{what} arrived late" if late else f"{what} done, answer lost"
                )
            network.watch(process, what, "done")
            if refused:
                result = RefusedError(REQUEST_TIMED_OUT)
            if late or hushed:
                return
            if isinstance(result, asyncio.Future):
                result.add_done_callback(lambda done: send_back(done.result()), context=world)
            else:
                send_back(result)

        def send_back(result: Any) -> None:
            if not self.loses(what):
                back = weather.latency_s * (0.2 + dice() ** 3 * 5)
                loop.call_later(back, receive, result, context=world)

        def receive(result: Any) -> None:
            if not mine.done() and not self.cut:
                mine.set_result(result)

        network.watch(process, what, "sent")
        if not lost:
            loop.call_later(there, arrive, context=world)
        else:
            network.trace and network.trace(process.name, f"{what} lost")
        patience = REQUEST_TIMEOUT_S
        if (lost or late or hushed) and dice() < 0.5:
            patience = dice() * RESET_S  # the connection broke, and that was seen
        elif network.down and network.refusing:
            patience = RESET_S
        patience_over = loop.call_later(patience, _give_up, mine)
        network.waiting[mine] = None
        try:
            result = await mine
        finally:
            patience_over.cancel()
            del network.waiting[mine]
        network.watch(process, what, "answered")
        if weather.throttled and network.quota_dice.random() < weather.throttled:
            self._throttled_until = loop.time() + network.quota_dice.random() * THROTTLED_S
        if isinstance(result, LostError):
            network.lost += 1
            network.late += late
            raise result
        if isinstance(result, Exception):
            raise result
        return result


def _give_up(mine: asyncio.Future[Any]) -> None:
    if not mine.done():
        mine.set_result(LostError())
