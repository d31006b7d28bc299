"""Finds driver factories by entry-point name, by Python path, or by Flink's class name.

It imports only the requested factory. `gpu` in a configuration means the entry point of that name in the group
`outfitter.drivers`. Any installed distribution can add entry points.
"""

from __future__ import annotations

import difflib
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from types import FrameType

from outfitter_drivers.api import DriverParams, ExternalResourceDriver, ExternalResourceDriverFactory

GROUP = "outfitter.drivers"
"""The entry-point group in which distributions offer their driver factories."""

FLINK_GPU_FACTORY = "org.apache.flink.externalresource.gpu.GPUDriverFactory"
"""The class for GPUs in Flink's documentation."""

ALIASES = {FLINK_GPU_FACTORY: "gpu", "nvidia": "gpu"}
"""Other names for entry points."""


class DriverLookupError(ValueError):
    """No driver factory has this name, or it cannot be loaded. The message has the known names or the reason."""


class DriverExitError(Exception):
    """A driver's code raised a `BaseException` that is no `Exception`, as SystemExit. The message has its name and
    message."""


@contextmanager
def contained() -> Iterator[None]:
    """A context for a driver's synchronous code, as its module and factory. It turns each error into an `Exception`.

    A vendor's library may call `sys.exit()`, and an extension module in Rust raises its panics as a `BaseException`.
    Both would end the process.

    Raises:
        Exception: the code raised it.
        DriverExitError: the code raised another `BaseException`, also KeyboardInterrupt.
        KeyboardInterrupt: the user pressed Ctrl-C.
    """
    interrupted = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        signal.default_int_handler(number, frame)

    is_main = threading.current_thread() is threading.main_thread()
    is_watched = is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_watched:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        if interrupted and isinstance(error, KeyboardInterrupt):
            raise
        raise DriverExitError(described(error)) from error
    finally:
        if is_watched and signal.getsignal(signal.SIGINT) is interrupt:  # the driver may have set its own
            signal.signal(signal.SIGINT, signal.default_int_handler)


def described(error: BaseException) -> str:
    """A driver's exception as text: its name, and its message if it has one. Making the message runs foreign code,
    too."""
    if isinstance(error, DriverExitError):
        return str(error)
    try:
        words = str(error)
    except BaseException as unreadable:  # noqa: BLE001 - as above
        words = f"its message cannot be read ({type(unreadable).__name__})"
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def known_names() -> list[str]:
    """The names of all factories, sorted. Imports nothing."""
    return sorted({point.name for point in entry_points(group=GROUP)} | ALIASES.keys())


def is_java_class_name(name: str) -> bool:
    """Whether the name looks like a Java class (`com.example.FPGADriverFactory`): dotted, its last part capitalised.

    That includes Flink's own class for GPUs, which `find` knows.
    """
    parts = name.strip().split(".")
    identifiers = all(part.replace("$", "_").isidentifier() for part in parts)
    return len(parts) > 1 and identifiers and parts[-1][0].isupper()


def find(name: str) -> EntryPoint:
    """The entry point of the factory. Imports nothing.

    Raises:
        DriverLookupError: the name is unknown, or two distributions offer different factories under it.
    """
    entry_name = name.strip()
    if ":" in entry_name:
        point = EntryPoint(name=entry_name, value=entry_name, group=GROUP)
        module, _, attribute = entry_name.partition(":")
        if not all(part.isidentifier() for path in (module, attribute) for part in path.split(".")):
            raise DriverLookupError(f"{name!r} is no Python path; valid is package.module:Factory")
        return point
    offered = {point.value: point for point in entry_points(group=GROUP, name=ALIASES.get(entry_name, entry_name))}
    if len(offered) > 1:
        raise DriverLookupError(f"{name!r} is offered by more than one distribution: {', '.join(sorted(offered))}")
    if not offered:
        valid = known_names()
        nearest = difflib.get_close_matches(entry_name, valid, n=1)
        hint = f"did you mean {nearest[0]!r}? " if nearest else ""
        raise DriverLookupError(
            f"no driver {name!r}; {hint}known are {', '.join(valid)}, or a Python path such as package.module:Factory"
        )
    return next(iter(offered.values()))


def load_factory(name: str) -> ExternalResourceDriverFactory:
    """Import and construct the factory of that name.

    Raises:
        DriverLookupError: it is unknown or no driver factory, or its import or constructor fails.
    """
    point = find(name)
    try:
        with contained():
            loaded = point.load()
            factory = loaded() if isinstance(loaded, type) else loaded
            if isinstance(factory, ExternalResourceDriverFactory):
                return factory
            shown = repr(loaded)
    except Exception as error:
        raise DriverLookupError(f"driver {name!r} ({point.value}) cannot be loaded: {described(error)}") from error
    raise DriverLookupError(f"driver {name!r} ({point.value}) is no ExternalResourceDriverFactory but {shown}")


def create_driver(name: str, config: DriverParams) -> ExternalResourceDriver:
    """Build the driver of that name.

    Raises:
        DriverLookupError: as `load_factory`, or its factory does not return a driver.
        DriverExitError: the factory raised a `BaseException` that is no `Exception`.
        Exception: any other error of the factory; a ValueError names the wrong setting.
    """
    factory = load_factory(name)
    with contained():
        driver: object = factory.create_external_resource_driver(config)
        if not isinstance(driver, ExternalResourceDriver):
            raise DriverLookupError(f"driver {name!r}: its factory returned no ExternalResourceDriver but {driver!r}")
        return driver
