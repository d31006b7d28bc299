"""Bugs of operators' orders: forgotten, lifted, passed over, and taken for another device's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

from msgspec import UNSET

from outfitter_proto.bus import Reader
from outfitter_service.core import decide, orders
from outfitter_service.core import model as m
from outfitter_service.core.decision import DecisionBuilder
from outfitter_service.core.state import cordons
from outfitter_service.runtime.processor.order_reader import OrderReader
from outfitter_service.runtime.processor.tenure import Tenure
from simulation.bugs.bug import Bug, nothing
from simulation.hosts.hardware import Catalogue
from simulation.world import settings


@contextmanager
def _ordered() -> Iterator[None]:
    """Looked for where operators give orders."""
    with patch.object(settings, "ORDERED", 1.0):
        yield


@contextmanager
def _forgotten() -> Iterator[None]:
    observe_again = Tenure._observe_again

    async def forget_and_observe(self: Tenure) -> None:
        for host_state in self._ledger.hosts.values():
            host_state.cordons.clear()
        await observe_again(self)

    async def follow_on(self: OrderReader, reader: Reader, topic: str, topic_id: str) -> None:
        await reader.seek((await self._assignment.bus.offsets(topic, 0))[1])
        await follow(self, reader, topic, topic_id)

    follow = OrderReader._follow
    with (
        patch.object(Tenure, "_observe_again", forget_and_observe),
        patch.object(OrderReader, "_follow", follow_on),
        _ordered(),
    ):
        yield


@contextmanager
def _lifted() -> Iterator[None]:
    read = orders.read

    def lift_all(builder: DecisionBuilder, event: m.OrderRead) -> None:
        read(builder, event)
        host_state = builder.host_state(event.order.host)
        if event.order.ended_at:
            for order, cordon in host_state.cordons.items():
                is_same = (cordon.resource, cordon.device) == (
                    event.order.resource or UNSET,
                    event.order.device or UNSET,
                )
                if is_same and order != event.order.id:
                    orders._end(builder, cordon, "was ended by another one's end")

    with patch.dict(decide._INTERNAL, {m.OrderRead: lift_all}), _ordered():
        yield


@contextmanager
def _own_name() -> Iterator[None]:
    def apart(_: Iterable[Sequence[str]]) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
        return {}, {}

    with (
        patch.object(settings, "_catalogue", lambda _: Catalogue(cards=True)),
        patch.object(cordons, "one_name_each", apart),
        _ordered(),
    ):
        yield


@contextmanager
def _never_taken() -> Iterator[None]:
    with patch.object(OrderReader, "begin", nothing), _ordered():
        yield


@contextmanager
def _before_their_host() -> Iterator[None]:
    with patch.object(OrderReader, "of", lambda *_: []), _ordered():
        yield


BUGS: tuple[Bug, ...] = (
    Bug(
        name="orders-forgotten-by-a-restart",
        what="a restore leaves out which orders are in effect, and only later ones are read",
        within=10,
        patches=_forgotten,
    ),
    Bug(
        name="lifted-by-anothers-end",
        what="the end of an order lifts every order for the same devices",
        within=20,
        patches=_lifted,
    ),
    Bug(
        name="ordered-under-one-name",
        what="an order takes a device out under the name that it says, and not under its others",
        within=60,
        patches=_own_name,
    ),
    Bug(
        name="read-and-never-taken",
        what="orders that were read before a failed commit count as taken after it, although they are not",
        within=60,
        patches=_never_taken,
    ),
    Bug(
        name="ordered-before-its-host",
        what="orders to a host that the ledger does not know yet are forgotten",
        within=150,
        patches=_before_their_host,
    ),
)
