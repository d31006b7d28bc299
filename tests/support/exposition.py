"""What a manager, an API and a webhook show to Prometheus, without running them."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from outfitter_service.api.metrics import ApiMetrics
from outfitter_service.metrics import Metrics, StateCounts
from outfitter_service.webhook.metrics import WebhookMetrics
from support.api import cordon, fleet_of, follower_of, host_record

Series = dict[str, list[dict[str, str]]]
"""The labels of each series, by the name of its metric."""


def of_manager() -> Series:
    """A manager with the resource gpu, and what Prometheus itself says of its scrapes."""
    metrics = Metrics(["gpu"], host="gpu-1", scope="host")
    metrics.show(lambda: StateCounts.together(()))
    metrics.count_refusals(lambda: 0)
    metrics.allocation_seconds.observe("gpu", 1.0)
    return {"up": [{}]} | _series(metrics.exposition())


def of_api() -> Series:
    """An API that has read the records of a host that an operator has taken out."""
    fleet = fleet_of(host_record("gpu-1", stopped=True), cordon("gpu-1"))
    return _series(ApiMetrics(follower_of(fleet), lambda: 0).exposition())


def of_webhook() -> Series:
    """A webhook that has reviewed nothing yet."""
    return _series(webhook_metrics().exposition())


def webhook_metrics() -> WebhookMetrics:
    """The metrics of a webhook whose certificate was never renewed."""
    return WebhookMetrics(_NeverRenewed())  # type: ignore[arg-type]


class _NeverRenewed:
    """As much of a certificate as metrics show."""

    renewals = failures = 0
    is_refused = False

    def context(self) -> None: ...


def _series(exposition: bytes) -> Series:
    """The series, and the metrics that have none yet."""
    series: Series = {}
    for family in text_string_to_metric_families(exposition.decode()):
        suffix = "_total" if family.type == "counter" else ""
        series.setdefault(family.name + suffix, [])
        for sample in family.samples:
            series.setdefault(sample.name, []).append(sample.labels)
    return series
