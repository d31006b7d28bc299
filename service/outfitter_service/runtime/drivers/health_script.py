"""`param.health-script`: a program of the owner's, which says of each device of a resource whether it is ill.

Every driver may have one, so it is taken out of the settings before the driver's factory sees them. The exit codes are
those of node-problem-detector's custom plugins, but an illness needs a reason: a script that breaks ends with 1, too.
drivers/health.md is the contract. This module runs it once; health_checks.py says when, and what follows.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec import Struct

from outfitter_drivers import program, settings
from outfitter_drivers.api import NotOnThisMachineError, TemporaryDriverError
from outfitter_drivers.script import ScriptOutcome, run_script
from outfitter_drivers.settings import SettingError
from outfitter_proto.records import Health
from outfitter_proto.support import file_ownership
from outfitter_service.core.model import KnownDevice

SCRIPT = "health-script"
ARGS = "health-script-args"
INTERVAL = "health-script-interval"
TIMEOUT = "health-script-timeout"
VALID = (SCRIPT, ARGS, INTERVAL, TIMEOUT)

DEFAULT_INTERVAL_S = 30.0
DEFAULT_TIMEOUT_S = 10.0
LONGEST_WORDS = 200
"""Most characters of the script's line in a device's reason. A record repeats it for each device."""
MOST_BYTES = 4096
"""The first line is looked for in so many bytes of the output, which may have a mebibyte."""
HEALTHY, UNHEALTHY = 0, 1
"""The exit codes that say something. Any other one: the script cannot tell."""

_NO_TEXT = "\ufffd"
"""What Python makes of bytes that are not UTF-8."""


class Word(Struct, frozen=True):
    """What the script says of one device, and why."""

    health: Health
    reason: str | None = None


WELL = Word(Health.HEALTHY)


class HealthScript(Struct, frozen=True, kw_only=True):
    """The health script of one resource."""

    path: str
    args: tuple[str, ...] = ()
    interval_s: float = DEFAULT_INTERVAL_S
    """Seconds from one round of all devices to the next."""
    timeout_s: float = DEFAULT_TIMEOUT_S
    """The time limit of one run."""

    async def ask(self, host: str, resource: str, device: KnownDevice) -> Word:
        """Run it for one device.

        Raises:
            DriverError: it has said nothing of the device; the message says why.
        """
        outcome = await run_script(
            (self.path, device.id, *self.args),
            timeout=self.timeout_s,
            env=environment(host, resource, device),
            hangs_as=f"{self.path} {device.id}",
        )
        return word_of(outcome)


def environment(host: str, resource: str, device: KnownDevice) -> dict[str, str]:
    """The variables of a run: those that drivers' programs inherit, those of a worker that has only this device, and
    `OUTFITTER_DEVICE_<PROPERTY>` for each property."""
    properties = {re.sub("[^A-Z0-9]", "_", name.upper()): value for name, value in device.properties.items()}
    return {
        **program.inherited(os.environ),
        **device.env,
        **{f"OUTFITTER_DEVICE_{name}": value for name, value in properties.items()},
        "OUTFITTER_HOST": host,
        "OUTFITTER_RESOURCE": resource,
        "OUTFITTER_DEVICE": device.id,
    }


def word_of(outcome: ScriptOutcome) -> Word:
    """What a run has said.

    Raises:
        TemporaryDriverError: nothing.
    """
    line = first_line(outcome.stdout)
    if outcome.code == HEALTHY:
        return WELL
    if outcome.code == UNHEALTHY and line:
        return Word(Health.UNHEALTHY, line)
    if outcome.code > UNHEALTHY and line:
        raise TemporaryDriverError(f"exit code {outcome.code}: {line}")
    hint = ", without a reason on standard output" if outcome.code == UNHEALTHY else ""
    raise TemporaryDriverError(f"it {outcome}{hint}")


def first_line(output: bytes) -> str:
    """The first line with something on it, short and printable; empty if there is none, or if it is no text."""
    for line in output[:MOST_BYTES].decode("utf-8", "replace").splitlines():
        if said := "".join(sign if sign.isprintable() else " " for sign in line).strip()[:LONGEST_WORDS]:
            return "" if _NO_TEXT in said else said
    return ""


def divided(params: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """A resource's `param.*` settings: those of the health script, and those of the driver."""
    ours = {key: value for key, value in params.items() if key.startswith(SCRIPT)}
    return ours, {key: value for key, value in params.items() if key not in ours}


def read(params: Mapping[str, str], directory: Path | None, warn: Callable[[str], object]) -> HealthScript | None:
    """The health script of a resource, or None. `params`: its settings, as `divided` has them. `directory`: the
    configuration's folder, for a relative path. `warn` gets a warning if other users can change the script.

    Raises:
        SettingError: a setting is wrong.
        NotOnThisMachineError: the script does not exist.
    """
    settings.reject_unknown(params, VALID)
    if not params:
        return None
    text = params.get(SCRIPT, "").strip()
    if not text:
        raise SettingError(next(iter(params)), f"is for a health script; {SCRIPT} is its path")
    interval_s = settings.seconds(params, INTERVAL, default=DEFAULT_INTERVAL_S, maximum=86_400)
    timeout_s = settings.seconds(params, TIMEOUT, default=DEFAULT_TIMEOUT_S, maximum=3_600)
    args = tuple(_words(params.get(ARGS, "")))
    path = _executable(text, directory, warn)  # last: a script that is not here yet hides no other error
    return HealthScript(path=path, args=args, interval_s=interval_s, timeout_s=timeout_s)


def _executable(text: str, directory: Path | None, warn: Callable[[str], object]) -> str:
    path = ((directory or Path()) / Path(text).expanduser()).absolute()
    if not path.exists():
        raise NotOnThisMachineError(f"{SCRIPT} is {text!r}, but this file does not exist: {path}")
    if not path.is_file():
        raise SettingError(SCRIPT, f"is {text!r}, but {path} is no file; valid is an executable file")
    if not os.access(path, os.X_OK):
        raise SettingError(SCRIPT, f"is {text!r}, but {path} is not executable; chmod +x makes it so")
    if doubt := file_ownership.doubt(path):
        warn(f"{SCRIPT}: {doubt}, and so the code that runs as this user")
    return str(path)


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise SettingError(ARGS, f"is {text!r}: {error}; valid are words as in a shell") from None
