"""What an Xid means: NVIDIA's driver writes such a number when something goes wrong on a GPU.

The classes follow NVIDIA's Xid catalog (docs.nvidia.com, XID Errors). Whether a GPU is ill is read from its levels. An
Xid counts only where a driver does not tell the recovery action (before version 570), or where a setting says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum

from outfitter_drivers.settings import SettingError

PREFIX = "xid."
MOST_CODES = 1000
LARGEST = 99_999


class XidClass(StrEnum):
    """What to do after it."""

    APPLICATION = "application"
    """Restart the application. The GPU is well."""
    IGNORE = "ignore"
    RESET = "reset"
    """Reset the GPU. Until then it is ill."""
    REBOOT = "reboot"
    """Reboot the machine. Until then it is ill."""
    LOOK = "look"
    """Look at the levels: they say whether the GPU is ill."""


ILL = frozenset((XidClass.RESET, XidClass.REBOOT))

CATALOG: dict[XidClass, str] = {
    XidClass.APPLICATION: "8;11;13;25;31;32;39-41;60;68-72;75-77;80;82-86;88;89;94;96-105;126-135;139",
    XidClass.IGNORE: "37;38;43;44;63;66;67;92;93;106;107;121;137;141;152;153;157;160;161",
    XidClass.RESET: "46;62;64;95;109;110;119;120;136;140;143;155;156;158",
    XidClass.REBOOT: "79;151",
    XidClass.LOOK: "45;48;74;144-150;154",
}
"""As in the catalog of October 2025."""

_CODES = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", re.ASCII)


class XidClasses:
    """The class of each code: the settings first, then the catalog."""

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        """`settings`: codes by class, such as `{"reset": "63;64"}`.

        Raises:
            SettingError: an unknown class, no code, or a code in two classes.
        """
        self._catalog = {code: kind for kind, text in CATALOG.items() for code in parsed(text, PREFIX + kind)}
        self._set: dict[int, XidClass] = {}
        for name, text in (settings or {}).items():
            kind = _class(name)
            for code in parsed(text, PREFIX + name):
                if self._set.setdefault(code, kind) is not kind:
                    raise SettingError(PREFIX + name, f"has {code}, and so has {PREFIX}{self._set[code]}; keep one")

    def of(self, code: int) -> XidClass | None:
        """None: nobody knows it."""
        return self._set.get(code) or self._catalog.get(code)

    def is_ill(self, code: int, *, has_levels: bool) -> bool:
        """Whether a GPU with this last Xid is ill. `has_levels`: its driver tells the recovery action."""
        return self.of(code) in ILL and (code in self._set or not has_levels)


def parsed(text: str, key: str) -> list[int]:
    """The codes of a list such as `13;39-41`.

    Raises:
        SettingError: anything else.
    """
    codes: list[int] = []
    for word in text.split(";"):
        if not word.strip():
            continue
        match = _CODES.fullmatch(word.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first or last - first >= MOST_CODES:
            raise SettingError(
                key, f"has {word.strip()[:40]!r}; valid are codes and ranges split on ;, such as 13;39-41"
            )
        codes += range(first, last + 1)
    return codes


def _class(name: str) -> XidClass:
    try:
        return XidClass(name)
    except ValueError:
        valid = ", ".join(XidClass)
        raise SettingError(PREFIX + name, f"names no class of Xids; valid are {valid}") from None
