"""Bugs of the rules: who gets which devices, and what ends."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

from msgspec import UNSET, structs

from outfitter_proto.codec import encode
from outfitter_proto.records import FINAL_STATES, Allocation, Deregister, Register, Source
from outfitter_service.core import decide, discovery, ending, fast_path, registration
from outfitter_service.core.decision import DecisionBuilder
from outfitter_service.core.placement.choice import DeviceChoice
from outfitter_service.core.state import infos
from outfitter_service.core.state.device_index import DeviceIndex
from outfitter_service.core.state.host_state import HostState
from outfitter_service.core.state.ledger import Ledger, LedgerChange, PutAllocation
from outfitter_service.core.states import Step
from simulation.bugs.bug import Bug, jumping
from simulation.hosts.hardware import Catalogue
from simulation.world import settings


@contextmanager
def _own_names() -> Iterator[None]:
    def known_only(_: str, known: Iterable[str], classes: object) -> list[str]:
        del classes
        return list(known)

    with (
        # looked for where only the driver of a third resource knows both names, and now and then does not
        patch.object(settings, "_catalogue", lambda _: Catalogue(cards=True, mapped=True)),
        patch.object(settings, "FAULTS", ("device", "device", "kill", "worker")),
        patch.object(infos, "other_names", known_only),
        patch.object(discovery, "_aliases_now", lambda _, record: record.aliases),
        patch.object(discovery, "_still_linked", lambda *_: ()),
    ):
        yield


def _unmeasured(
    self: DecisionBuilder, key: str, after: Allocation, *_: object, **__: object
) -> tuple[Allocation, bytes]:
    del self, key
    return after, encode(after)


@contextmanager
def _ahead_for_good() -> Iterator[None]:
    with patch.object(HostState, "is_ahead", lambda *_: False), jumping():
        yield


@contextmanager
def _claims_of_its_own() -> Iterator[None]:
    begin = DeviceChoice.__init__

    def begin_without_claims(self: DeviceChoice, *args: Any, **more: Any) -> None:
        begin(self, *args, **more)
        self._claimed = self._claimed_alone = frozenset()

    with (
        patch.object(settings, "_catalogue", lambda _: Catalogue(cards=True)),
        patch.object(DeviceChoice, "__init__", begin_without_claims),
    ):
        yield


def _unruly() -> AbstractContextManager[Any]:
    """Looked for where workers say what no client would."""
    return patch.object(settings, "UNRULY", 1.0)


@contextmanager
def _another_request() -> Iterator[None]:
    again = registration.register_again

    def take_it(builder: DecisionBuilder, key: str, known: Allocation, message: Register) -> None:
        asked = {name: one.amount for name, one in (message.resources or {}).items()}
        if known.state == "pending" and asked != known.request.amounts:
            request = structs.replace(known.request, amounts=asked, resources=message.resources)
            builder.step(Step.REFRESH, "registered again", known, request=request)
        else:
            again(builder, key, known, message)

    with patch.object(registration, "register_again", take_it), _unruly():
        yield


@contextmanager
def _deregister_the_eldest() -> Iterator[None]:
    deregister = registration.deregister

    def deregister_eldest(builder: DecisionBuilder, message: Deregister, source: Source, warnings: list[str]) -> None:
        if message.incarnation is None:
            runs = [key for _, key in builder.host_state(message.host).runs.incarnations.get(message.worker, ())]
            live = [key for key in runs if builder.ledger.allocations[key].state not in FINAL_STATES]
            if live:
                message = structs.replace(message, incarnation=live[0].rpartition("/")[2])
        deregister(builder, message, source, warnings)

    with patch.object(registration, "deregister", deregister_eldest), _unruly():
        yield


def _changing() -> AbstractContextManager[Any]:
    """Looked for where configurations change."""
    return patch.object(settings, "CHANGING", 1.0)


@contextmanager
def _released_as_configured() -> Iterator[None]:
    needs_unprepare = ending.needs_unprepare

    def needs_unprepare_now(rules: decide.Rules, record: Allocation) -> bool:
        return needs_unprepare(rules, structs.replace(record, prepared=UNSET))

    with patch.object(ending, "needs_unprepare", needs_unprepare_now), _changing():
        yield


@contextmanager
def _clauses_forgotten() -> Iterator[None]:
    restore = Ledger.restore

    def restore_without(self: Ledger, change: LedgerChange) -> None:
        if isinstance(change, PutAllocation) and change.record.state == "pending":
            request = structs.replace(change.record.request, choices=UNSET)
            change = PutAllocation(change.key, structs.replace(change.record, request=request))
        restore(self, change)

    with (
        patch.object(settings, "CHOOSY", 1.0),
        patch.object(settings, "FAULTS", ("kill", "kill", "stop", "device")),
        patch.object(Ledger, "restore", restore_without),
    ):
        yield


BUGS: tuple[Bug, ...] = (
    Bug(
        name="clauses-forgotten-by-a-restart",
        what="a worker that waits for certain devices gets any one after a restart of the manager",
        within=40,
        patches=_clauses_forgotten,
    ),
    Bug(
        name="lent-without-taking-back",
        what="a device that a driver prepared is free at once when its worker is gone",
        within=40,
        patches=lambda: patch.object(ending, "needs_unprepare", lambda *_: False),
    ),
    Bug(
        name="names-apart",
        what="a device that two resources show under two names is lent under each of them",
        within=40,
        patches=lambda: patch.object(DeviceIndex, "canonical", lambda _, name: name),
    ),
    Bug(
        name="names-of-its-own-driver",
        what="a record keeps only those names of a device that its own resource's driver knows",
        within=300,
        patches=_own_names,
    ),
    Bug(
        name="ahead-for-good",
        what="what ended while the clock was ahead is remembered until the clock is there again",
        within=40,
        patches=_ahead_for_good,
    ),
    Bug(
        name="claims-of-its-own-resource",
        what="what an earlier worker waits for is left to it as the resource that it wants, and not as others",
        within=200,
        patches=_claims_of_its_own,
    ),
    Bug(
        name="another-request",
        what="a run that waits and registers again with another request waits for that one",
        within=40,
        patches=_another_request,
    ),
    Bug(
        name="deregister-the-eldest",
        what="a deregistration of a worker that names no run ends the eldest one",
        within=40,
        patches=_deregister_the_eldest,
    ),
    Bug(
        name="released-as-configured",
        what="whether a driver has to release a device is judged by today's configuration, not by that of its grant",
        within=40,
        patches=_released_as_configured,
    ),
    Bug(
        name="size-not-measured",
        what="what is decided is not measured, so grants and commits become larger than topics take",
        within=40,
        patches=lambda: patch.object(DecisionBuilder, "_measured", _unmeasured),
    ),
    Bug(
        name="fast-grants-not-measured",
        what="fast grants are taken for small, whatever their devices say of themselves",
        within=100,
        patches=lambda: patch.object(fast_path, "REQUEST_BYTES", -math.inf),
    ),
)
