"""Valid device names: people must be able to see and distinguish them, and no part of a message is one. Otherwise a
name is opaque, as in Flink."""

from __future__ import annotations

import re
import unicodedata

_IGNORED = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0000-\U000e0fff]")
"""Invisible marks and letters, mostly variation selectors: Unicode's Default_Ignorable_Code_Point without category Cf,
which is not printable anyway."""

_LOOK_BLANK = frozenset("\u115f\u1160\u2800\u3164\uffa0")
"""Letters and signs that look blank."""


_NO_PART_OF_A_NAME = re.compile(r"""[\s,<>{}\[\]"'`!?]|[:.]\Z""")
_WORDS_OF_MESSAGES = frozenset(
    (
        "no", "not", "none", "null", "nil", "nan", "n/a", "undefined", "true", "false", "unknown", "invalid",
        "error", "errors", "err", "fail", "failed", "failure", "fatal", "exception", "traceback", "warning", "usage",
        "unable", "cannot", "could", "killed", "aborted", "segmentation", "denied", "timeout", "nvidia-smi",
    )
)  # fmt: skip
"""A script that splits a message on blanks, as Flink's does, prints them as names: `No,devices`."""


def is_message(text: str) -> bool:
    """Whether the text is, or is part of, a message, and no name: indexes (0), UUIDs (GPU-…), paths (/dev/davinci0) and
    other names have no blanks, quotes or brackets."""
    return _NO_PART_OF_A_NAME.search(text) is not None or text.lower() in _WORDS_OF_MESSAGES


def is_blank(text: str) -> bool:
    """Whether the text is invisible: white space of any kind, controls, signs without width, marks alone. Half a
    character is not."""
    return not any(
        (kind[0] in "LNPS" or kind == "Cs") and sign not in _LOOK_BLANK
        for sign, kind in ((sign, unicodedata.category(sign)) for sign in text)
    )


def hides_something(text: str) -> bool:
    """Whether the text has an invisible sign: a control, a sign without width, half a character.

    Two names that look alike would be two devices.
    """
    return _IGNORED.search(text) is not None or any(
        not sign.isprintable() and unicodedata.category(sign) != "Zs" for sign in text
    )
