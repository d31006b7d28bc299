"""A commit of one writer, without a manager around it."""

from __future__ import annotations

from datetime import datetime

from msgspec import structs

from outfitter_proto.records import ManagerIdentity
from outfitter_service.core.decide import Rules
from outfitter_service.core.state.ledger import Ledger
from outfitter_service.runtime.input.input_reader import Cursor
from outfitter_service.runtime.processor.commit.commit import Commit
from outfitter_service.runtime.processor.commit.quotas import Quotas
from outfitter_service.runtime.processor.limits import DEFAULT_LIMITS

BEGINNING = Cursor(topic_id="t", position=0)


def begin(ledger: Ledger, rules: Rules, now: datetime, *, history: bool = True, quotas: Quotas | None = None) -> Commit:
    """A commit that begins with the input. `history`: whether history is written."""
    return Commit(
        ledger,
        rules,
        now,
        manager=ManagerIdentity(instance="one", version="0", since=now),
        cursor=BEGINNING,
        after=BEGINNING,
        limits=DEFAULT_LIMITS if history else structs.replace(DEFAULT_LIMITS, history=None),
        quotas=quotas,
    )
