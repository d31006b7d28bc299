"""What must be so of parts after a run, by what is really a part of what: nobody gets a whole of which another has a
part, nor the reverse, once a manager knows that it is one.

The host's record says what the manager knows. What it knew while somebody held the part or the whole it must not
forget, whatever drivers say since. What it learns after both grants is nobody's fault.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from outfitter_verify import Violation
from simulation.hosts.hardware import physical, whole_of
from simulation.hosts.managers import Host
from simulation.lent import HOLDING, lent
from simulation.model import log as model
from support.exclusivity import Held

Pair = tuple[str, str]
"""A part and its whole, each by its one name."""


class Found(NamedTuple):
    """What is `wrong`; how many grants were `judged`; and the `late` pairs of holders: what these have are a part and
    its whole, which nobody knew when the later one got it."""

    wrong: list[str]
    judged: int
    late: set[frozenset[str]]

    def excuses(self, violation: Violation) -> bool:
        """Whether the checker finds two holders of one device, which nobody knew in time."""
        words = violation.what.split()
        return violation.check == "exclusivity" and frozenset((words[0], words[7])) in self.late


class _Holder(NamedTuple):
    """Who has what; and all parts that were known at the end of some commit since."""

    held: Held
    known: set[Pair]


def look(host: Host, lives: Sequence[model.Log]) -> Found:
    """Judge all grants of a host, in one ledger after the other."""
    found = Found([], 0, set())
    before: set[str] = set()
    for ledger in lives if host.bench.catalogue.parts else ():
        # a ledger that was made anew has no grants from before, only later versions of their records
        new = _look(host.name, ledger, before)
        found = Found(found.wrong + new.wrong, found.judged + new.judged, found.late | new.late)
    return found._replace(wrong=sorted(set(found.wrong))[:5])


def _look(host: str, ledger: model.Log, before: set[str]) -> Found:
    live: dict[str, _Holder] = {}
    told: set[Pair] = set()
    wrong: list[str] = []
    late: set[frozenset[str]] = set()
    judged = 0
    for commit, at in _commits(host, ledger):
        earlier, granted = told, []
        for key, body in commit:
            if key == f"@host/{host}":
                told = _told(body or {})
            elif body is None or body["state"] not in HOLDING:
                live.pop(key, None)
            elif key not in live:
                live[key] = _Holder(lent(body), set())
                granted += [key] if key not in before else []
                before.add(key)
        for key in granted:
            if key not in live:
                continue
            judged += any(map(whole_of, live[key].held.own | live[key].held.together))
            for other in live.keys() - {key}:
                for pair in live[key].held.beside(live[other].held, _wholes):
                    if pair in live[other].known or (other in granted and pair in earlier and pair in told):
                        part, whole = pair
                        wrong.append(
                            f"PROMISE 1: {key} and {other} have {whole} and {part}, a part of it, from {at - 1000:.3f} "
                            "on, which the manager knew"
                        )
                    else:
                        late.add(frozenset((key, other)))
        for holder in live.values():
            holder.known.update(told)
    return Found(wrong, judged, late)


def _wholes(device: str) -> Iterable[str]:
    whole = whole_of(device)
    return () if whole is None else (whole,)


def _commits(host: str, ledger: model.Log) -> Iterator[tuple[list[tuple[str, Any]], float]]:
    """The records of each commit about a host, and when it was: up to the checkpoint of whoever serves the host."""
    commit: list[tuple[str, Any]] = []
    for record, at in ledger.committed():
        key = (record.key or b"").decode()
        if key == f"@host/{host}" or key.startswith(f"{host}/"):
            commit.append((key, None if record.value is None else json.loads(record.value)))
        elif key == f"@checkpoint/host/{host}" or key.startswith("@checkpoint/partition/"):
            yield commit, at
            commit = []


def _told(record: dict[str, Any]) -> set[Pair]:
    """What a host's record says of parts: of wholes that it calls as `gpu` does, or whose names it connects."""
    resources = record.get("resources", {}).values()
    connected = {name for each in resources for names in each.get("names") or () for name in names}
    return {
        (physical(part), physical(whole))
        for each in resources
        for whole, parts in (each.get("parts") or {}).items()
        for part in parts
        if physical(whole) == whole or whole in connected
    }
