"""Where a reading comes from: `verify` takes a bus's address and gives the report."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from outfitter_verify.check import check
from outfitter_verify.report import Report

TOPICS = ("registrations", "allocations", "history", "dead-letters")
"""A cluster's topics, each after the cluster's name and a dot."""


class UnreadableError(Exception):
    """There is nothing to be checked, or not all of it can be read; the message says what to do."""


def verify(
    bus: str,
    cluster: str = "outfitter",
    config: Mapping[str, Any] | None = None,
    *,
    login: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
    patience_s: float = 60.0,
) -> Report:
    """Read all that is committed on `bus` now, and check it. Blocks; run it in a thread from async code.

    `bus` is `kafka://host:port[,…]`, `sqlite:///path`, or bare `host:port` addresses. `login` says how to be let in
    (`sasl-username`, `ca-file`, …: the names of the configuration's `kafka.…` settings); what it leaves out is looked
    up in the `OUTFITTER_KAFKA_…` variables of `environment`, the process's by default. `config` are further settings
    by librdkafka's names. `patience_s` bounds each wait for the brokers, and for transactions that are still open.

    Raises:
        UnreadableError: no such bus or topics, no rights, a transaction that stays open, confluent-kafka is missing.
    """
    if bus.startswith("sqlite:"):
        from outfitter_verify import embedded

        return check(embedded.reading(bus, cluster))
    from outfitter_verify import kafka

    settings = kafka.settings(bus, login or {}, os.environ if environment is None else environment)
    settings |= config or {}
    with kafka.Source(settings, cluster, patience_s=patience_s) as source:
        return check(source.reading())
