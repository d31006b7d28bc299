"""Quotas as an administrator sets them (AlterClientQuotas, KIP-546): bytes a second, percent of its threads."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from aiokafka.conn import create_conn
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import Array, Boolean, Float64, Int16, Int32, Schema, String

from support.kafka.broker import KafkaBroker

OF_ALL_CLIENTS = ("client-id", None)
"""Whoever has no quota of its own: each client id is counted by itself."""
OF_ALL_USERS = ("user", None)

_ENTITY = ("entity", Array(("entity_type", String()), ("entity_name", String())))


class _Answer(Response):  # type: ignore[misc]  # aiokafka has no types
    API_KEY = 49
    API_VERSION = 0
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("entries", Array(("error_code", Int16), ("error_message", String()), _ENTITY)),
    )


class _AlterV0(RequestStruct):  # type: ignore[misc]
    API_KEY = 49
    API_VERSION = 0
    RESPONSE_TYPE = _Answer
    SCHEMA = Schema(
        ("entries", Array(_ENTITY, ("ops", Array(("key", String()), ("value", Float64), ("remove", Boolean))))),
        ("validate_only", Boolean),
    )


class _Alter(Request[_AlterV0]):  # type: ignore[misc]
    API_KEY = 49

    def __init__(self, entity: tuple[str, str | None], quotas: dict[str, float | None]) -> None:
        self._entity = entity
        self._quotas = quotas

    def build(self, request_struct_class: type[_AlterV0]) -> _AlterV0:
        changes = [(name, value or 0.0, value is None) for name, value in self._quotas.items()]
        return request_struct_class([([self._entity], changes)], False)


def set_quotas(broker: KafkaBroker, entity: tuple[str, str | None] = OF_ALL_CLIENTS, **quotas: float | None) -> None:
    """Set `producer_byte_rate`, `consumer_byte_rate` or `request_percentage` of an entity; None removes it."""

    async def alter() -> Any:
        host, _, port = broker.bootstrap.rpartition(":")
        connection = await create_conn(host, int(port), request_timeout_ms=60_000)
        try:
            return await connection.send(_Alter(entity, quotas))
        finally:
            await connection.close()

    with ThreadPoolExecutor(1) as apart:  # the caller may have an event loop of its own
        answer = apart.submit(asyncio.run, alter()).result()
    [(code, message, _)] = answer.entries
    assert code == 0, message
