"""The metrics of `outfitter api`: requests, open event streams, and how fresh its picture of the cluster is.

A moment is a gauge of seconds since the epoch, so that Prometheus knows its age also between two scrapes. What is not
known yet has no sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Info, ProcessCollector, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from outfitter_proto import __version__
from outfitter_service.api.follower import Follower

CONTENT_TYPE = CONTENT_TYPE_LATEST
NO_ROUTE = "(none)"
"""The route of requests for pages that do not exist."""


class _Collector(Collector):
    """Computes the gauges at each scrape."""

    def __init__(self, follower: Follower, open_streams: Callable[[], int]) -> None:
        self._follower = follower
        self._open_streams = open_streams

    def collect(self) -> Iterator[Metric]:
        follower, fleet = self._follower, self._follower.fleet
        as_of = follower.as_of.timestamp() if follower.as_of is not None else None
        for name, documentation, value in (
            ("outfitter_api_ready", "1 while the API has read the ledger and serves pages.", int(fleet is not None)),
            ("outfitter_api_bus_readable", "1 while the bus can be read.", int(follower.outage is None)),
            ("outfitter_api_streams", "Open event streams.", self._open_streams()),
            ("outfitter_api_hosts", "Hosts of which there are records.", len(fleet.hosts) if fleet is not None else 0),
            ("outfitter_api_behind_records", "Records of the ledger that the API has not read yet.", follower.behind),
            (
                "outfitter_api_as_of_timestamp_seconds",
                "The moment up to which the API is known to have everything.",
                as_of,
            ),
            (
                "outfitter_api_last_event_timestamp_seconds",
                "When the API last saw something change.",
                fleet.events.changed_at if fleet is not None else None,
            ),
        ):
            family = GaugeMetricFamily(name, documentation)
            if value is not None:
                family.add_metric([], value)
            yield family
        planned = GaugeMetricFamily(
            "outfitter_api_host_planned",
            "1 for each host that an operator has taken out and that no manager serves.",
            labels=["cluster", "host"],
        )
        for host in [] if fleet is None else fleet.hosts:
            if fleet is not None and fleet.is_planned(host):
                planned.add_metric([follower.cluster, host], 1)
        yield planned


class ApiMetrics:
    """The metrics of one `outfitter api`, in a registry of their own. `open_streams`: how many there are now."""

    def __init__(self, follower: Follower, open_streams: Callable[[], int]) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        about = {"version": __version__, "cluster": follower.cluster}
        Info("outfitter_api", "The running API.", registry=self.registry).info(about)
        self._requests = Counter(
            "outfitter_api_requests", "Answered requests, by route and status.", ["route", "status"],
            registry=self.registry,
        )  # fmt: skip
        self.registry.register(_Collector(follower, open_streams))

    async def count(self, request: web.Request, response: web.StreamResponse) -> None:
        """Count a request whose answer begins."""
        resource = request.match_info.route.resource
        route = NO_ROUTE if resource is None else resource.canonical
        self._requests.labels(route, str(response.status)).inc()

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes (`CONTENT_TYPE`)."""
        return generate_latest(self.registry)
