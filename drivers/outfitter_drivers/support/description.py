"""A device described by keys and values: `static` reads them from the configuration, `files` from each file.

These keys are for the manager: `id` (canonical id), `aliases` and `cdi` (lists split on `;`), `part_of` (the id or an
alias of the whole), `health` (healthy, unhealthy, unknown) with `reason`, and `env.<VARIABLE>`. Every other key, also
`index`, is a property for operators.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from outfitter_drivers import settings
from outfitter_drivers.api import Device
from outfitter_drivers.settings import SettingError
from outfitter_drivers.support.device_name import hides_something, is_blank
from outfitter_proto import environment
from outfitter_proto.records import Health
from outfitter_proto.support.printable import printable

_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/-]{0,127}", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}", re.ASCII)
_DIGITS = re.compile(r"([0-9]+)", re.ASCII)


def described_device(description: Mapping[str, str], *, name: str, index: int, default_id: str | None = None) -> Device:
    """The described device. `name`, `index` and `default_id` apply if the description lacks them.

    Raises:
        SettingError: an invalid key or value; the message names it.
    """
    properties = {"index": str(index), "name": name}
    env: dict[str, str] = {}
    for key, value in description.items():
        if not _KEY.fullmatch(key):
            raise SettingError(printable(key), "is no valid key; valid are letters, digits and ._:/- (at most 128)")
        if "\0" in value or "\n" in value:
            raise SettingError(key, f"is {value!r}; valid is one line of text")
        if key.startswith("env."):
            variable = key.removeprefix("env.")
            if not _VARIABLE.fullmatch(variable):
                raise SettingError(key, "names no environment variable; valid are letters, digits and _")
            if (why := environment.refusal(variable)) is not None:
                raise SettingError(key, f"is a variable that no driver may set: {why}")
            env[variable] = value
        elif key not in ("id", "aliases", "cdi", "part_of", "health", "reason"):
            properties[key] = value
    if not properties["index"]:
        raise SettingError("index", "is empty; leave it out or give it a value")
    device_id = description.get("id", default_id)
    if device_id is not None and not 1 <= len(device_id) <= 1024:
        raise SettingError("id", f"is {device_id[:40]!r}; valid are 1 to 1024 characters, or no id at all")
    device_id_text = description.get("id")
    if device_id_text is not None and (is_blank(device_id_text) or hides_something(device_id_text)):
        raise SettingError(
            "id", f"is {device_id_text!a}, which has an invisible sign; valid are letters, digits and signs"
        )
    health = _health(description.get("health"))
    reason = description.get("reason") or (None if health is Health.HEALTHY else f"described as {health.value}")
    return Device(
        properties=properties,
        id=device_id,
        aliases=tuple(settings.items(description.get("aliases", ""))),
        health=health,
        reason=reason,
        env=env,
        cdi=tuple(settings.items(description.get("cdi", ""))),
        part_of=description.get("part_of", "").strip() or None,
    )


def natural_order(names: Iterable[str]) -> list[str]:
    """The names sorted as people count: `gpu2` before `gpu10`."""

    def weight(name: str) -> tuple[list[tuple[int, int, str]], str]:
        parts = [part for part in _DIGITS.split(name) if part]
        return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts], name

    return sorted(names, key=weight)


def _health(text: str | None) -> Health:
    if text is None:
        return Health.HEALTHY
    try:
        return Health(text.strip().lower())
    except ValueError:
        valid = ", ".join(health.value for health in Health)
        raise SettingError("health", f"is {text!r}; valid are {valid}") from None
