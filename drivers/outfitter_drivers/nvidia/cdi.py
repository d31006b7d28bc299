"""Which devices the machine's CDI specs define, so that a device gets no name that a container engine does not know.

Specs are JSON or YAML (CDI 1.1.0). NVIDIA's tool writes YAML in blocks, one key a line. Only that form is read, by
lines, because a whole YAML reader is no dependency of workers. A spec in another form defines nothing here.
"""

from __future__ import annotations

import re

import msgspec

from outfitter_drivers.support.tree import Tree

FOLDERS = ("etc/cdi", "var/run/cdi")
KIND = "nvidia.com/gpu"
MAX_SPEC_BYTES = 1024 * 1024

_MOST_SPECS = 64
_KEY = re.compile(r"( {0,64})(- +)?([A-Za-z]{1,40}): *(.{0,200}?) *$")
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.:-]{0,127}[A-Za-z0-9])?", re.ASCII)


def names(tree: Tree, kind: str = KIND) -> frozenset[str]:
    """The device names of a kind that the specs define, such as `0` and `GPU-8a56…`."""
    found: set[str] = set()
    for folder in FOLDERS:
        try:
            files = tree.names(folder)
        except OSError:
            continue
        for file in files[:_MOST_SPECS]:
            if file.endswith((".json", ".yaml", ".yml")):
                found |= _of_file(tree, f"{folder}/{file}", kind)
    return frozenset(found)


def defined(spec: str, kind: str = KIND) -> frozenset[str]:
    """The device names of a kind that a spec defines."""
    told = _of_json(spec, kind) if spec.lstrip().startswith("{") else _of_yaml(spec, kind)
    return frozenset(name for name in told if _NAME.fullmatch(name))


def _of_file(tree: Tree, path: str, kind: str) -> frozenset[str]:
    try:
        return defined(tree.text(path, limit=MAX_SPEC_BYTES), kind)
    except OSError:
        return frozenset()


class _Device(msgspec.Struct):
    name: str


class _Spec(msgspec.Struct):
    kind: str
    devices: list[_Device] = []


def _of_json(spec: str, kind: str) -> list[str]:
    try:
        read = msgspec.json.decode(spec.encode("utf-8", "replace"), type=_Spec)
    except (msgspec.MsgspecError, RecursionError):
        return []
    return [device.name for device in read.devices] if read.kind == kind else []


def _of_yaml(spec: str, kind: str) -> list[str]:
    """Top-level `kind`, and `name` of each item of the top-level list `devices`."""
    is_kind, section, column = False, "", None
    found: list[str] = []
    for line in spec.splitlines():
        if (match := _KEY.match(line)) is None:
            continue
        indent, dash, key, value = len(match[1]), match[2], match[3], match[4].strip("\"'")
        if indent == 0 and not dash:
            section, column = key, None
            is_kind = is_kind or (key == "kind" and value == kind)
        elif section == "devices":
            if dash and (column is None or indent + len(dash) == column):
                column = indent + len(dash)
            if key == "name" and indent + len(dash or "") == column:
                found.append(value)
    return found if is_kind else []
