"""What the gauges of state show, counted commit by commit: a scrape must not walk a ledger, nor see what is undecided.

It is told what each commit changed, and looks at a ledger only for what drivers said last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from outfitter_proto.records import HOLDING_STATES, Allocation, Health
from outfitter_service.core.book import HostBook, Inventory
from outfitter_service.core.states import PENDING
from outfitter_service.metrics import Standing
from outfitter_service.runtime.selfcheck import Holders, Violation

OTHER = "(other)"
"""The resource of records that ask for one nobody has heard of: names that workers make up must not become labels."""

NONE = "(none)"
"""The resource of records that have none."""

_Ids = dict[str, frozenset[str]]


class Census:
    """The committed records of one processor, counted by what the gauges show."""

    def __init__(self, resources: Iterable[str]) -> None:
        """`resources` are those the manager is configured with."""
        self._resources = frozenset(resources)
        self._records = 0
        self._allocations: dict[tuple[str, str], int] = {}
        self._pending: dict[tuple[str, str], int] = {}
        self._holders = Holders()
        self._known: dict[tuple[str, str], tuple[Inventory, object, _Ids]] = {}
        """Of each host and resource that was shown last, worked out once for each report."""

    def replay(self, records: Mapping[str, Allocation]) -> list[Violation]:
        """Begin anew with all records of a ledger, by key; return what the self-check finds of them."""
        self._records = 0
        self._allocations.clear()
        self._pending.clear()
        self._known.clear()
        self._holders.clear()
        return self.take(records, before={})

    def take(self, changed: Mapping[str, Allocation | None], *, before: Mapping[str, Allocation]) -> list[Violation]:
        """Take in one commit's allocations by key (None: deleted), which were so `before`, as far as they were; return
        what the self-check finds of them."""
        self._count(before.values(), -1)
        self._count(changed.values(), 1)
        return self._holders.take(changed, before=before)

    def _count(self, records: Iterable[Allocation | None], sign: int) -> None:
        # nearly always those that want the same share what says so, and follow each other
        amounts: dict[str, int] = {}
        state, reason, alike = "", None, 0
        for record in records:
            if record is None:
                continue
            if record.request.amounts is not amounts or record.state != state or record.reason_code != reason:
                self._count_alike(amounts, state, reason, alike)
                amounts, state, reason, alike = record.request.amounts, record.state, record.reason_code, 0
            alike += sign
        self._count_alike(amounts, state, reason, alike)

    def _count_alike(self, amounts: Iterable[str], state: str, reason: str | None, count: int) -> None:
        if not count:
            return
        self._records += count
        for resource in amounts or (NONE,):
            known = resource is NONE or state in HOLDING_STATES or resource in self._resources
            name = resource if known else OTHER
            self._allocations[name, state] = self._allocations.get((name, state), 0) + count
            if state == PENDING and reason is not None:
                self._pending[name, reason] = self._pending.get((name, reason), 0) + count

    def standing(self, books: Iterable[HostBook]) -> Standing:
        """What is counted here; `books` are the ledger's, for their inventories and names."""
        devices: Counter[tuple[str, str]] = Counter()
        before, self._known = self._known, {}  # so that hosts that are forgotten are so here
        for book in books:
            held: Iterable[str] = self._holders.held(book.host)
            if book.synonyms:
                held = {book.canonical(name) for name in held}
            for resource, inventory in book.inventories.items():
                known = before.get((book.host, resource))
                if known is None or known[0] is not inventory or known[1] is not book.synonyms:
                    known = inventory, book.synonyms, _ids(book, inventory)
                self._known[book.host, resource] = known
                for health, ids in known[2].items():
                    taken = len(ids.intersection(held))
                    devices[resource, "held"] += taken
                    devices[resource, "free" if health == Health.HEALTHY else health] += len(ids) - taken
        return Standing(
            devices=devices,
            allocations=Counter(self._allocations),
            pending=Counter(self._pending),
            records=self._records,
        )


def _ids(book: HostBook, inventory: Inventory) -> _Ids:
    """A resource's devices by health, under their canonical names."""
    grouped: dict[str, set[str]] = {}
    for device in inventory.devices:
        grouped.setdefault(str(device.health), set()).add(book.canonical(device.id))
    return {health: frozenset(ids) for health, ids in grouped.items()}
