"""What a device may be called by a program that names devices: something that people can see and tell apart.

A name is opaque otherwise, as for Flink.
"""

from __future__ import annotations

import re
import unicodedata

_IGNORED = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0000-\U000e0fff]")
"""Marks and letters without width, variation selectors above all: Unicode's Default_Ignorable_Code_Point, without the
signs of category Cf, which are not printable anyway."""

_LOOK_BLANK = frozenset("\u115f\u1160\u2800\u3164\uffa0")
"""Letters and signs, as Unicode counts, of which nothing is to be seen."""


def is_blank(text: str) -> bool:
    """Whether nothing of it is to be seen: white space of any kind, controls, what has no width, marks alone."""
    return not any(unicodedata.category(sign)[0] in "LNPS" and sign not in _LOOK_BLANK for sign in text)


def hides_something(text: str) -> bool:
    """Whether a sign is in it that nobody sees beside the others: a control, one without width, half a character. Two
    names that look alike would be two devices."""
    return _IGNORED.search(text) is not None or any(
        not sign.isprintable() and unicodedata.category(sign) != "Zs" for sign in text
    )
