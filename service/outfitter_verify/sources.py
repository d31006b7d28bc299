"""`verify`: from a bus's address to the report."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from outfitter_verify.check import check
from outfitter_verify.report import Report


def verify(
    bus: str,
    cluster: str = "outfitter",
    config: Mapping[str, Any] | None = None,
    *,
    login: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
    patience_s: float = 60.0,
) -> Report:
    """Read all committed records on `bus` and check them. Blocks; run it in a thread from async code.

    `bus`: `kafka://host:port[,…]`, `sqlite:///path`, or plain `host:port` addresses. `login`: log-in settings by the
    names of the configuration's `kafka.…` (`sasl-username`, `ca-file`, …); the `OUTFITTER_KAFKA_…` variables of
    `environment` (default: the process's) fill in missing ones. `config`: more settings by librdkafka's names.
    `patience_s`: time limit of each wait for brokers and open transactions.

    Raises:
        UnreadableError: the bus or a topic does not exist, rights are missing, a transaction stays open, or
            confluent-kafka is not installed.
    """
    if bus.startswith("sqlite:"):
        from outfitter_verify.buses import embedded

        return check(embedded.reading(bus, cluster))
    from outfitter_verify.buses import kafka

    settings = kafka.settings(bus, login or {}, os.environ if environment is None else environment)
    settings |= config or {}
    with kafka.KafkaSource(settings, cluster, patience_s=patience_s) as source:
        return check(source.reading())
