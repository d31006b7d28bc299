"""What the model broker answers when it does not do what it was asked: Kafka's error codes."""

from __future__ import annotations

REQUEST_TIMED_OUT = 7
UNKNOWN_MEMBER = 25
OUT_OF_ORDER_SEQUENCE = 45
INVALID_PRODUCER_EPOCH = 47
INVALID_TXN_STATE = 48
INVALID_PRODUCER_ID = 49
CONCURRENT_TRANSACTIONS = 51
FENCED_INSTANCE = 82

FENCED = frozenset({INVALID_PRODUCER_EPOCH, INVALID_PRODUCER_ID})
"""What a producer is told that is no more what it was."""


class RefusedError(Exception):
    """The broker's answer is an error code."""

    def __init__(self, code: int) -> None:
        super().__init__(f"error {code}")
        self.code = code


class OutOfRangeError(Exception):
    """The offset that a fetch asked for is not there."""

    def __init__(self, start: int, end: int) -> None:
        super().__init__(f"there is {start} to {end}")
        self.start = start
        self.end = end
