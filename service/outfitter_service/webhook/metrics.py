"""The metrics of `outfitter webhook`: reviews and their outcomes, and what became of renewed certificates."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, Info, ProcessCollector, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from outfitter_proto import __version__
from outfitter_service.http.tls import Certificate
from outfitter_service.webhook.review import ReviewOutcome

CONTENT_TYPE = CONTENT_TYPE_LATEST


class _Renewals(Collector):
    """Looks at the certificate's files at each scrape."""

    def __init__(self, certificate: Certificate) -> None:
        self._certificate = certificate

    def collect(self) -> Iterator[Metric]:
        self._certificate.context()  # a scraper keeps its connection, so it alone would not make us look
        for name, documentation, count in (
            ("renewals", "Renewed certificates that the webhook took.", self._certificate.renewals),
            ("failures", "Renewed certificates that the webhook could not read.", self._certificate.failures),
        ):
            yield CounterMetricFamily(f"outfitter_webhook_certificate_{name}", documentation, value=count)
        yield GaugeMetricFamily(
            "outfitter_webhook_certificate_refused",
            "Whether the certificate in the files cannot be read, so that an earlier one counts.",
            value=self._certificate.is_refused,
        )


class WebhookMetrics:
    """The metrics of one webhook with this certificate, in a registry of their own."""

    def __init__(self, certificate: Certificate) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = r = CollectorRegistry()
        ProcessCollector(registry=r)
        Info("outfitter_webhook", "The running webhook.", registry=r).info({"version": __version__})
        self._reviews = Counter(
            "outfitter_webhook_reviews", "Requests for a review, by outcome.", ["outcome"], registry=r
        )
        self._seconds = Histogram(
            "outfitter_webhook_review_seconds", "Time from a request's head to its answer.", registry=r
        )
        for outcome in ReviewOutcome:
            self._reviews.labels(outcome)
        r.register(_Renewals(certificate))

    def count(self, outcome: ReviewOutcome, seconds: float) -> None:
        """Count a request that was answered after `seconds`."""
        self._reviews.labels(outcome).inc()
        self._seconds.observe(seconds)

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes (`CONTENT_TYPE`)."""
        return generate_latest(self.registry)
