"""The workers of one driver that may have an offer: devices that were set aside for them before a grant.

A worker goes at any moment, and the manager may be killed at any moment. The ledger has each worker that was asked for,
before the driver is. So after a restart the driver is told who may have an offer, and gives back those of who went.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import anyio

from outfitter_drivers import api
from outfitter_proto.keys import AllocationKey
from outfitter_proto.support.backoff import Backoff
from outfitter_service.runtime.drivers.translation import DriverCallError, foreign_code

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0
"""The first and the longest delay after a failed call, unless the driver names one."""


class OutstandingOffers:
    """Gives back the offers of workers that went without a grant, one after the other."""

    def __init__(
        self,
        driver: api.Offers | None,
        bounded: Callable[[str, Callable[[], Awaitable[None]]], Awaitable[None]],
        log_of: Callable[[api.Worker], Any],
    ) -> None:
        """`driver`: None: it offers nothing. `bounded`: calls a driver within its time limit. `log_of`: the log of a
        worker."""
        self._driver = driver
        self._bounded = bounded
        self._log_of = log_of
        self._questions: Counter[AllocationKey] = Counter()
        self._question_ended = anyio.Event()
        self._gone: deque[tuple[AllocationKey, api.Worker]] = deque()

    def question(self, key: AllocationKey) -> ExitStack:
        """From now on, until the returned context ends, the driver may be asked for a worker's devices."""
        self._questions[key] += 1
        question = ExitStack()
        question.callback(self._end_question, key)
        return question

    def _end_question(self, key: AllocationKey) -> None:
        self._questions[key] -= 1
        if not self._questions[key]:
            del self._questions[key]
        self._question_ended.set()
        self._question_ended = anyio.Event()

    def assume(self, worker: api.Worker, amount: int) -> None:
        """The driver may have set devices aside for the worker, before a restart."""
        if self._driver is None:
            return
        try:
            with foreign_code():
                self._driver.assume_offer(worker, amount)
        except DriverCallError as error:
            failure = error.failure
            self._log_of(worker).warning("driver failed", error=failure.reason, permanent=failure.permanent)

    def withdraw(self, key: AllocationKey, worker: api.Worker) -> bool:
        """A worker went without a grant. Returns whether `give_back` must be started."""
        self._gone.append((key, worker))
        return len(self._gone) == 1

    async def give_back(self) -> None:
        """Have the driver give back the offers of all workers that went. A failed call is repeated."""
        backoff = Backoff(FIRST_DELAY_S, LONGEST_DELAY_S)
        while self._gone and self._driver is not None:
            key, worker = self._gone[0]
            while self._questions[key]:
                await self._question_ended.wait()
            try:
                await self._bounded("withdraw", partial(self._driver.withdraw_offer, worker))
            except DriverCallError as error:
                self._log_of(worker).warning("withdraw failed, will be repeated", error=error.failure.reason)
                self._gone.rotate(-1)
                await anyio.sleep(delay_after(backoff, error))
            else:
                backoff.reset()
                self._gone.popleft()


def delay_after(backoff: Backoff, error: DriverCallError) -> float:
    """The delay that the driver asks for, or else the next one of the back-off, in seconds."""
    delay = backoff.next_delay()
    return delay if error.delay_s is None else error.delay_s
