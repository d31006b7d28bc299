"""Translates drivers' answers for the core: checks foreign values, and turns foreign errors into failures.

This module calls no driver (supervisor.py) and knows no rules: core/ decides what a failure means for a worker.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import anyio
import anyio.lowlevel
import msgspec

from outfitter_drivers import api
from outfitter_proto import environment
from outfitter_proto.records import Health
from outfitter_proto.support import descriptors
from outfitter_service.core import model as m

T = TypeVar("T")

REASON_LENGTH = 2000
"""Most characters of a driver's message in a record."""
LONGEST_NAME = 1024
"""Most characters of a device's id, and of each of its aliases."""
MOST_ALIASES = 64
"""Most aliases of one device."""
MOST_DEVICES = 10_000
"""Most devices of one resource on one host. To check a device takes some 20 us, and each stays in memory."""
AT_A_STRETCH = 500
"""Devices of a report that the manager checks in one turn of the event loop."""
DEVICE_BYTES = 64 * 1024
"""Most bytes of one device as JSON: a grant has room for a dozen of that size."""
SHORTEST_DELAY_S = 0.05
"""The least seconds between two answers of a driver, so that no driver keeps the manager busy."""


class DriverCallError(Exception):
    """A driver's code failed."""

    def __init__(self, failure: m.DriverFailure, *, delay_s: float | None = None, is_shortage: bool = False) -> None:
        super().__init__(failure.reason)
        self.failure = failure
        """How, for the core."""
        self.delay_s = delay_s
        """The seconds until the next call that the driver asks for, or None."""
        self.is_shortage = is_shortage
        """It could have named fewer devices."""


@contextmanager
def foreign_code() -> Iterator[None]:
    """A context for a driver's own code.

    Any error of the code is the driver's failure, even one that is no `Exception`. A vendor's library may call
    `sys.exit()`, or something that the driver waits for may be cancelled. Without this context it would end the
    manager.

    Raises:
        DriverCallError: the code raised an error.
    """
    try:
        yield
    except BaseException as error:
        if issubclass(type(error), asyncio.CancelledError):  # `isinstance` would ask the error itself
            if _is_cancelled():
                raise
            failure = m.DriverFailure(reason="RuntimeError: something that the driver waited for was cancelled")
            raise DriverCallError(failure) from error
        raise _translated(error) from error


def _translated(error: BaseException) -> DriverCallError:
    """A driver's exception as a failure. To read its message, its `delay` or its class also runs foreign code."""
    try:
        shortage = isinstance(error, api.NotEnoughDevicesError)
        return DriverCallError(_failure_of(error), delay_s=_wanted_delay(error), is_shortage=shortage)
    except BaseException:  # noqa: BLE001 - foreign code
        return DriverCallError(m.DriverFailure(reason="its driver raised an error that cannot be read"))


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _failure_of(error: BaseException) -> m.DriverFailure:
    """The failure of a driver's exception. Only `PermanentDriverError` is permanent."""
    words = words_of(error)
    if isinstance(error, TimeoutError) and not words:
        return m.DriverFailure(reason="it took too long")
    reason = words or type(error).__name__
    if not isinstance(error, api.DriverError):
        reason = f"{type(error).__name__}: {reason}"
    if (code := descriptors.lack_behind(error)) is not None:
        reason = f"{descriptors.explain(code)}: {reason}"
    return m.DriverFailure(reason=reason[:REASON_LENGTH], permanent=isinstance(error, api.PermanentDriverError))


def words_of(error: BaseException) -> str:
    """A foreign exception's message, as it can go over the wire. If its own code fails, a text that says so."""
    try:
        return written(str(error)[:REASON_LENGTH])
    except BaseException as unreadable:  # noqa: BLE001 - this is foreign code, too
        return f"its message cannot be read ({type(unreadable).__name__})"


def _wanted_delay(error: BaseException) -> float | None:
    """The seconds until the next call that a driver asks for; None: it gives no valid delay."""
    try:
        delay = getattr(error, "delay", None) if isinstance(error, api.TemporaryDriverError) else None
        if isinstance(delay, int | float) and math.isfinite(delay):
            return max(float(delay), SHORTEST_DELAY_S)
    except BaseException:  # noqa: BLE001 - a property is foreign code, and a number may be too large for a float
        return None
    return None


