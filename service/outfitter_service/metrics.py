"""Every metric of the service, and the only importer of prometheus_client.

Metrics have base units and the usual suffixes. Labels are bounded (resources, states, reasons, kinds, drivers). Every
labelled counter starts at zero. Gauges of state are computed at each scrape.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import accumulate

from msgspec import Struct
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from outfitter_proto import __version__
from outfitter_proto.records import AllocationState, NobodysCode, ReasonCode, Unwatched
from outfitter_proto.support import descriptors
from outfitter_service import standard_error
from outfitter_service.core.model import INTERNAL_KINDS
from outfitter_service.core.state.lending import Block

CONTENT_TYPE = CONTENT_TYPE_LATEST

RELEASE_REASONS = (
    ReasonCode.DEREGISTERED,
    ReasonCode.WITHDRAWN,
    ReasonCode.LEASE_EXPIRED,
    ReasonCode.OWNER_DIED,
    ReasonCode.SUPERSEDED,
    ReasonCode.PREPARE_FAILED,
)
PENDING_REASONS = (
    ReasonCode.BUSY, ReasonCode.CORDONED, ReasonCode.USED_BY_STRANGER, ReasonCode.INFEASIBLE,
    ReasonCode.PLACEMENT_NOT_FOUND, ReasonCode.NOT_REPORTED, ReasonCode.DRIVER_FAILED,
)  # fmt: skip
EVENT_KINDS = ("register", "heartbeat", "deregister", "repeated", "late", *INTERNAL_KINDS, "dead-letter", "defect")

DRIVER_CALLS = ("inventory", "retrieve", "prepare", "unprepare", "withdraw", "in-use", "health-script")
ALLOCATION_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10,
    15, 20, 30, 45, 60, 90, 120, 180, 300, 450, 600, 900, 1800, 3600, 7200,
)  # fmt: skip
COMMIT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class StateCounts(Struct, frozen=True, kw_only=True):
    """The values of the gauges, from committed records.

    `devices` by (resource, `free` | `held` | `cordoned` | `unhealthy` | `unknown` | `held-back`), `models` by
    (resource, model, the same), `healthy` by resource, held or cordoned or not, `blocked` by (resource, why nobody
    gets them), held or not. `allocations` by (resource, state), `pending` by (resource, reason code).
    `watched_owners`, `polled_owners`: owner processes.
    """

    devices: Tally[tuple[str, str]]
    allocations: Tally[tuple[str, str]]
    pending: Tally[tuple[str, str]]
    healthy: Tally[str] = Tally()
    blocked: Tally[tuple[str, str]] = Tally()
    models: Tally[tuple[str, str, str]] = Tally()
    watched_owners: int = 0
    polled_owners: int = 0
    unwatched_owners: Tally[Unwatched] = Tally()
    """Allocations by the reason why their owner is not watched."""
    leases: int = 0
    """Allocations with a lease."""
    records: int = 0
    """Allocations in memory."""
    lag: int = 0
    """Undecided records of the input."""
    oldest_unanswered_s: float = 0.0
    """Age in seconds of the oldest undecided record that is fetched."""

    @classmethod
    def together(cls, parts: Iterable[StateCounts]) -> StateCounts:
        """The sum over several processors of one manager."""
        counts = [*parts]
        return cls(
            devices=sum((part.devices for part in counts), Tally()),
            healthy=sum((part.healthy for part in counts), Tally()),
            blocked=sum((part.blocked for part in counts), Tally()),
            models=sum((part.models for part in counts), Tally()),
            allocations=sum((part.allocations for part in counts), Tally()),
            pending=sum((part.pending for part in counts), Tally()),
            watched_owners=sum(part.watched_owners for part in counts),
            polled_owners=sum(part.polled_owners for part in counts),
            unwatched_owners=sum((part.unwatched_owners for part in counts), Tally()),
            leases=sum(part.leases for part in counts),
            records=sum(part.records for part in counts),
            lag=sum(part.lag for part in counts),
            oldest_unanswered_s=max((part.oldest_unanswered_s for part in counts), default=0.0),
        )


class _StateCollector(Collector):
    """Computes the gauges of state at each scrape."""

    def __init__(self, resources: Iterable[str], state_counts: Callable[[], StateCounts | None]) -> None:
        self._resources = list(resources)
        self._state_counts = state_counts

    def collect(self) -> Iterator[Metric]:
        now = self._state_counts() or StateCounts.together(())
        devices = GaugeMetricFamily(
            "outfitter_devices", "Devices known to the manager, by resource and state.", labels=["resource", "state"]
        )
        healthy = GaugeMetricFamily(
            "outfitter_healthy_devices", "Devices that their driver reports healthy, held or not.", labels=["resource"]
        )
        blocked = GaugeMetricFamily(
            "outfitter_blocked_devices", "Devices that nobody gets, by why, held or not.", labels=["resource", "state"]
        )
        models = GaugeMetricFamily(
            "outfitter_devices_of_model", "Devices of which the driver names the model, by state.",
            labels=["resource", "model", "state"],
        )  # fmt: skip
        allocations = GaugeMetricFamily(
            "outfitter_allocations", "Allocation records, by resource and state.", labels=["resource", "state"]
        )
        pending = GaugeMetricFamily(
            "outfitter_pending", "Waiting workers, by each resource that they want and by reason.",
            labels=["resource", "reason"],
        )  # fmt: skip
        device_states = ("free", "held", *Block)
        for resource in sorted(
            {*self._resources, *(name for name, _ in (*now.devices, *now.allocations, *now.pending))}
        ):
            is_resource = resource in self._resources or any(
                (resource, state) in now.devices for state in device_states
            )
            for state in device_states if is_resource else ():
                devices.add_metric([resource, state], now.devices[resource, state])
            if is_resource:
                healthy.add_metric([resource], now.healthy[resource])
            for block in Block if is_resource else ():
                blocked.add_metric([resource, block], now.blocked[resource, block])
            for allocation_state in AllocationState:
                allocations.add_metric([resource, allocation_state], now.allocations[resource, allocation_state])
            for reason in PENDING_REASONS:
                pending.add_metric([resource, reason], now.pending[resource, reason])
        for resource, model in sorted({(resource, model) for resource, model, _ in now.models}):
            for state in device_states:
                models.add_metric([resource, model, state], now.models[resource, model, state])
        unwatched = GaugeMetricFamily(
            "outfitter_unwatched_owners",
            "Live allocations whose owner process is not watched, by reason. Only leases end them.",
            labels=["reason"],
        )
        for why in Unwatched:
            unwatched.add_metric([why], now.unwatched_owners[why])
        yield devices
        yield healthy
        yield blocked
        yield models
        yield allocations
        yield pending
        yield unwatched
        for name, documentation, value in (
            ("outfitter_watched_owners", "Watched owner processes, each counted once.", now.watched_owners),
            ("outfitter_polled_owners", "Watched owner processes that are polled in turns.", now.polled_owners),
            ("outfitter_leases", "Allocations with a lease.", now.leases),
            ("outfitter_ledger_records", "Allocation records in memory.", now.records),
            ("outfitter_input_lag_records", "Undecided records of the input, fetched or not.", now.lag),
            (
                "outfitter_oldest_unanswered_seconds",
                "Age of the oldest fetched message that is not decided.",
                now.oldest_unanswered_s,
            ),
        ):
            yield GaugeMetricFamily(name, documentation, value=value)


class Waits(Collector):
    """A histogram of seconds by resource. Only one thread counts in it, so it has no lock."""

    def __init__(self, name: str, documentation: str, buckets: tuple[float, ...], resources: Iterable[str]) -> None:
        self._name = name
        self._documentation = documentation
        self._buckets = buckets
        self._counts = {resource: [0] * (len(buckets) + 1) for resource in resources}
        self._sums = dict.fromkeys(self._counts, 0.0)

    def observe(self, resource: str, seconds: float, count: int = 1) -> None:
        """Count `count` waits of `seconds` for a resource."""
        counts = self._counts.get(resource)
        if counts is None:
            counts = self._counts[resource] = [0] * (len(self._buckets) + 1)
            self._sums[resource] = 0.0
        counts[bisect_left(self._buckets, seconds)] += count
        self._sums[resource] += seconds * count

    def collect(self) -> Iterator[Metric]:
        bounds = [*(str(float(bucket)) for bucket in self._buckets), "+Inf"]
        family = HistogramMetricFamily(self._name, self._documentation, labels=["resource"])
        for resource, counts in self._counts.items():
            family.add_metric([resource], list(zip(bounds, accumulate(counts), strict=True)), self._sums[resource])
        yield family


class _CountedElsewhere(Collector):
    """Reads a counter that other code keeps, at each scrape."""

    def __init__(self, name: str, documentation: str, count: Callable[[], int]) -> None:
        self._name = name
        self._documentation = documentation
        self._count = count

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._documentation)
        family.add_metric([], self._count())
        yield family


class Metrics:
    """The metrics of one manager, in a registry of their own."""

    def __init__(self, resources: Iterable[str] = (), *, host: str = "", cluster: str = "", scope: str = "") -> None:
        """`resources`: the configured ones. `host`, `cluster` and `scope`: the manager's; `host` is empty in cluster
        scope."""
        disable_created_metrics()  # type: ignore[no-untyped-call]  # saves a quarter of all series
        self.resources = tuple(resources)
        self.registry = r = CollectorRegistry()
        ProcessCollector(registry=r)
        about = {"version": __version__, "host": host, "cluster": cluster, "scope": scope}
        Info("outfitter", "The running manager.", registry=r).info(about)
        counter = partial(Counter, registry=r)
        gauge = partial(Gauge, registry=r)
        histogram = partial(Histogram, registry=r)
        self.ready = gauge("outfitter_ready", "1 while the manager answers registrations.")
        self.descriptors_exhausted = gauge(
            "outfitter_descriptors_exhausted", "1 while the manager may open no more files."
        )
        self.descriptors_exhausted.set_function(lambda: float(descriptors.lacking() is not None))
        self.partition_ready = gauge(
            "outfitter_partition_ready", "1 while this manager answers the registrations of a partition.", ["partition"]
        )
        self.events = counter("outfitter_events", "Decided events, by kind: messages and internal events.", ["kind"])
        self.dead_letters = counter("outfitter_dead_letters", "Messages that became dead letters.")
        self.dead_letters_omitted = counter(
            "outfitter_dead_letters_omitted",
            "Of those, messages beyond the quota per minute. A summary letter counts them.",
        )
        self.unknown_fields = counter(
            "outfitter_unknown_fields",
            "Messages with fields that this version does not know, by type. The fields were ignored.",
            ["kind"],
        )
        for kind in ("register", "heartbeat", "deregister"):
            self.unknown_fields.labels(kind)
        self.swept = counter(
            "outfitter_swept", "Unroutable messages that this manager made dead letters, by reason.", ["reason"]
        )
        self.swept_partitions = gauge(
            "outfitter_swept_partitions", "Partitions in which this manager sweeps unroutable messages."
        )
        self.allocation_seconds = Waits(
            "outfitter_allocation_seconds",
            "Time from a registration's arrival on the bus to its committed grant, by each granted resource.",
            ALLOCATION_BUCKETS,
            self.resources,
        )
        r.register(self.allocation_seconds)
        self.grants = counter("outfitter_grants", "Granted allocations.", ["resource"])
        self.failures = counter("outfitter_failures", "Failed allocations, by reason.", ["reason"])
        self.releases = counter("outfitter_releases", "Ended allocations, by reason.", ["reason"])
        self.lease_expiries = counter("outfitter_lease_expiries", "Leases that expired.")
        self.driver_runs = counter("outfitter_driver_runs", "Driver calls.", ["resource", "call"])
        self.driver_failures = counter(
            "outfitter_driver_failures", "Driver calls that failed or took too long.", ["resource", "call"]
        )
        self.driver_seconds = histogram("outfitter_driver_seconds", "Duration of driver calls.", ["resource", "call"])
        self.restore_seconds = gauge("outfitter_ledger_restore_seconds", "Duration of the last restore.")
        self.restored_records = gauge("outfitter_ledger_restored_records", "Records that the last restore read.")
        self.commits = counter("outfitter_commits", "Commits, by outcome.", ["outcome"])
        self.commit_seconds = histogram("outfitter_commit_seconds", "Duration of commits.", buckets=COMMIT_BUCKETS)
        self.orders_unread = gauge(
            "outfitter_orders_unread", "1 while operators' orders cannot be read for a partition.", ["partition"]
        )
        self.orders_unreadable = gauge(
            "outfitter_orders_unreadable", "Operators' orders that this manager cannot understand.", ["partition"]
        )
        self.signs_of_life = counter(
            "outfitter_signs_of_life", "Signs of life that the manager sent to the bus, by outcome.", ["outcome"]
        )
        self.input_lost = counter("outfitter_input_lost", "Times the input position was out of range.")
        self.violations = counter(
            "outfitter_exclusivity_violations", "Devices in two live allocations, found by the self-check. Must be 0."
        )
        r.register(
            _CountedElsewhere(
                "outfitter_log_lines_dropped",
                "Lines that the manager could not write on standard error.",
                standard_error.dropped,
            )
        )
        for kind in EVENT_KINDS:
            self.events.labels(kind)
        for code in NobodysCode:
            self.swept.labels(code)
        for ending in RELEASE_REASONS:
            self.releases.labels(ending)
        for reason in ReasonCode:
            self.failures.labels(reason)
        for outcome in ("ok", "fenced", "unknown", "unavailable", "too-large"):
            self.commits.labels(outcome)
        for outcome in ("ok", "lost"):
            self.signs_of_life.labels(outcome)
        for name in self.resources:
            self.grants.labels(name)
            for call in DRIVER_CALLS:
                self.driver_runs.labels(name, call)
                self.driver_failures.labels(name, call)
                self.driver_seconds.labels(name, call)

    def show(self, state_counts: Callable[[], StateCounts | None]) -> None:
        """Register the source of the gauges of state; called once."""
        self.registry.register(_StateCollector(self.resources, state_counts))

    def count_refusals(self, count: Callable[[], int]) -> None:
        """Register the counter of refused connections; called once."""
        self.registry.register(
            _CountedElsewhere(
                "outfitter_authentication_failures",
                "Connections that failed because the bus or the manager could not authenticate the other.",
                count,
            )
        )

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes (`CONTENT_TYPE`)."""
        return generate_latest(self.registry)
