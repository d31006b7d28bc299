"""All drivers of one processor: one supervisor per resource and host, run concurrently.

A driver's failure affects only that driver (supervisor.py). commands.py carries out commands for whole allocations.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from typing import Protocol

import anyio
import anyio.lowlevel
import structlog
from anyio.abc import TaskGroup

from outfitter_drivers import api
from outfitter_proto.keys import AllocationKey
from outfitter_proto.records import FINAL_STATES, NO_COMMIT, Allocation, CommitNumber
from outfitter_service.core import model as m
from outfitter_service.metrics import Metrics
from outfitter_service.runtime.drivers.borrowers import Borrowers
from outfitter_service.runtime.drivers.commands import CommandRunner
from outfitter_service.runtime.drivers.supervisor import Emit, Loaded, Supervisor
from outfitter_service.runtime.drivers.translation import DriverCallError, foreign_code
from outfitter_service.runtime.identity import Identity
from outfitter_service.runtime.survivors.survivor_watch import SurvivorWatch

log = structlog.get_logger("outfitter.drivers")

HOSTS_AT_ONCE = 50
"""Hosts whose drivers are started in one turn of the event loop."""
MOST_NAMED = 8
"""Most workers that one warning names."""


class DriverCalls(Protocol):
    """The drivers, as the processor calls them."""

    def start_host(self, host: str) -> None: ...

    def stop_host(self, host: str) -> None: ...

    def stop_hosts_except(self, hosts: Collection[str]) -> None: ...

    def perform(self, command: m.Command, record: Allocation | None) -> None: ...

    def see_restored(self, records: Iterable[Allocation]) -> None: ...

    def see_ledger(self, records: Iterable[Allocation]) -> None: ...

    def warn_of_other_drivers(self, records: Iterable[Allocation]) -> None: ...

    def see_committed(self, record: Allocation) -> None: ...


class DriverPool:
    """The supervisors of one processor: one for each resource of each of its hosts."""

    def __init__(
        self,
        loaded: Mapping[str, Loaded],
        *,
        metrics: Metrics,
        survivors: SurvivorWatch | None = None,
        identity: Identity | None = None,
    ) -> None:
        """`loaded`: the configured resources by name; those without a driver are left out. `survivors`: finds the
        processes that workers leave behind; None: nobody looks for them. `identity`: the manager's, by which it knows
        whose processes use devices; None: nobody looks for strangers."""
        self._loaded = {name: resource for name, resource in loaded.items() if resource.served is not None}
        self._offers = {name for name, resource in self._loaded.items() if resource.served and resource.served.offers}
        self._warned: set[tuple[str, AllocationKey]] = set()
        """The grants of another driver that were said already, with their resources."""
        self._last_commit: CommitNumber = NO_COMMIT
        """The last one of which a record was seen."""
        self._metrics = metrics
        self._survivors = survivors
        names_users = any(each.served is not None and each.served.names_users for each in self._loaded.values())
        self._identity = identity if names_users else None
        self._borrowers: dict[str, Borrowers] = {}
        self._has_ledger = False
        self._hosts: dict[str, dict[str, Supervisor]] = {}
        self._inventory_scopes: dict[str, list[anyio.CancelScope]] = {}
        self._waiting_hosts: dict[str, None] = {}
        self._host_waits = anyio.Event()
        self._emit: Emit | None = None
        self._tasks: TaskGroup | None = None
        self._commands: CommandRunner | None = None

    async def run(self, emit: Emit, *, started: anyio.Event, host: str | None = None) -> None:
        """Run until cancelled. `emit` is called with the drivers' events. `started` is set once hosts may be served.
        `host`: served from the start."""
        self._emit = emit
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                self._commands = CommandRunner(tasks, self._loaded, self._supervisors, emit, self._survivors)
                if host is not None:
                    self._begin(host)
                started.set()
                await self._start_waiting_hosts()
        finally:
            self._tasks = self._commands = None

    @property
    def hosts(self) -> set[str]:
        """The hosts whose drivers run, or are about to."""
        return self._hosts.keys() | self._waiting_hosts.keys()

    def start_host(self, host: str) -> None:
        """Start the drivers of `host`, unless they run. If many hosts come, they start in later turns of the event
        loop."""
        if self._tasks is None or host in self._hosts or host in self._waiting_hosts:
            return
        self._waiting_hosts[host] = None
        self._host_waits.set()

    async def _start_waiting_hosts(self) -> None:
        """Start the drivers of new hosts, some at a time, until cancelled."""
        while True:
            await self._host_waits.wait()
            for host in list(islice(self._waiting_hosts, HOSTS_AT_ONCE)):
                self._begin(host)
            if not self._waiting_hosts:
                self._host_waits = anyio.Event()
            await anyio.lowlevel.checkpoint()

    def _begin(self, host: str) -> None:
        self._waiting_hosts.pop(host, None)
        if self._tasks is None or self._emit is None or host in self._hosts:
            return
        supervisors = self._hosts[host] = {
            name: Supervisor(
                resource, host=host, emit=self._emit, metrics=self._metrics, borrowers=self._borrowers_of(host)
            )
            for name, resource in self._loaded.items()
        }
        for supervisor in supervisors.values():
            if supervisor.served.inventory is not None:
                self._tasks.start_soon(self._run_inventory, supervisor, supervisor.served.inventory)

    def _borrowers_of(self, host: str) -> Borrowers | None:
        """Who may use the devices of a host; None: no driver says who does."""
        if self._identity is None:
            return None
        if host not in self._borrowers:
            self._borrowers[host] = Borrowers(self._identity)
            if self._has_ledger:
                self._borrowers[host].restore(())  # it is new: it has no allocations
        return self._borrowers[host]

    def _supervisors(self, host: str) -> Mapping[str, Supervisor]:
        """The supervisors of a served host. A waiting host is started at once, because they are needed now."""
        if host in self._waiting_hosts:
            self._begin(host)
        return self._hosts.get(host, {})

    async def _run_inventory(self, supervisor: Supervisor, driver: api.Inventory) -> None:
        if self._hosts.get(supervisor.host, {}).get(supervisor.name) is not supervisor:
            return  # the host's drivers were stopped before this task started
        with anyio.CancelScope() as scope:
            self._inventory_scopes.setdefault(supervisor.host, []).append(scope)
            await supervisor.keep_inventory(driver)

    def stop_host(self, host: str) -> None:
        """Stop the drivers of `host`."""
        self._waiting_hosts.pop(host, None)
        self._hosts.pop(host, None)
        self._borrowers.pop(host, None)
        for scope in self._inventory_scopes.pop(host, ()):
            scope.cancel()

    def stop_hosts_except(self, hosts: Collection[str]) -> None:
        """Stop the drivers of all other hosts."""
        for host in self.hosts - set(hosts):
            self.stop_host(host)

    def perform(self, command: m.Command, record: Allocation | None) -> None:
        """Start a committed command. Its result comes back as an event."""
        if self._commands is not None:
            self._commands.perform(command, record)

    def see_restored(self, records: Iterable[Allocation]) -> None:
        """Drivers may have set devices aside for the workers of these restored records that were granted none. Of a
        commit that was seen before they know: the manager takes the partition again. If a script were asked to give
        back once more what it has back, it would set devices aside anew."""
        known = self._last_commit
        for record in records:
            if record.commit > known:
                for supervisor, amount in self._offering(record):
                    supervisor.offers.assume(supervisor.worker(record), amount)
                self.see_committed(record)

    def see_ledger(self, records: Iterable[Allocation]) -> None:
        """These are all allocations of a restored ledger: from now on strangers can be told from workers."""
        self._has_ledger = True
        if self._identity is None:
            return
        by_host: dict[str, list[Allocation]] = {host: [] for host in self._borrowers}
        for record in records:
            if record.host in by_host:
                by_host[record.host].append(record)
        for host, of_host in by_host.items():
            self._borrowers[host].restore(of_host)

    def warn_of_other_drivers(self, records: Iterable[Allocation]) -> None:
        """Warn once of grants whose driver was to take the devices back, where the driver of now does no such thing:
        what was prepared is never undone, and a script that keeps books never strikes them out."""
        held: dict[str, dict[str, list[str]]] = {}
        for record in records:
            for resource in record.prepared or () if record.state not in FINAL_STATES else ():
                loaded = self._loaded.get(resource)  # without one the devices stay held, which is said at their release
                if loaded is None or loaded.spec.confirms or (resource, record.key) in self._warned:
                    continue
                self._warned.add((resource, record.key))
                ids = [info.get("id", "") for info in record.resources.get(resource, ())]
                held.setdefault(resource, {})[f"{record.host}/{record.worker}"] = ids
        for resource, workers in held.items():
            log.warning(
                "devices were granted by another driver, which was to take them back, and this one will not",
                resource=resource,
                devices=dict(islice(workers.items(), MOST_NAMED)),
                workers=len(workers),
                remedy="configure the former driver again and restart before these workers end, or tell it by hand",
            )

    def see_committed(self, record: Allocation) -> None:
        """The record is committed. If its worker went without a grant, what drivers set aside for it is given back."""
        self._last_commit = max(self._last_commit, record.commit)
        if (borrowers := self._borrowers.get(record.host)) is not None:
            borrowers.see(record)
        if record.state not in FINAL_STATES:
            return
        for supervisor, _ in self._offering(record):
            if supervisor.offers.withdraw(record.key, supervisor.worker(record)) and self._tasks is not None:
                self._tasks.start_soon(supervisor.offers.give_back)

    def _offering(self, record: Allocation) -> Iterator[tuple[Supervisor, int]]:
        """The supervisors whose drivers may have set devices aside for a record without a grant, each with how many."""
        if record.token is None and self._offers:
            supervisors = self._supervisors(record.host)
            for resource, amount in record.request.amounts.items():
                if resource in self._offers and amount and resource in supervisors:
                    yield supervisors[resource], amount


async def close(loaded: Iterable[Loaded], within_s: float) -> None:
    """Close all drivers concurrently, each within `within_s`."""
    with anyio.CancelScope(shield=True):
        async with anyio.create_task_group() as closing:
            for resource in loaded:
                if resource.served is not None:
                    closing.start_soon(_close, resource.spec.name, resource.served.driver, within_s)


async def _close(name: str, driver: api.ExternalResourceDriver, within_s: float) -> None:
    with anyio.move_on_after(within_s) as scope:
        try:
            with foreign_code():
                await driver.aclose()
        except DriverCallError as error:
            log.warning("driver did not close well", resource=name, error=error.failure.reason)
    if scope.cancelled_caught:
        log.warning("driver did not close in time", resource=name, after_s=within_s)
