"""Finding driver factories: by entry-point name, by Python path, or by the class name that Flink knows.

Only what is asked for is imported. The name `gpu` of a configuration means the entry point of that name in the
group `outfitter.drivers`; any installed distribution may bring more of them.
"""

from __future__ import annotations

import difflib
from importlib.metadata import EntryPoint, entry_points

from outfitter_drivers.api import DriverParams, ExternalResourceDriver, ExternalResourceDriverFactory

GROUP = "outfitter.drivers"
"""The entry-point group in which distributions offer their driver factories."""

FLINK_GPU_FACTORY = "org.apache.flink.externalresource.gpu.GPUDriverFactory"
"""The class that Flink's documentation has people configure for GPUs."""

ALIASES = {FLINK_GPU_FACTORY: "gpu", "nvidia": "gpu"}
"""Other names for entry points."""


class DriverLookupError(ValueError):
    """No driver factory can be had under a name; the message says which are known, or why it cannot be loaded."""


def known_names() -> list[str]:
    """The names under which factories can be configured, sorted; nothing is imported."""
    return sorted({point.name for point in entry_points(group=GROUP)} | ALIASES.keys())


def is_java_class_name(name: str) -> bool:
    """Whether the name reads as a Java class (`com.example.FPGADriverFactory`): dotted, its last part capitalised.

    Flink's own class for GPUs reads so as well; `find` knows it.
    """
    parts = name.strip().split(".")
    identifiers = all(part.replace("$", "_").isidentifier() for part in parts)
    return len(parts) > 1 and identifiers and parts[-1][0].isupper()


def find(name: str) -> EntryPoint:
    """Where the factory of that name lies; imports nothing.

    Raises:
        DriverLookupError: nothing of that name is known, or two distributions offer different things under it.
    """
    wanted = name.strip()
    if ":" in wanted:
        point = EntryPoint(name=wanted, value=wanted, group=GROUP)
        module, _, attribute = wanted.partition(":")
        if not all(part.isidentifier() for path in (module, attribute) for part in path.split(".")):
            raise DriverLookupError(f"{name!r} is no Python path; valid is package.module:Factory")
        return point
    offered = {point.value: point for point in entry_points(group=GROUP, name=ALIASES.get(wanted, wanted))}
    if len(offered) > 1:
        raise DriverLookupError(f"{name!r} is offered by more than one distribution: {', '.join(sorted(offered))}")
    if not offered:
        known = known_names()
        nearest = difflib.get_close_matches(wanted, known, n=1)
        hint = f"did you mean {nearest[0]!r}? " if nearest else ""
        raise DriverLookupError(
            f"no driver {name!r}; {hint}known are {', '.join(known)}, or a Python path such as package.module:Factory"
        )
    return next(iter(offered.values()))


def load_factory(name: str) -> ExternalResourceDriverFactory:
    """Import and make the factory of that name.

    Raises:
        DriverLookupError: it is not known, its import or its construction fails, or it is no driver factory.
    """
    point = find(name)
    try:
        found = point.load()
        factory = found() if isinstance(found, type) else found
    except (Exception, SystemExit) as error:
        # Foreign code is imported here: whatever it raises is about this one driver.
        raise DriverLookupError(f"driver {name!r} ({point.value}) cannot be loaded: {error!r}") from error
    if not isinstance(factory, ExternalResourceDriverFactory):
        raise DriverLookupError(f"driver {name!r} ({point.value}) is no ExternalResourceDriverFactory but {found!r}")
    return factory


def create_driver(name: str, config: DriverParams) -> ExternalResourceDriver:
    """Make the driver of that name.

    Raises:
        DriverLookupError: as `load_factory`, or what its factory returns is no driver.
        Exception: the factory's own; a ValueError says which setting is wrong.
    """
    driver: object = load_factory(name).create_external_resource_driver(config)
    if not isinstance(driver, ExternalResourceDriver):
        raise DriverLookupError(f"driver {name!r}: its factory returned no ExternalResourceDriver but {driver!r}")
    return driver
