"""Labels for a function of PyFlink, from what its runtime tells: they say in the ledger whose devices these are.

PyFlink's own modules are not needed. In process mode the runtime context has the task and the subtask. In thread mode
it asks Java's runtime context by names that Flink 2 no longer has, so there we ask Java's runtime context ourselves.
"""

from __future__ import annotations

from collections.abc import Callable

LONGEST = 200
"""Characters of a label: a chain's name can have thousands, and all labels together have at most 4 KiB."""

_PYTHON: dict[str, Callable[[object], object]] = {
    "task": lambda ctx: ctx.get_task_name(),  # type: ignore[attr-defined]
    "subtask": lambda ctx: ctx.get_index_of_this_subtask(),  # type: ignore[attr-defined]
    "attempt": lambda ctx: ctx.get_attempt_number(),  # type: ignore[attr-defined]
}
_JAVA: dict[str, Callable[[object], object]] = {
    "job": lambda ctx: ctx._runtime_context.getJobInfo().getJobName(),  # type: ignore[attr-defined]
    "task": lambda ctx: ctx._runtime_context.getTaskInfo().getTaskName(),  # type: ignore[attr-defined]
    "subtask": lambda ctx: ctx._runtime_context.getTaskInfo().getIndexOfThisSubtask(),  # type: ignore[attr-defined]
    "attempt": lambda ctx: ctx._runtime_context.getTaskInfo().getAttemptNumber(),  # type: ignore[attr-defined]
}


def flink_labels(ctx: object, **more: str) -> dict[str, str]:
    """Labels `job`, `task`, `subtask` and `attempt`, as far as `ctx`, the argument of `open()`, tells them.

    The subtask is its index from 0. `more` adds labels or replaces these: `flink_labels(ctx, job="scores")`. Never
    raises for what the runtime does not tell.
    """
    labels: dict[str, str] = {}
    for source in (_PYTHON, _JAVA):
        for name, read in source.items():
            if name not in labels and name not in more and (text := _text(read, ctx)) is not None:
                labels[name] = text
    return labels | more


def _text(read: Callable[[object], object], ctx: object) -> str | None:
    try:
        value = read(ctx)
    except Exception:  # noqa: BLE001 - in thread mode also Java's
        return None
    if not isinstance(value, str | int):
        return None
    text = str(value)
    return (text if len(text) <= LONGEST else text[: LONGEST - 1] + "…").encode(errors="replace").decode()