def written(text: str) -> str:
    """Foreign text as it can go over the wire: lone surrogates, as in file names, are escaped."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def known_device(resource: str, device: api.Device) -> m.KnownDevice:
    """A driver's device with its canonical id: its own id, or one made of its name or index. A device with more than
    `DEVICE_BYTES` becomes unhealthy, and loses its properties.

    Raises:
        PermanentDriverError: it has neither id, name nor index, a value is not text, it has too many or too long names,
            or it sets a variable that no driver may set.
    """
    device_id = _default_id(resource, device) if device.id is None else device.id
    checked = m.KnownDevice(
        id=device_id,
        properties=dict(device.properties),
        aliases=tuple(device.aliases),
        health=device.health,
        reason=None if device.reason is None else device.reason[:REASON_LENGTH],
        env=dict(device.env),
        cdi=tuple(device.cdi),
        part_of=device.part_of,
    )
    try:
        # a record that cannot be read again would make the manager refuse its host
        encoded = msgspec.json.encode(checked)
        checked = msgspec.json.decode(encoded, type=m.KnownDevice)
    except (msgspec.MsgspecError, UnicodeError, TypeError) as error:
        raise api.PermanentDriverError(
            f"the driver of {resource} reported device {device_id!r} with a value that is not text: {error}"
        ) from error
    _check_names(resource, checked)
    if len(encoded) > DEVICE_BYTES:
        reason = f"its driver reported {len(encoded)} bytes for it; at most {DEVICE_BYTES} are possible"
        return m.KnownDevice(
            id=checked.id,
            properties={},
            aliases=checked.aliases,
            part_of=checked.part_of,
            health=Health.UNHEALTHY,
            reason=reason,
        )
    for name, why in environment.divide(checked.env)[1].items():
        raise api.PermanentDriverError(
            f"the driver of {resource} reported device {device_id!r} "
            f"with variable {name!r}, which no driver may set: {why}"
        )
    return checked


def _default_id(resource: str, device: api.Device) -> str:
    """The id of a device without an id of its own, as `api.Device` says.

    Raises:
        PermanentDriverError: it has neither a name nor an index.
    """
    if device.name is not None:
        name = str(device.name)
        return f"{resource}:name:{name}" if name.isdecimal() else f"{resource}:{name}"
    index = device.properties.get("index")
    if index is None:
        raise api.PermanentDriverError(
            f"the driver of {resource} reported a device without an id, a name and the property 'index': "
            f"{dict(device.properties)!r}"
        )
    return f"{resource}:{index}"


def _check_names(resource: str, device: m.KnownDevice) -> None:
    """Check a device's names. They cannot be shortened, because a device is held under each of them.

    Raises:
        PermanentDriverError: there are too many, or one is too long.
    """
    longest = max(len(name) for name in (device.id, *device.aliases, device.part_of or ""))
    if longest > LONGEST_NAME or len(device.aliases) > MOST_ALIASES:
        raise api.PermanentDriverError(
            f"the driver of {resource} reported device {device.id[:80]!r} with {len(device.aliases)} aliases, the "
            f"longest name having {longest} characters; at most {MOST_ALIASES} aliases of {LONGEST_NAME} are possible"
        )


def within_limit(resource: str, devices: Iterable[T]) -> Iterator[T]:
    """What a driver reports, one after another.

    Raises:
        PermanentDriverError: there are more than `MOST_DEVICES`.
    """
    for count, device in enumerate(devices):
        if count == MOST_DEVICES:
            raise api.PermanentDriverError(
                f"the driver of {resource} reported more than {MOST_DEVICES} devices, which is the limit"
            )
        yield device


async def known_devices(resource: str, devices: Iterable[api.Device]) -> tuple[m.KnownDevice, ...]:
    """A driver's devices, each as often as the driver names it: the core merges repeated ones. Each turn of the event
    loop checks some of them.

    Raises:
        PermanentDriverError: there are more than `MOST_DEVICES`, or one that `known_device` refuses.
    """
    checked: list[m.KnownDevice] = []
    for device in within_limit(resource, devices):
        checked.append(known_device(resource, device))
        if len(checked) % AT_A_STRETCH == 0:
            await anyio.lowlevel.checkpoint()
    return tuple(checked)
