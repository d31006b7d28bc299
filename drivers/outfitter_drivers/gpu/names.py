"""The names that a script gives GPUs: one for each, all of one form, and none that has another meaning to CUDA."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

from outfitter_drivers.api import TemporaryDriverError
from outfitter_drivers.script import shortened

UUID = re.compile(r"(?:GPU|MIG)-[0-9A-Za-z/-]+", re.ASCII)

_WHOLE_UUID = re.compile(r"(MIG-GPU-|GPU-|MIG-)([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})(/.*)?", re.IGNORECASE)
_NUMBER = re.compile("[0-9]+")
_DIGIT = re.compile("[0-9]|^(?:GPU|MIG)-[A-Fa-f]+$")
"""A decimal one, or those of a UUID's first part."""
_RESERVED = frozenset(("all", "void", "none", "nodevfiles"))
"""What NVIDIA's variables take for no device, or for all of them."""
_RANGE = re.compile(r"[+-]?[0-9]+(?:[^\w\s;:]+[0-9]+)*-?")


def gpu_names(words: Iterable[str]) -> list[str]:
    """The names of one answer, each once. A number stands for itself, so `00` is `0`; a whole UUID is in small letters.

    Raises:
        TemporaryDriverError: a word is no name, the names are of several forms, or two mean one GPU to CUDA. A script
            may print a message word by word.
    """
    names = list(dict.fromkeys(map(_plain, words)))
    if wrong := next(filter(_why_none, names), None):
        raise _refused(f"{wrong[:80]!r}, which is {_why_none(wrong)}", names)
    forms = {_form(name): name for name in reversed(names)}
    if len(forms) > 1:
        shown = " and ".join(f"{name[:80]!r} ({form})" for form, name in reversed(forms.items()))
        raise _refused(f"{shown}, which are of several forms", names)
    for one, other in itertools.pairwise(sorted(names, key=lambda name: ("/" in name, name.lower()))):
        if _mean_one_gpu(one, other):
            raise _refused(f"{one[:80]!r} and {other[:80]!r}, which are one GPU to CUDA", names)
    return names


def is_number(name: str) -> bool:
    return _NUMBER.fullmatch(name) is not None


def _plain(word: str) -> str:
    """The name in the form that all answers share."""
    if is_number(word):
        return word.lstrip("0") or "0"
    if match := _WHOLE_UUID.fullmatch(word):
        return f"{match[1].upper()}{match[2].lower()}{match[3] or ''}"
    return word


def _why_none(name: str) -> str | None:
    """Why the word names no GPU; None: it names one."""
    if name.lower() in _RESERVED:
        return "a word that NVIDIA's variables take for something else"
    if not is_number(name) and _RANGE.fullmatch(name):
        return "a range, or a number with a sign"
    return None if _DIGIT.search(name) else "a word without a digit"


def _form(name: str) -> str:
    if is_number(name):
        return "an index"
    if UUID.fullmatch(name):
        return "a UUID"
    return "a path" if name.startswith("/") else "another name"


def _mean_one_gpu(one: str, other: str) -> bool:
    """Whether two UUIDs differ in case only, or one is the beginning of the other: CUDA accepts that, too."""
    if not (UUID.fullmatch(one) and UUID.fullmatch(other)):
        return False
    is_beginning = other.lower().startswith(one.lower()) and "/" not in one + other
    return is_beginning or one.lower() == other.lower()


def _refused(what: str, names: Sequence[str]) -> TemporaryDriverError:
    return TemporaryDriverError(
        f"the discovery script named {what}; valid are only indexes, only UUIDs, only paths or only other names, each "
        f"with a digit, and one name for each GPU; it named: {shortened(','.join(names))}"
    )
