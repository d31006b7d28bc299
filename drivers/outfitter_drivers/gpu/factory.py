"""The `gpu` driver's factory, with the settings of Flink's GPU plugin.

Without a user's script, `outfitter_drivers.nvidia` lists the GPUs; with one, `discovery_script` calls it. Settings:

    param.poll-interval         between two looks (default 10 s)
    param.visible-devices       uuid (default) or index: what a worker's CUDA_VISIBLE_DEVICES has
    param.in-use-check          false: lend a GPU again although a process still computes on it
    param.interface             auto (default): NVML where it can be used, else nvidia-smi; or one of both
    param.xid.<class>           codes of Xids in another class than NVIDIA's catalog has them
    param.discovery-script.
        path, args, timeout     the script, its arguments, its time limit (default 10 s)
        builtin                 false: Flink's default path means the script at that path
        inventory-amount        call the script with this number
        contract                allocate-release: FLIP-108's older form
        environment             more variables for the script, split on `;`
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from outfitter_drivers import gpu_discovery, settings
from outfitter_drivers.api import (
    DriverParams,
    ExternalResourceDriver,
    ExternalResourceDriverFactory,
    NotOnThisMachineError,
)
from outfitter_drivers.gpu.discovery_script import DEFAULT_TIMEOUT, AllocateReleaseDriver, ScriptDriver
from outfitter_drivers.gpu.nvidia import DEFAULT_POLL_INTERVAL
from outfitter_drivers.nvidia import options as nvml
from outfitter_drivers.nvidia.driver import CheckingNvmlDriver, NvmlDriver
from outfitter_drivers.settings import SettingError
from outfitter_proto.support import file_ownership

FLINK_DEFAULT_PATH = "plugins/external-resource-gpu/nvidia-gpu-discovery.sh"
"""The path of Flink's own NVIDIA script, which its plugin runs by default."""

PATH = "discovery-script.path"
ARGS = "discovery-script.args"
TIMEOUT = "discovery-script.timeout"
BUILTIN = "discovery-script.builtin"
INVENTORY_AMOUNT = "discovery-script.inventory-amount"
CONTRACT = "discovery-script.contract"
ENVIRONMENT = "discovery-script.environment"
POLL_INTERVAL = "poll-interval"
IN_USE_CHECK = "in-use-check"
VISIBLE_DEVICES = "visible-devices"

VALID = (
    PATH, ARGS, TIMEOUT, BUILTIN, INVENTORY_AMOUNT, CONTRACT, ENVIRONMENT, POLL_INTERVAL, IN_USE_CHECK, VISIBLE_DEVICES,
    nvml.INTERFACE,
)  # fmt: skip

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}\*?", re.ASCII)
_COORDINATION_FLAGS = frozenset(
    ("--enable-coordination-mode", "--enable-coordination", "--privilege", "--check-dead-process", "--check-dead")
)
_COORDINATION_FILES = frozenset(("--coordination-file", "--assign-file"))


class GPUDriverFactory(ExternalResourceDriverFactory):
    """Flink's `org.apache.flink.externalresource.gpu.GPUDriverFactory`."""

    def create_external_resource_driver(self, config: DriverParams) -> ExternalResourceDriver:
        settings.reject_unknown(config, VALID, prefixes=(nvml.XID,))
        timeout = settings.seconds(config, TIMEOUT, default=DEFAULT_TIMEOUT, maximum=600)
        interval = settings.seconds(config, POLL_INTERVAL, default=DEFAULT_POLL_INTERVAL, maximum=3600)
        inventory_amount = settings.whole_number(config, INVENTORY_AMOUNT, minimum=1, maximum=settings.MAX_DEVICES)
        checks = settings.flag(config, IN_USE_CHECK, default=True)
        contract = config.get(CONTRACT, "").strip()
        if contract not in ("", "allocate-release"):
            raise SettingError(CONTRACT, f"is {contract!r}; valid is allocate-release, or nothing")
        by_index = _is_by_index(config)
        interface, classes = nvml.interface(config), nvml.xid_classes(config)
        arguments = _arguments(config.get(ARGS, ""))
        environment = _variables(config.get(ENVIRONMENT, ""))
        path = config.get(PATH, "").strip() or FLINK_DEFAULT_PATH
        means_ours = settings.flag(config, BUILTIN, default=True) and os.path.normpath(path) == FLINK_DEFAULT_PATH
        if means_ours and not contract:
            if inventory_amount is not None:
                raise SettingError(INVENTORY_AMOUNT, f"is for a script of yours; without {PATH} all GPUs are listed")
            _check_default_arguments(without_coordination(arguments, config))
            driver = CheckingNvmlDriver if checks else NvmlDriver
            return driver(
                interface=interface, classes=classes, poll_interval=interval, timeout=timeout, by_index=by_index
            )
        if VISIBLE_DEVICES in config:
            raise SettingError(VISIBLE_DEVICES, "is for the built-in discovery; a script's workers get what it prints")
        if ours := next((key for key in config if key == nvml.INTERFACE or key.startswith(nvml.XID)), None):
            raise SettingError(ours, "is for the built-in discovery, and a script names the devices here")
        if contract:
            if inventory_amount is not None:
                raise SettingError(INVENTORY_AMOUNT, f"and {CONTRACT} = {contract} exclude each other")
            # In this form the script coordinates, so it gets the options for coordination.
            script = gpu_program() if means_ours else _checked(config, resolved(path, config.directory))
            return AllocateReleaseDriver(script, arguments, timeout=timeout, environment=environment)
        return ScriptDriver(
            _checked(config, resolved(path, config.directory)),
            without_coordination(arguments, config),
            timeout=timeout,
            inventory_amount=inventory_amount,
            environment=environment,
        )


