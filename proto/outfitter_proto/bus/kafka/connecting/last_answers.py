"""What the brokers last answered to a member of a group, one of aiokafka's clients, in words.

aiokafka repeats most requests in silence, for ever. Whoever waits for it in vain takes the cause from here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from aiokafka import errors as kafka_errors
from aiokafka.protocol.group import JoinGroupRequest, SyncGroupRequest
from aiokafka.protocol.types import Array, Schema

from outfitter_proto.bus.kafka.connecting.connection import Connector
from outfitter_proto.bus.kafka.connecting.protocol import OK, error_in_words

PATIENCE_S = 5.0
"""Seconds for which a kind of request fails before `listen`'s function hears of it."""

_OF_THE_PROTOCOL = frozenset({22, 25, 27, 79})
"""Codes by which a group's coordinator says what a member must do next."""
_WAITING = (JoinGroupRequest, SyncGroupRequest)
"""Requests whose answers come late while a group waits for its other members."""


class LastAnswers:
    """Keeps why requests of a client fail now, by the kind of request."""

    def __init__(self, connector: Connector, client: Any) -> None:
        """`client`: an `AIOKafkaClient`, whose `send` is replaced. It asks the coordinator of a group."""
        self._connector = connector
        self._client = client
        self._failing: dict[str, tuple[float, str]] = {}
        self._told = False
        self._note: Callable[[str | None], object] = lambda _: None
        self._send = client.send
        client.send = self._sending

    @property
    def trouble(self) -> str | None:
        """Why requests fail now: the connections' explanation and the brokers' answers; None: nothing is known."""
        trouble = self._connector.trouble
        reasons = [str(trouble).removeprefix(f"{self._connector.login.url}: ")] if trouble is not None else []
        return "; ".join(dict.fromkeys([*reasons, *(why for _, why in self._failing.values() if why)])) or None

    def listen(self, note: Callable[[str | None], object]) -> None:
        """Call `note` with the trouble while requests fail for longer than `PATIENCE_S`, and with None after that."""
        self._note = note

    async def _sending(self, node: Any, request: Any, **options: Any) -> Any:
        kind = type(request).__name__.removesuffix("Request")
        try:
            response = await self._send(node, request, **options)
        except (kafka_errors.NodeNotReadyError, kafka_errors.KafkaConnectionError):
            self._failed(kind, "")  # the connector knows why there is no connection
            raise
        except kafka_errors.RequestTimedOutError:
            if not isinstance(request, _WAITING):
                seconds = self._client._request_timeout_ms / 1000
                self._failed(kind, f"a broker does not answer {kind} within {seconds:g} s")
            raise
        code = next((code for code in _codes(response.SCHEMA, response) if code not in _OF_THE_PROTOCOL), OK)
        if code == OK:
            self._passed(kind)
        else:
            brokers = len(self._client.cluster.brokers())
            self._failed(kind, error_in_words(code, kind, kind="group", brokers=brokers))
        return response

    def _failed(self, kind: str, why: str) -> None:
        since, _ = self._failing.get(kind, (time.monotonic(), ""))
        self._failing[kind] = since, why
        if time.monotonic() - since >= PATIENCE_S and (trouble := self.trouble) is not None:
            self._told = True
            self._note(trouble)

    def _passed(self, kind: str) -> None:
        self._failing.pop(kind, None)
        if self._told and not self._failing:
            self._told = False
            self._note(None)


def _codes(kind: Any, value: Any) -> Iterator[int]:
    """The error codes in an answer that are not 0."""
    if isinstance(kind, Array):
        for item in value or ():
            yield from _codes(kind.array_of, item)
    elif isinstance(kind, Schema):
        for number, (name, field) in enumerate(zip(kind.names, kind.fields, strict=True)):
            item = value[number] if isinstance(value, tuple | list) else getattr(value, name)
            if name == "error_code" and item != OK:
                yield item
            elif isinstance(field, Array):
                yield from _codes(field, item)
