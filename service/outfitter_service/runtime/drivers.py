"""Running drivers: one supervisor a resource, each call bounded, one driver's failure its own.

Supervisors turn what drivers do into events for the core, and carry out the core's commands. They know no
rules: what a failure means for a worker is decided in core/.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, Protocol, TypeVar

import anyio
import msgspec
import structlog
from anyio.abc import TaskGroup
from msgspec import Struct, structs

from outfitter_drivers import api
from outfitter_proto.records import Allocation
from outfitter_service.core import model as m
from outfitter_service.metrics import Metrics

log = structlog.get_logger("outfitter.drivers")

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0
SHORTEST_DELAY_S = 0.05
"""A driver that wants to be asked again at once is asked after this: it must not keep the manager busy."""
REASON_LENGTH = 2000
"""What of a driver's message is kept in a record: a reason is for people."""
CLOSE_WITHIN_S = 2.0
"""How long each driver may take to close; all close at the same time."""
ASKED_AGAIN = 16
"""How many smaller amounts an on-demand driver is asked for before the least one that would do."""

T = TypeVar("T")
Emit = Callable[[m.Event], None]


class Loaded(Struct, frozen=True, kw_only=True):
    """A configured resource with its driver, if it has one, and the core's view of it."""

    spec: m.ResourceSpec
    driver: api.ExternalResourceDriver | None = None
    timeout_s: float | None = None


class DriverCalls(Protocol):
    """What the processor asks of the drivers."""

    def perform(self, command: m.Command, record: Allocation | None) -> None: ...


def verdict(error: BaseException) -> m.DriverFailure:
    """What an exception of a driver amounts to. Only `PermanentDriverError` is permanent."""
    if isinstance(error, TimeoutError) and not str(error):
        return m.DriverFailure(reason="it took too long")
    reason = written(str(error) or type(error).__name__)[:REASON_LENGTH]
    if not isinstance(error, api.DriverError):
        reason = f"{type(error).__name__}: {reason}"[:REASON_LENGTH]
    return m.DriverFailure(reason=reason, permanent=isinstance(error, api.PermanentDriverError))


def written(text: str) -> str:
    """Foreign text as it can go over the wire: half characters, as in names of files, are escaped."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


@contextmanager
def foreign_code() -> Iterator[None]:
    """A driver's own code runs here. A cancellation that nobody asked this task for is its failure like any other:
    let through, it would end the supervisors of all drivers."""
    try:
        yield
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise RuntimeError("something that the driver waited for was cancelled") from error


def pause(error: Exception, delay: float) -> float:
    """Seconds until a call that failed is repeated: as the driver wants it, else `delay`."""
    wanted = error.delay if isinstance(error, api.TemporaryDriverError) else None
    return delay if wanted is None else max(wanted, SHORTEST_DELAY_S)


def known_device(resource: str, device: api.Device) -> m.KnownDevice:
    """A driver's device with its canonical id: its own, or `<resource>:<index>`.

    Raises:
        PermanentDriverError: it has neither an id nor an index, or something of it is not the text it must be.
    """
    device_id = device.id
    if device_id is None:
        index = device.properties.get("index")
        if index is None:
            raise api.PermanentDriverError(
                f"the driver of {resource} reported a device with neither an id nor the property 'index': "
                f"{dict(device.properties)!r}"
            )
        device_id = f"{resource}:{index}"
    known = m.KnownDevice(
        id=device_id,
        properties=dict(device.properties),
        aliases=tuple(device.aliases),
        health=device.health,
        reason=device.reason,
        env=dict(device.env),
        cdi=tuple(device.cdi),
    )
    try:
        # what is written must be readable again: a ledger that is not would refuse its host
        return msgspec.json.decode(msgspec.json.encode(known), type=m.KnownDevice)
    except (msgspec.MsgspecError, UnicodeError, TypeError) as error:
        raise api.PermanentDriverError(
            f"the driver of {resource} reported device {device_id!r} with something that is no text: {error}"
        ) from error


def known_devices(resource: str, devices: Sequence[api.Device]) -> tuple[m.KnownDevice, ...]:
    """A driver's devices, each id once: the first one counts."""
    found: dict[str, m.KnownDevice] = {}
    for device in devices:
        known = known_device(resource, device)
        found.setdefault(known.id, known)
    return tuple(found.values())


