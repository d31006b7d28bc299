"""The errors of the read side."""

from __future__ import annotations


class OutfitterCliError(Exception):
    """A command has failed. The message is for people, and names the valid values.

    `exit_code` None: the command's own code for failures (1; for `outfitter run` 125).
    """

    def __init__(self, message: str, *, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code
