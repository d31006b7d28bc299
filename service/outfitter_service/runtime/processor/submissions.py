"""Callers that have submitted an event, and wait for the commit that includes it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import copy

import anyio
from msgspec import Struct

from outfitter_service.core import model as m


class NotCommittedError(Exception):
    """A submitted event is in no commit, and the manager does not try it again for its submitter."""


class Submission(Struct, gc=False):
    """A submitted event: a copy, which is no other submission's. `ended` is set once its commit has returned, or the
    manager has given it up (`problem` says why)."""

    event: m.Event
    ended: anyio.Event
    problem: str | None = None


class Submissions:
    """The submitted events whose commit has not returned. They are told apart by identity: two equal events are two
    submissions, and so is one that is submitted twice."""

    def __init__(self) -> None:
        self._waiting: dict[int, Submission] = {}
        self._closed: str | None = None

    def __iter__(self) -> Iterator[m.Event]:
        return (submission.event for submission in self._waiting.values())

    def begin(self, event: m.Event) -> Submission:
        """Submit a copy of an event. The caller queues this copy.

        Raises:
            NotCommittedError: nothing more is decided.
        """
        if self._closed is not None:
            raise NotCommittedError(self._closed)
        event = copy(event)
        submission = self._waiting[id(event)] = Submission(event, anyio.Event())
        return submission

    async def wait(self, submission: Submission) -> None:
        """Wait for the commit of the event itself, not of its follow-ups.

        Raises:
            NotCommittedError: the manager has given the event up.
        """
        try:
            await submission.ended.wait()
        finally:
            self._waiting.pop(id(submission.event), None)
        if submission.problem is not None:
            raise NotCommittedError(submission.problem)

    def end(self, events: Iterable[m.Event], *, problem: str | None = None) -> None:
        """The commit of these events has returned, or the manager gives them up because of `problem`."""
        for event in events if self._waiting else ():
            submission = self._waiting.get(id(event))
            if submission is not None and not submission.ended.is_set():
                submission.problem = problem
                submission.ended.set()

    def close(self, problem: str) -> None:
        """Nothing more is decided: give up all waiting events, and refuse later ones."""
        self._closed = problem
        self.end([*self], problem=problem)