class DriverPool:
    """All supervisors of one manager on one host. `async with pool:` runs them."""

    def __init__(
        self,
        loaded: Mapping[str, Loaded],
        *,
        host: str,
        emit: Emit,
        metrics: Metrics,
        close_within_s: float = CLOSE_WITHIN_S,
    ) -> None:
        self.loaded = loaded
        self._close_within_s = close_within_s
        self._supervisors = {
            name: Supervisor(resource, host=host, emit=emit, metrics=metrics)
            for name, resource in loaded.items()
            if resource.driver is not None
        }
        self._emit = emit
        self._tasks: TaskGroup | None = None
        self._busy: dict[str, anyio.Lock] = {}
        self._under_way: set[m.Command] = set()

    async def run(self, *, started: anyio.Event) -> None:
        """Run until cancelled; then close every driver, bounded."""
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                for supervisor in self._supervisors.values():
                    if isinstance(supervisor.driver, api.Inventory):
                        tasks.start_soon(supervisor.keep_inventory, supervisor.driver)
                started.set()
                await anyio.sleep_forever()
        finally:
            self._tasks = None
            with anyio.CancelScope(shield=True):
                async with anyio.create_task_group() as closing:
                    for supervisor in self._supervisors.values():
                        closing.start_soon(supervisor.close, self._close_within_s)

    def perform(self, command: m.Command, record: Allocation | None) -> None:
        """Begin to carry out a committed command; its end comes back as an event. One that is under way already
        (the partition was taken anew meanwhile) is not begun again: its end is the answer to both."""
        if self._tasks is None or command in self._under_way:
            return
        match command:
            case m.Discover():
                self._tasks.start_soon(self._supervisors[command.resource].discover, command, record)
            case m.Prepare() if record is not None:
                self._under_way.add(command)
                self._tasks.start_soon(self._prepare, command, record)
            case m.Unprepare() if record is not None:
                self._under_way.add(command)
                self._tasks.start_soon(self._unprepare, command, record)

    def _concerned(self, record: Allocation) -> Iterator[tuple[Supervisor, api.Grant]]:
        for resource, infos in record.resources.items():
            supervisor = self._supervisors.get(resource)
            if supervisor is not None:
                yield supervisor, supervisor.grant(record, infos)

    def _alone(self, key: str) -> anyio.Lock:
        """Calls about one allocation are serial; its devices are no other allocation's meanwhile."""
        return self._busy.setdefault(key, anyio.Lock())

    async def _prepare(self, command: m.Prepare, record: Allocation) -> None:
        error: str | None = None
        async with self._alone(command.allocation):
            for supervisor, grant in self._concerned(record):
                error = await supervisor.prepare(grant)
                if error is not None:
                    break
        self._under_way.discard(command)
        self._emit(m.Prepared(allocation=command.allocation, token=command.token, error=error))

    async def _unprepare(self, command: m.Unprepare, record: Allocation) -> None:
        checked: list[bool] = []
        async with self._alone(command.allocation):
            for supervisor, grant in self._concerned(record):
                await supervisor.unprepare(grant)
                checked.append(await supervisor.wait_until_unused(grant))
        self._busy.pop(command.allocation, None)
        confirmed = bool(checked) and all(checked)
        self._under_way.discard(command)
        self._emit(m.Unprepared(allocation=command.allocation, token=command.token, confirmed=confirmed))