def resolved(path: str, directory: Path | None) -> Path:
    """The script at `path`: absolute, or relative to the first of `FLINK_HOME`, the working directory and `directory`
    that has this file.

    Raises:
        ValueError: the file does not exist or is not executable.
    """
    flink_home = os.environ.get("FLINK_HOME")
    bases = [Path(flink_home)] if flink_home else []
    bases.append(Path.cwd())
    if directory is not None:
        bases.append(directory)
    candidates = list(dict.fromkeys((base / path).absolute() for base in bases))  # an absolute path stays itself
    for script in candidates:
        if not script.exists():
            continue
        if not script.is_file():
            raise SettingError(PATH, f"is {path!r}, but {script} is no file; valid is an executable file")
        if not os.access(script, os.X_OK):
            raise SettingError(PATH, f"is {path!r}, but {script} is not executable; chmod +x makes it so")
        return script
    tried = ", ".join(str(script) for script in candidates)
    raise NotOnThisMachineError(f"{PATH} is {path!r}, but this file does not exist; looked for {tried}")


def _checked(config: DriverParams, script: Path) -> str:
    """The script as text, with a warning if other users can change it."""
    if doubt := file_ownership.doubt(script):
        config.warn(f"{PATH}: {doubt}, and so the code that runs as this user")
    return str(script)


def gpu_program() -> str:
    """The path of our own discovery program.

    Raises:
        ValueError: it is not installed.
    """
    program = gpu_discovery.program_path()
    if program is None:
        raise SettingError(PATH, f"is missing, and {gpu_discovery.PROGRAM} is not installed; valid is a script's path")
    return program


def without_coordination(arguments: Sequence[str], config: DriverParams) -> list[str]:
    """The arguments without the options for coordination, because the ledger coordinates. Warns about dropped ones."""
    kept: list[str] = []
    dropped: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        name, equals, _ = argument.partition("=")
        if name in _COORDINATION_FLAGS:
            dropped.append(argument)
        elif name in _COORDINATION_FILES:
            dropped.append(argument)
            if not equals and rest:
                dropped.append(rest.pop(0))
        else:
            kept.append(argument)
    if dropped:
        config.warn(f"{ARGS}: {shlex.join(dropped)} is ignored, since the ledger coordinates")
    return kept


def _is_by_index(config: DriverParams) -> bool:
    value = config.get(VISIBLE_DEVICES, "uuid")
    if value.strip().lower() not in ("uuid", "index"):
        raise SettingError(VISIBLE_DEVICES, f"is {value!r}; valid is uuid or index")
    return value.strip().lower() == "index"


def _arguments(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise SettingError(ARGS, f"is {text!r}: {error}; valid are words as in a shell") from None


def _variables(text: str) -> list[str]:
    names = settings.items(text)
    for name in names:
        if not _VARIABLE.fullmatch(name):
            raise SettingError(
                ENVIRONMENT,
                f"has {name[:80]!r}; valid are names of variables, split on ;, or prefixes with a * at the end",
            )
    return names


def _check_default_arguments(arguments: Sequence[str]) -> None:
    try:
        gpu_discovery.parse_arguments(["1", *arguments])
    except gpu_discovery.UsageError as error:
        raise SettingError(ARGS, f"is refused: {error}, as the default script says") from None
