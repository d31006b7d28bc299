"""Supervises one resource's driver: limits and measures each call, contains its failures, and repeats where that helps.

The supervisor turns the driver's answers into events for the core, and carries out the core's commands. It knows no
rules: core/ decides what a failure means for a worker.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, TypeVar

import anyio
import structlog
from msgspec import Struct, structs

from outfitter_drivers import api
from outfitter_proto.keys import AllocationKey
from outfitter_proto.records import NO_TOKEN, Allocation, ReasonCode, Token
from outfitter_proto.support.backoff import Backoff
from outfitter_service.core import delays
from outfitter_service.core import model as m
from outfitter_service.metrics import Metrics
from outfitter_service.runtime.drivers.borrowers import Borrowers
from outfitter_service.runtime.drivers.building import ServableDriver
from outfitter_service.runtime.drivers.health_checks import HealthChecks, asked
from outfitter_service.runtime.drivers.health_script import HealthScript, Word
from outfitter_service.runtime.drivers.offers import FIRST_DELAY_S, LONGEST_DELAY_S, OutstandingOffers, delay_after
from outfitter_service.runtime.drivers.silence import Silence
from outfitter_service.runtime.drivers.strangers import UseWatch, named_users
from outfitter_service.runtime.drivers.translation import (
    SHORTEST_DELAY_S,
    DriverCallError,
    foreign_code,
    known_devices,
    written,
)
from outfitter_service.runtime.survivors.delay_reports import DelayReports

log = structlog.get_logger("outfitter.drivers")

LONGEST_WORDS = 500
"""Most characters of a driver's message in the reason of a delayed or an unconfirmed release."""
LONGEST_SHORTAGE_S = 5.0
"""The longest delay in seconds while other workers hold devices that the driver does not name. Nobody calls the driver
because a device is released."""
ASKED_AGAIN = 16
"""Most amounts that an on-demand driver is asked for before the least sufficient one."""

NO_CHECK = "no in-use check"
"""Why nobody can tell whether a device is in use whose driver has no check."""
NO_QUESTION = nullcontext()
T = TypeVar("T")
Emit = Callable[[m.Event], None]


class Loaded(Struct, frozen=True, kw_only=True):
    """A configured resource. `spec`: its configuration, for the core. `served`: its driver; None: it has no driver, or
    the driver could not be built."""

    spec: m.ResourceSpec
    served: ServableDriver | None = None


