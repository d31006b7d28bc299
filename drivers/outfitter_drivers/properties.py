"""Names of properties that mean the same whatever the driver, so that workers can choose devices by them.

A worker's clause names a property. If two drivers call one thing by two names, no clause finds both. So what all
drivers may know has its name and its form here; the conformance kit checks the form. Other properties are a driver's
own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

TEXT = r".+"
WHOLE_NUMBER = r"[0-9]{1,19}"
VERSION = r"[0-9]{1,19}(?:\.[0-9]{1,19}){0,7}"
PCI_ADDRESS = r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]"
LIST = r"[^, ]+(?:,[^, ]+)*"

FORMS: Mapping[str, str] = {
    "index": TEXT,
    "uuid": TEXT,
    "model": TEXT,
    "memory.total_bytes": WHOLE_NUMBER,
    "pci.bus_id": PCI_ADDRESS,
    "numa_node": WHOLE_NUMBER,
    "driver_version": VERSION,
    "compute_capability": VERSION,
    "nvlink.group": LIST,
}
"""The form of each, as a regular expression. A property that does not apply is left out, and not empty."""


def fault(name: str, value: str) -> str | None:
    """Why a property is not what its name stands for, or None."""
    form = FORMS.get(name)
    if form is None or re.fullmatch(form, value):
        return None
    return f"the property {name} is {value!r}; valid is {form}"
