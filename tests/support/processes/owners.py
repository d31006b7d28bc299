"""Processes that own allocations, as workers name them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from msgspec import structs

from outfitter_proto.records import Owner
from outfitter_proto.support.processes import process_owner


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process of another kind that lives until it is killed."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as found:
        yield found
        found.kill()


def owner_of(pid: int, **changes: Any) -> Owner:
    """A process as an owner, with some of its fields replaced."""
    owner = process_owner(pid)
    assert owner is not None
    return structs.replace(owner, **changes)


def body(owner: Owner) -> dict[str, Any]:
    """An owner as a registration has it."""
    found: dict[str, Any] = msgspec.to_builtins(owner)
    return found
