"""Takes this process's file descriptors away for a while."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """A context in which only `count` more can be opened."""
    gc.collect()  # what an earlier test left open would be closed in here, at any moment
    opened: list[int] = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        for _ in range(count + 1):
            opened.append(os.open("/", os.O_RDONLY))  # noqa: PERF401 - an error must leave what is open by then
        resource.setrlimit(resource.RLIMIT_NOFILE, (opened[-1], hard))
    finally:
        for descriptor in opened:
            os.close(descriptor)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
