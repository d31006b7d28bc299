"""The model of a consumer group: who is a member, who has which partitions, and who was silent for too long.

A new assignment is in force at once. Kafka lets the members that it hears of give their partitions up first; here, as
when they are frozen or cut off, each learns of it with its next heartbeat and nobody waits for anybody.
"""

from __future__ import annotations

from collections.abc import Callable

from simulation.model.errors import FENCED_INSTANCE, UNKNOWN_MEMBER, RefusedError


class Member:
    """One member as the coordinator knows it."""

    def __init__(self, id_: int, replica: str | None, session_s: float, seen_at: float) -> None:
        self.id = id_
        self.replica = replica
        self.session_s = session_s
        self.seen_at = seen_at
        self.partitions: set[int] = set()


class Group:
    """One group. The methods answer requests of members."""

    def __init__(self, partitions: int, now: Callable[[], float]) -> None:
        self.members: dict[int, Member] = {}
        self.replaced: set[int] = set()
        self.expelled = 0
        self._partitions = partitions
        self._now = now
        self._next = 0

    def join(self, replica: str | None, session_s: float) -> tuple[int, frozenset[int]]:
        """A new member, or (KIP-345) a known replica's new process, which has what the old one had."""
        self._next += 1
        member = Member(self._next, replica, session_s, self._now())
        for old in list(self.members.values()):
            if replica is not None and old.replica == replica:
                member.partitions = old.partitions
                self.replaced.add(old.id)
                del self.members[old.id]
        self.members[member.id] = member
        self._share_out()
        return member.id, frozenset(member.partitions)

    def heartbeat(self, id_: int) -> frozenset[int]:
        """What the member has."""
        member = self.members.get(id_)
        if member is None:
            raise RefusedError(FENCED_INSTANCE if id_ in self.replaced else UNKNOWN_MEMBER)
        member.seen_at = self._now()
        return frozenset(member.partitions)

    def leave(self, id_: int) -> None:
        if self.members.pop(id_, None) is not None:
            self._share_out()

    def expel(self) -> None:
        """Those who were silent for longer than their session are members no more."""
        late = [member for member in self.members.values() if self._now() - member.seen_at > member.session_s]
        for member in late:
            del self.members[member.id]
            self.expelled += 1
        if late:
            self._share_out()

    def _share_out(self) -> None:
        """Evenly, and moving few."""
        members = list(self.members.values())
        if not members:
            return
        had = set().union(*(member.partitions for member in members))
        for partition in sorted(set(range(self._partitions)) - had):
            min(members, key=_load).partitions.add(partition)
        while _load(most := max(members, key=_load)) - _load(least := min(members, key=_load)) > 1:
            least.partitions.add(most.partitions.pop())


def _load(member: Member) -> int:
    return len(member.partitions)
