"""What is known after each answer to a request of a transaction, as one table.

A code without a row is a refusal: nothing was done, and the error says why. Only a request to end a transaction may
have been carried out all the same, because its coordinator also answers so after it has written its decision.
"""

from __future__ import annotations

import enum

from outfitter_proto.bus.kafka.connecting.protocol import (
    CONCURRENT_TRANSACTIONS,
    COORDINATOR_LOADING,
    COORDINATOR_NOT_AVAILABLE,
    MOVED,
    NOT_COORDINATOR,
    OK,
    TRANSACTIONAL_ID_NOT_FOUND,
    UNKNOWN_TOPIC,
)


class Step(enum.StrEnum):
    """The requests of a transaction, in their order."""

    DESCRIBE = "DescribeTransactions"
    TAKE = "InitProducerId"
    ADD = "AddPartitionsToTxn"
    """Version 1 only. In version 2 a partition joins the transaction when it is written to."""
    WRITE = "Produce"
    END = "EndTxn"


class Known(enum.Enum):
    """What is known after an answer, or without one."""

    DONE = enum.auto()
    NOT_YET = enum.auto()
    """Nothing was done, so ask again."""
    ELSEWHERE = enum.auto()
    """Look up whom to ask, and ask again: twice has the effect of once."""
    DOUBT = enum.auto()
    """It may have been done, or may still be done. Ask again."""
    ENDED = enum.auto()
    """The transaction has ended without a commit."""
    FENCED = enum.auto()
    """Nothing was done: another holder took the id, or the transaction was open for too long."""
    REFUSED = enum.auto()
    """Nothing was done."""


NO_ANSWER = None
_WRITTEN_NOT_BY_ALL = frozenset({7, 20})
"""The leader has the records and too few others have them yet. It writes them once, however often they are sent."""
_OLD_EPOCH, INVALID_STATE, _FORGOTTEN, _FENCED = 47, 48, 49, 90
_UNSUPPORTED_VERSION, _DENIED = 35, 53

_NO_COORDINATOR = COORDINATOR_LOADING, COORDINATOR_NOT_AVAILABLE, NOT_COORDINATOR

TABLE: dict[tuple[Step, int | None], Known] = {
    (Step.DESCRIBE, OK): Known.DONE,
    (Step.DESCRIBE, TRANSACTIONAL_ID_NOT_FOUND): Known.DONE,
    **{(Step.DESCRIBE, code): Known.ELSEWHERE for code in _NO_COORDINATOR},
    (Step.DESCRIBE, NO_ANSWER): Known.ELSEWHERE,
    (Step.TAKE, OK): Known.DONE,
    (Step.TAKE, CONCURRENT_TRANSACTIONS): Known.NOT_YET,
    **{(Step.TAKE, code): Known.ELSEWHERE for code in _NO_COORDINATOR},
    # each copy takes the id; one that comes late fences its own sender, who then takes the id once more
    (Step.TAKE, NO_ANSWER): Known.ELSEWHERE,
    (Step.ADD, OK): Known.DONE,
    (Step.ADD, CONCURRENT_TRANSACTIONS): Known.NOT_YET,
    (Step.ADD, UNKNOWN_TOPIC): Known.NOT_YET,  # or it is gone: see its metadata
    **{(Step.ADD, code): Known.ELSEWHERE for code in _NO_COORDINATOR},
    (Step.ADD, _OLD_EPOCH): Known.FENCED,
    (Step.ADD, _FENCED): Known.FENCED,
    (Step.ADD, NO_ANSWER): Known.DOUBT,  # a late copy opens a transaction that nobody wants
    (Step.WRITE, OK): Known.DONE,
    (Step.WRITE, CONCURRENT_TRANSACTIONS): Known.NOT_YET,
    **{(Step.WRITE, code): Known.ELSEWHERE for code in MOVED | _WRITTEN_NOT_BY_ALL},
    (Step.WRITE, _OLD_EPOCH): Known.FENCED,
    (Step.WRITE, _FENCED): Known.FENCED,
    (Step.WRITE, INVALID_STATE): Known.ENDED,
    (Step.WRITE, NO_ANSWER): Known.ELSEWHERE,  # a leader knows by its sequence number a batch that it has
    (Step.END, OK): Known.DONE,
    (Step.END, CONCURRENT_TRANSACTIONS): Known.NOT_YET,
    (Step.END, COORDINATOR_LOADING): Known.ELSEWHERE,
    # also the answers if the decision is written, and too few brokers have it yet
    (Step.END, COORDINATOR_NOT_AVAILABLE): Known.DOUBT,
    (Step.END, NOT_COORDINATOR): Known.DOUBT,
    (Step.END, INVALID_STATE): Known.ENDED,
    (Step.END, _OLD_EPOCH): Known.FENCED,
    (Step.END, _FENCED): Known.FENCED,
    (Step.END, _FORGOTTEN): Known.REFUSED,
    (Step.END, _UNSUPPORTED_VERSION): Known.REFUSED,
    (Step.END, _DENIED): Known.REFUSED,
    (Step.END, NO_ANSWER): Known.DOUBT,
}


def known(step: Step, code: int | None) -> Known:
    """What is known after the answer with this error code."""
    return TABLE.get((step, code), Known.DOUBT if step is Step.END else Known.REFUSED)