class Supervisor:
    """Keeps one resource's driver at work on one host."""

    def __init__(self, loaded: Loaded, *, host: str, emit: Emit, metrics: Metrics) -> None:
        if loaded.driver is None:
            raise ValueError(f"resource {loaded.spec.name!r} has no driver to supervise")
        self.name = loaded.spec.name
        self.driver = loaded.driver
        self._timeout_s = loaded.timeout_s if loaded.timeout_s is not None else loaded.driver.call_timeout
        self._host = host
        self._emit = emit
        self._metrics = metrics
        self._retry_delay_s = FIRST_DELAY_S
        self._waits = loaded.spec.on_failure == m.OnFailure.WAIT
        self._log = log.bind(resource=self.name, host=host)

    def _log_of(self, worker: api.Worker) -> Any:
        """The log for lines about one worker."""
        return self._log.bind(worker=worker.worker, incarnation=worker.incarnation)

    def grant(self, record: Allocation, infos: Sequence[Mapping[str, str]]) -> api.Grant:
        return api.Grant(
            allocation=record.key,
            token=record.token or 0,
            worker=self._worker(record),
            device_ids=tuple(info["id"] for info in infos),
            devices=tuple(infos),
        )

    def _worker(self, record: Allocation | None) -> api.Worker:
        if record is None:
            return api.Worker(host=self._host, resource=self.name)
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
        """Count and time one call; a failure is counted and goes on."""
        self._metrics.driver_runs.labels(self.name, call).inc()
        begun = time.monotonic()
        try:
            yield
        except Exception:
            self._metrics.driver_failures.labels(self.name, call).inc()
            raise
        finally:
            self._metrics.driver_seconds.labels(self.name, call).observe(time.monotonic() - begun)

    async def _bounded(self, call: str, awaitable: Awaitable[T]) -> T:
        with self._measured(call):
            try:
                with anyio.fail_after(self._timeout_s), foreign_code():
                    return await awaitable
            except TimeoutError as error:
                if str(error):
                    raise
                raise TimeoutError(f"no answer within {self._timeout_s:g} s") from error

    async def close(self, within_s: float) -> None:
        with anyio.move_on_after(within_s) as scope:
            try:
                with foreign_code():
                    await self.driver.aclose()
            except Exception as error:  # noqa: BLE001 - a driver's own code; its failure must not stop the shutdown
                self._log.warning("driver did not close well", error=str(error))
        if scope.cancelled_caught:
            self._log.warning("driver did not close in time", after_s=within_s)

    # --- inventory ---

    async def keep_inventory(self, driver: api.Inventory) -> None:
        """Report every inventory the driver yields, and every failure, for ever."""
        delay = FIRST_DELAY_S
        told: m.DriverReport | None = None

        def tell(report: m.DriverReport) -> None:
            nonlocal told
            if report != told:
                told = report
                self._emit(report)

        while True:
            try:
                async with aclosing(self._inventories(driver)) as inventories:
                    async for devices in inventories:
                        tell(self._report(devices))
                        delay = FIRST_DELAY_S
            except Exception as error:  # noqa: BLE001 - a driver's own code; any failure of it is a report
                failure = verdict(error)
                if told is None or told.failure != failure:
                    self._log.warning("driver failed", error=failure.reason, permanent=failure.permanent)
                tell(m.DriverReport(host=self._host, resource=self.name, failure=failure))
                await anyio.sleep(pause(error, delay))
                delay = min(delay * 2, LONGEST_DELAY_S)

    async def _inventories(self, driver: api.Inventory) -> AsyncGenerator[Sequence[api.Device], None]:
        sets = driver.inventory(self._host)
        try:
            first = await self._bounded("inventory", anext(sets, None))
            if first is not None:
                yield first
                with foreign_code():
                    async for devices in sets:
                        self._metrics.driver_runs.labels(self.name, "inventory").inc()
                        yield devices
        finally:
            if isinstance(sets, AsyncGenerator):
                with anyio.move_on_after(self._timeout_s):
                    await sets.aclose()
        raise api.TemporaryDriverError("its inventory ended")

    def _report(self, devices: Sequence[api.Device]) -> m.DriverReport:
        return m.DriverReport(host=self._host, resource=self.name, devices=known_devices(self.name, devices))

    # --- on demand ---

    async def discover(self, command: m.Discover, record: Allocation | None) -> None:
        """Ask for the amount, then for less, down to the least that would do; report what came of it."""
        most = command.least if self.driver.knows_holders else command.amount
        amounts = [*[*range(most, command.least, -1)][:ASKED_AGAIN], command.least]
        failure: m.DriverFailure
        delay = self._retry_delay_s
        for amount in amounts:
            try:
                devices = await self._retrieve(amount, record)
            except api.NotEnoughDevicesError as error:
                failure = structs.replace(verdict(error), permanent=True, at_least=command.least)
            except Exception as error:  # noqa: BLE001 - a driver's own code; any failure of it is a report
                failure = verdict(error)
                delay = pause(error, delay)
                told = self._log_of(self._worker(record))
                told.warning("driver failed", error=failure.reason, permanent=failure.permanent)
                break
            else:
                self._retry_delay_s = FIRST_DELAY_S
                self._emit(m.DriverReport(host=self._host, resource=self.name, devices=devices, asked=command.amount))
                return
        self._emit(m.DriverReport(host=self._host, resource=self.name, failure=failure, asked=command.amount))
        if not failure.permanent or self._waits:
            self._retry_delay_s = min(self._retry_delay_s * 2, LONGEST_DELAY_S)
            await anyio.sleep(delay)
            self._emit(m.DriverRetry(host=self._host, resource=self.name))

    async def _retrieve(self, amount: int, record: Allocation | None) -> tuple[m.KnownDevice, ...]:
        infos = await self._bounded("retrieve", self.driver.retrieve_resource_info(amount, self._worker(record)))
        if infos is None:
            raise api.PermanentDriverError(f"it returned nothing at all for {amount} devices")
        return known_devices(self.name, [self.driver.device(info) for info in infos])

    # --- preparing and taking back ---

    async def prepare(self, grant: api.Grant) -> str | None:
        """Make ready; the reason if it failed."""
        if not isinstance(self.driver, api.Preparation):
            return None
        try:
            await self._bounded("prepare", self.driver.prepare(grant))
        except Exception as error:  # noqa: BLE001 - a driver's own code; its failure fails this allocation
            failure = verdict(error)
            self._log_of(grant.worker).warning("prepare failed", error=failure.reason)
            return f"the driver of {self.name} could not prepare: {failure.reason}"
        return None

    async def unprepare(self, grant: api.Grant) -> None:
        """Take back; repeated until it has succeeded, since the devices are lent to nobody before."""
        if isinstance(self.driver, api.Preparation):
            await self._until_done("unprepare", grant, self.driver.unprepare)

    async def wait_until_unused(self, grant: api.Grant) -> bool:
        """Wait until nobody uses the devices; False if this driver cannot tell."""
        driver = self.driver
        if not isinstance(driver, api.InUseCheck):
            return False

        async def check(grant: api.Grant) -> None:
            user = await driver.in_use(grant)
            if user is not None:
                raise api.TemporaryDriverError(f"still in use by {user}")

        await self._until_done("in-use", grant, check)
        return True

    async def _until_done(self, call: str, grant: api.Grant, act: Callable[[api.Grant], Awaitable[None]]) -> None:
        delay = FIRST_DELAY_S
        while True:
            try:
                await self._bounded(call, act(grant))
            except Exception as error:  # noqa: BLE001 - a driver's own code; tried again, and said each time
                reason = verdict(error).reason
                self._log_of(grant.worker).warning(f"{call} failed, will be repeated", error=reason)
                await anyio.sleep(pause(error, delay))
                delay = min(delay * 2, LONGEST_DELAY_S)
            else:
                return
