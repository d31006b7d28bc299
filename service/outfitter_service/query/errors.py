"""What the read side says when it cannot answer."""

from __future__ import annotations

import sys

from outfitter_proto.support.printable import printable


class OutfitterCliError(Exception):
    """A command cannot do what it was asked to; the message is for people and says what would be valid.

    `exit_code` None means the command's own code for failures (1; for `outfitter run` 125).
    """

    def __init__(self, message: str, *, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def warn(message: str) -> None:
    """Say something on standard error that is no failure."""
    print(f"outfitter: {printable(message)}", file=sys.stderr)
