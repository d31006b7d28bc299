"""The settings of the `gpu` driver that are about NVML."""

from __future__ import annotations

from collections.abc import Mapping

from outfitter_drivers.nvidia.driver import Interface
from outfitter_drivers.nvidia.xid import PREFIX, XidClasses
from outfitter_drivers.settings import SettingError

INTERFACE = "interface"
XID = PREFIX


def interface(params: Mapping[str, str]) -> Interface:
    """How to ask for GPUs.

    Raises:
        SettingError: another value.
    """
    value = params.get(INTERFACE, Interface.AUTO)
    try:
        return Interface(value.strip().lower())
    except ValueError:
        raise SettingError(INTERFACE, f"is {value!r}; valid is {', '.join(Interface)}") from None


def xid_classes(params: Mapping[str, str]) -> XidClasses:
    """The classes of Xids, with those of the settings.

    Raises:
        SettingError: see `XidClasses`.
    """
    return XidClasses({key.removeprefix(XID): value for key, value in params.items() if key.startswith(XID)})
