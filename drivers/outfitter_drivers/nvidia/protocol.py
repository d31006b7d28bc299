"""Lines of JSON between the manager and its NVML process: one request, one answer with the same number.

The parent gives every request a deadline. An answer that comes later, or to a request that was cancelled, is passed
over by its number. Standard library and msgspec only, because the child must start quickly.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from outfitter_drivers.nvidia.snapshot import MOST_EVENTS, Code, Event, Number, Snapshot, Text

MAX_REQUEST_BYTES = 4096
MAX_ANSWER_BYTES = 8 * 1024 * 1024
"""An answer about 16 GPUs with all instances and processes has some hundred kilobytes."""

LONGEST_WAIT_S = 1.0
"""Seconds that one request may wait for events. Other requests wait meanwhile."""


class Request(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`look`: tell of all GPUs. `wait`: tell of events, as soon as there are any and after `seconds` at the latest."""

    id: Number
    do: Literal["look", "wait"]
    seconds: Annotated[float, Meta(ge=0, le=LONGEST_WAIT_S)] = 0.0


class Failure(Struct, frozen=True, kw_only=True):
    """Why there is no answer."""

    words: Annotated[str, Meta(max_length=2000)]
    code: Code | None = None
    """NVML's code. None: it is not NVML that failed."""
    is_unusable: bool = False
    """NVIDIA's library, or the Python package for it, is not there or not the right one."""


class Answer(Struct, frozen=True, kw_only=True):
    """One of the fields after `id` is set."""

    id: Number
    failure: Failure | None = None
    snapshot: Snapshot | None = None
    events: Annotated[tuple[Event, ...], Meta(max_length=MOST_EVENTS)] | None = None
    released_for: Number | None = None
    """The process that asked for the GPUs: the child has let go of them, and ends."""


_requests = msgspec.json.Decoder(Request)
_answers = msgspec.json.Decoder(Answer)


def encoded(message: Request | Answer) -> bytes:
    return msgspec.json.encode(message) + b"\n"


def decode_request(line: bytes) -> Request:
    """Raises ValueError if it is no request."""
    return _requests.decode(line)


def decode_answer(line: bytes) -> Answer:
    """Raises ValueError if it is no answer."""
    try:
        answer = _answers.decode(line)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    said = (answer.failure, answer.snapshot, answer.events, answer.released_for)
    if sum(each is not None for each in said) != 1:
        raise ValueError("an answer has one of failure, snapshot, events and released_for")
    return answer


def short(words: str, limit: int = 256) -> Text:
    """The text within the bound of its field."""
    return words[:limit]
