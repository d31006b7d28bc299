"""Labels from the runtime context that PyFlink hands to `open()`, in each of its modes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from outfitter import RuntimeContext, flink_labels


class ProcessMode:
    """As PyFlink's runtime context in a Python process of its own: it knows what the JVM has sent."""

    def get_task_name(self) -> str:
        return "score -> sink"

    def get_index_of_this_subtask(self) -> int:
        return 3

    def get_attempt_number(self) -> int:
        return 0


class ThreadMode:
    """As PyFlink's runtime context inside the JVM: it asks Java's by names that Flink 2 has no more."""

    def __init__(self) -> None:
        task = SimpleNamespace(
            getTaskName=lambda: "score -> sink", getIndexOfThisSubtask=lambda: 3, getAttemptNumber=lambda: 0
        )
        job = SimpleNamespace(getJobName=lambda: "scores")
        self._runtime_context = SimpleNamespace(getTaskInfo=lambda: task, getJobInfo=lambda: job)

    def get_task_name(self) -> str:
        name: str = self._runtime_context.getTaskName()
        return name

    def get_index_of_this_subtask(self) -> int:
        index: int = self._runtime_context.getIndexOfThisSubtask()
        return index


class TableFunction:
    """As the Table API's function context: it has nothing of the kind."""

    def get_job_parameter(self, key: str, default_value: str) -> str:
        return default_value


def test_in_process_mode_they_have_the_task_and_the_subtask() -> None:
    assert flink_labels(ProcessMode()) == {"task": "score -> sink", "subtask": "3", "attempt": "0"}


def test_in_thread_mode_they_have_the_job_too() -> None:
    assert flink_labels(ThreadMode()) == {"job": "scores", "task": "score -> sink", "subtask": "3", "attempt": "0"}


@pytest.mark.parametrize("ctx", [TableFunction(), None, SimpleNamespace(get_task_name=lambda: None)])
def test_what_the_runtime_does_not_tell_is_left_out(ctx: object) -> None:
    assert flink_labels(ctx) == {}


def test_the_caller_adds_what_it_knows_and_has_the_last_word() -> None:
    labels = flink_labels(ProcessMode(), job="scores", task="score")
    assert labels == {"job": "scores", "task": "score", "subtask": "3", "attempt": "0"}


def test_a_long_name_is_cut_to_what_a_registration_takes() -> None:
    labels = flink_labels(SimpleNamespace(get_task_name=lambda: "map -> " * 1000 + "\ud800"))
    assert labels["task"].endswith("…")
    RuntimeContext(labels=labels)
