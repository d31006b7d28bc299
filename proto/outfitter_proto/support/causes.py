"""The causes in an error: task groups raise groups of errors, whose own text tells nobody what has happened.

Whoever catches, prints or logs an error that a task group may have raised takes its causes from here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anyio.abc import TaskGroup


def causes(error: BaseException) -> Iterator[BaseException]:
    """The errors in a group, which may be nested; an error that is no group itself."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from causes(inner)
    else:
        yield error


def in_words(error: BaseException) -> str:
    """The texts of all causes, each once; an error without a text shows its name."""
    return "; ".join(dict.fromkeys(str(cause) or type(cause).__name__ for cause in causes(error)))


@asynccontextmanager
async def side_by_side() -> AsyncIterator[TaskGroup]:
    """A task group that raises the first cause instead of a group. For tasks that do the same side by side, whose
    caller catches what each of them raises."""
    import anyio  # here, because the command line imports this module for every command

    try:
        async with anyio.create_task_group() as tasks:
            yield tasks
    except BaseExceptionGroup as group:
        raise next(causes(group)) from group