class Supervisor:
    """Calls one resource's driver for one host."""

    def __init__(
        self, loaded: Loaded, *, host: str, emit: Emit, metrics: Metrics, borrowers: Borrowers | None = None
    ) -> None:
        """`host`: the host whose devices the driver manages. `emit`: called with the driver's answers as events.
        `borrowers`: who may use these devices; None: nobody looks for strangers."""
        served = loaded.served
        if served is None:
            raise ValueError(f"resource {loaded.spec.name!r} has no driver to supervise")
        self.name = loaded.spec.name
        self.served = served
        self.host = host
        self._emit = emit
        self._metrics = metrics
        self._backoff = Backoff(FIRST_DELAY_S, LONGEST_DELAY_S)
        self._retry_at: float | None = None
        self._failed_at_least = 0
        self.offers = OutstandingOffers(served.offers, self._bounded, self._log_of)
        self._waits = loaded.spec.on_failure == m.OnFailure.WAIT
        self._log = log.bind(resource=self.name, host=host)
        judges = borrowers is not None and served.in_use_check is not None and not loaded.spec.shared
        self._use = UseWatch(self.name, borrowers, emit=emit, own=os.getpid()) if borrowers and judges else None

    def _log_of(self, worker: api.Worker) -> Any:
        """The log with one worker's fields."""
        return self._log.bind(worker=worker.worker, incarnation=worker.incarnation)

    def grant(self, record: Allocation, infos: Sequence[Mapping[str, str]]) -> api.Grant:
        """A record's grant of this resource, as the driver gets it. `infos`: those of its devices."""
        return api.Grant(
            allocation=record.key,
            token=record.token or NO_TOKEN,
            worker=self.worker(record),
            device_ids=tuple(info["id"] for info in infos),
            devices=tuple(infos),
            is_given_back=record.reason_code == ReasonCode.DEREGISTERED,
        )

    def worker(self, record: Allocation | None) -> api.Worker:
        if record is None:
            return api.Worker(host=self.host, resource=self.name)
        owner = record.request.owner
        return api.Worker(
            host=record.host,
            resource=self.name,
            worker=record.worker,
            incarnation=record.incarnation,
            owner_pid=owner.pid if owner is not None else None,
        )

    @contextmanager
    def _measured(self, call: str) -> Iterator[None]:
        """A context that counts and times one call, and counts a failure."""
        self._metrics.driver_runs.labels(self.name, call).inc()
        begun = time.monotonic()
        try:
            yield
        except Exception:
            self._metrics.driver_failures.labels(self.name, call).inc()
            raise
        finally:
            self._metrics.driver_seconds.labels(self.name, call).observe(time.monotonic() - begun)

    async def _bounded(self, call: str, act: Callable[[], Awaitable[T]]) -> T:
        """Call `act`, a driver's code, within its time limit. Returns its result. `call`: the call's label in metrics.

        Raises:
            DriverCallError: it raised an error, or took longer than the driver's time limit.
        """
        with self._measured(call):
            try:
                with anyio.fail_after(self.served.timeout_s), foreign_code():
                    return await act()
            except TimeoutError as error:
                reason = f"TimeoutError: no answer within {self.served.timeout_s:g} s"
                raise DriverCallError(m.DriverFailure(reason=reason)) from error

    # --- inventory ---

    async def keep_inventory(self, driver: api.Inventory) -> None:
        """Report every inventory that the driver yields, and every failure, for ever. A failure says as well which
        devices nobody knows any more, once the driver has not answered for long."""
        if self._use is None:
            await self._keep_inventory(driver, self._emit)
            return
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._use.keep_judging)
            await self._keep_inventory(driver, self._use.report)

    async def _keep_inventory(self, driver: api.Inventory, send: Callable[[m.DriverReport], None]) -> None:
        last: m.DriverReport | None = None

        def emit(report: m.DriverReport) -> None:
            nonlocal last
            if report != last:
                last = report
                send(report)

        script = self.served.health_script
        if script is None:
            await self._report_inventory(driver, emit)
            return
        checks = HealthChecks(script, partial(self._ask_script, script), emit, self._log)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(checks.run)
            await self._report_inventory(driver, checks.report)

    async def _ask_script(self, script: HealthScript, device: m.KnownDevice) -> Word:
        """What the health script says of a device.

        Raises:
            DriverCallError: it says nothing.
        """
        with self._measured("health-script"):
            return await asked(script, self.host, self.name, device)

    async def _report_inventory(self, driver: api.Inventory, report: Callable[[m.DriverReport], object]) -> None:
        backoff = Backoff(FIRST_DELAY_S, LONGEST_DELAY_S)
        silence = Silence()
        failure: m.DriverFailure | None = None
        while True:
            try:
                async with aclosing(self._inventories(driver)) as inventories:
                    async for devices in inventories:
                        begun = anyio.current_time()
                        with foreign_code():
                            checked = await known_devices(self.name, devices)
                            users = None if self._use is None else named_users(devices)
                        if self._use is not None and users is not None:
                            await self._use.looked(checked, users)
                        silence.answered(checked)
                        failure = None
                        report(m.DriverReport(host=self.host, resource=self.name, devices=checked))
                        backoff.reset()
                        await anyio.sleep_until(begun + SHORTEST_DELAY_S)
            except DriverCallError as error:
                if failure != error.failure:
                    failure = error.failure
                    self._log.warning("driver failed", error=failure.reason, permanent=failure.permanent)
                pause = delay_after(backoff, error)
                unknown = silence.failed(failure.reason, pause_s=pause)
                report(m.DriverReport(host=self.host, resource=self.name, devices=unknown, failure=failure))
                await anyio.sleep(pause)

    async def _inventories(self, driver: api.Inventory) -> AsyncGenerator[Sequence[api.Device], None]:
        """Each set of devices that the driver yields.

        Raises:
            DriverCallError: the driver failed, or its inventory ended.
        """
        with foreign_code():
            sets = driver.inventory(self.host)
        try:
            devices = await self._bounded("inventory", lambda: anext(sets, None))
            while devices is not None:
                yield devices
                with foreign_code():
                    devices = await anext(sets, None)
                    self._metrics.driver_runs.labels(self.name, "inventory").inc()
        finally:
            with anyio.move_on_after(self.served.timeout_s), suppress(DriverCallError), foreign_code():
                if isinstance(sets, AsyncGenerator):
                    await sets.aclose()
        raise DriverCallError(m.DriverFailure(reason="its inventory ended"))

    # --- on demand ---

    async def discover(
        self, command: m.Discover, record: Allocation | None, question: AbstractContextManager[Any] = NO_QUESTION
    ) -> None:
        """Ask the driver for the command's amount, then for less, down to the least sufficient amount. Report the
        result. `record`: the waiting worker's. A shortage is permanent, unless other workers hold devices that the
        driver does not name. `question`: of `offers`, begun before this task."""
        with question:
            delay = await self._discover(command, record)
        if delay is not None:
            await self._retry_after(delay)

    async def _discover(self, command: m.Discover, record: Allocation | None) -> float | None:
        """Ask, and report. Returns the delay until the driver is to be asked again; None: it is not."""
        most = command.least if self.served.knows_holders else command.amount
        amounts = [*[*range(most, command.least, -1)][:ASKED_AGAIN], command.least]
        failure: m.DriverFailure
        is_taken = self.served.knows_holders and command.held > 0
        delay = min(self._backoff.delay, LONGEST_SHORTAGE_S) if is_taken else self._backoff.delay
        for amount in amounts:
            try:
                devices = await self._retrieve(amount, record)
            except DriverCallError as error:
                failure = error.failure
                if error.is_shortage:
                    failure = structs.replace(failure, permanent=not is_taken)
                    continue
                delay = delay if error.delay_s is None else error.delay_s
                worker_log = self._log_of(self.worker(record))
                worker_log.warning("driver failed", error=failure.reason, permanent=failure.permanent)
                break
            else:
                if command.least >= self._failed_at_least:
                    self._backoff.reset()
                    self._failed_at_least = 0
                self._emit(m.DriverReport(host=self.host, resource=self.name, devices=devices, asked=command.amount))
                return None
        failure = structs.replace(failure, at_least=command.least)
        self._emit(m.DriverReport(host=self.host, resource=self.name, failure=failure, asked=command.amount))
        if not failure.permanent or self._waits:
            self._failed_at_least = command.least
            return delay
        return None

    async def _retry_after(self, delay: float) -> None:
        """Have the driver asked again after a delay, once for all failures so far: several failing amounts must not
        lead to more questions."""
        due = anyio.current_time() + delay
        if self._retry_at is not None and self._retry_at <= due:
            return
        self._retry_at = due
        self._backoff.next_delay()
        await anyio.sleep(delay)
        if self._retry_at == due:
            self._retry_at = None
            self._emit(m.DriverRetry(host=self.host, resource=self.name))

    async def _retrieve(self, amount: int, record: Allocation | None) -> tuple[m.KnownDevice, ...]:
        worker = self.worker(record)
        infos = await self._bounded("retrieve", lambda: self.served.driver.retrieve_resource_info(amount, worker))
        with foreign_code():
            if infos is None:
                raise api.PermanentDriverError(f"it returned None for {amount} devices")
            return await known_devices(self.name, (self.served.driver.device(info) for info in infos))

    # --- preparing and taking back ---

    async def prepare(self, grant: api.Grant) -> str | None:
        """Prepare a grant's devices. Returns the reason if the driver failed, else None."""
        driver = self.served.preparation
        if driver is None:
            return None
        try:
            await self._bounded("prepare", lambda: driver.prepare(grant))
        except DriverCallError as error:
            reason = error.failure.reason
            self._log_of(grant.worker).warning("prepare failed", error=reason)
            return f"the driver of {self.name} could not prepare: {reason}"
        return None

    async def unprepare(self, grant: api.Grant) -> None:
        """Take a grant's devices back. The call is repeated until it succeeds: until then no worker gets them."""
        driver = self.served.preparation
        if driver is not None:
            await self._until_done("unprepare", grant, lambda: driver.unprepare(grant))

    async def wait_until_unused(self, grant: api.Grant) -> str | None:
        """Wait until nobody uses a grant's devices. Returns why nobody can tell; None: nobody does."""
        driver = self.served.in_use_check
        if driver is None:
            return NO_CHECK
        untold: str | None = None

        async def check() -> None:
            nonlocal untold
            answer = await driver.in_use(grant)
            untold = written(str(answer.reason)[:LONGEST_WORDS]) if isinstance(answer, api.CannotTell) else None
            if answer is not None and untold is None:
                raise api.TemporaryDriverError(f"still in use by {answer}")

        await self._until_done("in-use", grant, check)
        return untold

    async def _until_done(self, call: str, grant: api.Grant, act: Callable[[], Awaitable[None]]) -> None:
        backoff = Backoff(FIRST_DELAY_S, LONGEST_DELAY_S)
        reports = DelayReports(anyio.current_time)
        while True:
            try:
                await self._bounded(call, act)
            except DriverCallError as error:
                reason = error.failure.reason
                self._log_of(grant.worker).warning(f"{call} failed, will be repeated", error=reason)
                words = delays.of_driver(self.name, f"says: {reason}")[:LONGEST_WORDS]
                if reports.is_due:
                    reports.report(words)
                    self._emit(
                        m.ReleaseDelayed(
                            allocation=AllocationKey(grant.allocation), token=Token(grant.token), reason=words
                        )
                    )
                await anyio.sleep(delay_after(backoff, error))
            else:
                return
