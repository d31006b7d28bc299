"""Dead letters as commands and the API show them: the message as text, if it is text."""

from __future__ import annotations

from datetime import datetime

from msgspec import UNSET, Struct

from outfitter_proto.records import DeadLetter, MessageSource


class ShownLetter(Struct, frozen=True, kw_only=True):
    """A dead letter as it is shown. `text` is the message, perhaps cut, if it is UTF-8; otherwise `base64` has it."""

    at: datetime
    source: MessageSource
    key: str | None
    code: str | None
    field: str | None
    reason: str
    count: int
    """How many messages it stands for."""
    length: int
    sha256: str
    writer: str
    text: str | None
    base64: bytes | None


def shown(letter: DeadLetter) -> ShownLetter:
    """A dead letter with its message as text, if possible. A character that the cut has halved is left out."""
    try:
        text: str | None = letter.body.decode()
    except UnicodeDecodeError as error:
        cut = len(letter.body) < letter.length and error.start > len(letter.body) - 4
        text = letter.body[: error.start].decode() if cut else None
    return ShownLetter(
        at=letter.at,
        source=letter.source,
        key=letter.message_key,
        code=None if letter.code is UNSET else letter.code,
        field=letter.field,
        reason=letter.reason,
        count=1 if letter.count is UNSET else letter.count,
        length=letter.length,
        sha256=letter.sha256,
        writer=letter.writer,
        text=text,
        base64=letter.body if text is None else None,
    )
