"""Whatever is decided before its turn and fails in between: each host's messages are decided once, and in order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from datetime import UTC, datetime

from hypothesis import given, settings
from hypothesis import strategies as st

from outfitter_proto.bus import Message
from outfitter_proto.records import ManagerIdentity
from outfitter_service.core.decide import Rules
from outfitter_service.core.state.ledger import Ledger
from outfitter_service.runtime.input.input_reader import Cursor, PrefetchBuffer
from outfitter_service.runtime.input.lookahead import ENTRY_BYTES, LookAheadBuffer
from outfitter_service.runtime.input.scope import PartitionScope
from outfitter_service.runtime.processor.commit.commit import Commit

HOSTS = (b"a", b"b", b"c", None)
SCOPE = PartitionScope(0, 1, "partition/0")
MOST = 4
"""Messages that each buffer takes."""
ROOM = 5
"""Messages whose answers fit into one commit."""
NOW = datetime(2026, 1, 1, tzinfo=UTC)
RULES, MANAGER = Rules(writer="partition/0", specs={}), ManagerIdentity(instance="one", version="0", since=NOW)


def message(offset: int, key: bytes | None) -> Message:
    return Message("registrations", 0, offset, key, b"", 0)


class Decided(Commit):
    """A commit that only notes what it is to decide."""

    def __init__(self, after: Commit | Cursor) -> None:
        super().__init__(Ledger(), RULES, NOW, manager=MANAGER, cursor=Cursor(topic_id="t", position=0), after=after)
        self.seen: list[Message] = []

    def message(self, message: Message) -> bool:
        self.is_full = len(self.seen) == ROOM
        if not self.is_full:
            self.seen.append(message)
        return not self.is_full

    def refuse(self, message: Message, *_: object) -> None:  # type: ignore[override] # it makes no letter
        self.seen.append(message)


class Partition:
    """What a commit loop does with the two readers of one partition's input, a step at a time."""

    def __init__(self, keys: Iterable[bytes | None], *, quiet_limit: int, room: int) -> None:
        self.log = [message(offset, key) for offset, key in enumerate(keys)]
        self.quiet_limit = quiet_limit
        self.room = room
        self.settled: list[Message] = []
        self.told = Cursor(topic_id="t", position=0)
        self.begin()

    def begin(self) -> None:
        """A manager takes the partition, as after each failed commit, and knows what the last checkpoint told."""
        self.place = Cursor(topic_id="t", position=self.told.position, ahead=dict(self.told.ahead))
        self.input_reader = PrefetchBuffer(MOST)
        self.read = self.place.position
        self.lookahead_buffer: LookAheadBuffer | None = None
        self.works = [Decided(self.place)]

    def fetch(self) -> None:
        if not self.input_reader.full:
            self.input_reader.put(self.log[self.read : self.read + 2])
            self.read = min(self.read + 2, len(self.log))
        if self.lookahead_buffer is None and self.input_reader.full:
            self.lookahead_buffer = LookAheadBuffer(
                self.read, self.place, SCOPE, quiet_limit=self.quiet_limit, room=self.room, most=MOST
            )

    def look(self) -> None:
        lookahead_buffer = self.lookahead_buffer
        if lookahead_buffer is None or lookahead_buffer.full:
            return
        end = min(lookahead_buffer.position + 5, len(self.log))
        lookahead_buffer.add(self.log[lookahead_buffer.position : end], end)
        if self.read >= lookahead_buffer.position and not self.input_reader.full:
            self.lookahead_buffer = None

    def ahead(self) -> None:
        work, lookahead_buffer = self.works[-1], self.lookahead_buffer
        if lookahead_buffer is None or not lookahead_buffer.messages or work.is_full:
            return
        if work.position >= lookahead_buffer.start:
            work.decide_ahead(lookahead_buffer, SCOPE)

    def turn(self) -> None:
        work = self.works[-1]
        if not self.input_reader.messages or work.is_full:
            return
        if not work.decide_in_turn(message := self.input_reader.pop(), SCOPE):
            self.input_reader.put_back([message])

    def seal(self) -> None:
        if len(self.works) == 1:
            self.works.append(Decided(self.works[0]))

    def settle(self) -> None:
        """The commit under way has succeeded, or nothing had to be committed."""
        self.seal()
        work = self.works.pop(0)
        self.settled += work.seen
        self.place.advance(work.position, work.ahead)
        told = work.input_position(self.place, 0, 0)
        ahead = {host.encode(): offset for host, offset in (told.ahead or {}).items()}
        self.told = Cursor(topic_id="t", position=told.to, ahead=ahead)
        self.judge()

    def judge(self) -> None:
        """What is settled is what the checkpoint tells, each message once, and each host's in order."""
        place = self.told
        read = [each for each in self.log if each.offset < max(place.position, place.ahead.get(each.key or b"", 0))]
        assert sorted(each.offset for each in self.settled) == [each.offset for each in read]
        by_host: defaultdict[bytes | None, list[int]] = defaultdict(list)
        for each in self.settled:
            by_host[each.key].append(each.offset)
        assert all(offsets == sorted(offsets) for offsets in by_host.values())
        assert sum(len(key) + ENTRY_BYTES for key in place.ahead) <= 2 * self.room
        settled = {each.offset for each in self.settled}
        for host in filter(None, HOSTS):
            heard = (
                self.place.decided_before(host)
                if self.lookahead_buffer is None
                else self.lookahead_buffer.decided_before(host)
            )
            assert settled >= {each.offset for each in self.log[:heard] if each.key == host}


STEPS = {
    "fetch": Partition.fetch, "look": Partition.look, "ahead": Partition.ahead, "turn": Partition.turn,
    "seal": Partition.seal, "settle": Partition.settle, "begin": Partition.begin,
}  # fmt: skip
OFTEN = ["fetch", "look", "ahead", "turn", "fetch", "look", "ahead", "turn", "seal", "settle", "begin"]


@settings(max_examples=400)
@given(
    keys=st.lists(st.sampled_from((b"a", b"a", *HOSTS)), min_size=10, max_size=60),
    steps=st.lists(st.sampled_from(OFTEN), min_size=20, max_size=300),
    quiet_limit=st.integers(1, 4),
    hosts=st.integers(0, 3),
)
def test_each_message_is_decided_once_and_each_hosts_in_order_whatever_fails(
    keys: list[bytes | None], steps: list[str], quiet_limit: int, hosts: int
) -> None:
    partition = Partition(keys, quiet_limit=quiet_limit, room=hosts * (1 + ENTRY_BYTES))
    for step in steps:
        STEPS[step](partition)
    for _ in range(4 * len(keys)):
        for step in ("fetch", "look", "ahead", "turn", "settle"):
            STEPS[step](partition)
    assert [each.offset for each in sorted(partition.settled, key=lambda each: each.offset)] == list(range(len(keys)))
    assert partition.told.ahead == {}


def lookahead_buffer(
    quiet_limit: int = 2, room: int = 1000, ahead: dict[bytes, int] | None = None
) -> tuple[LookAheadBuffer, Cursor]:
    place = Cursor(topic_id="t", position=0, ahead=ahead or {})
    return LookAheadBuffer(10, place, SCOPE, quiet_limit=quiet_limit, room=room, most=100), place


def kept(lookahead_buffer: LookAheadBuffer) -> list[int]:
    return [each.offset for each in lookahead_buffer.messages]


def test_of_a_flood_no_more_is_kept_than_a_light_hosts_messages() -> None:
    seen, _ = lookahead_buffer()
    seen.add([message(offset, b"loud" if offset % 10 else b"quiet") for offset in range(10, 1010)], 1010)
    assert kept(seen) == [10, 11, 12, 20]


def test_a_host_that_was_left_to_its_turn_is_ahead_again_once_the_intake_has_been_there() -> None:
    seen, place = lookahead_buffer()
    seen.add([message(offset, b"a") for offset in range(10, 15)], 15)
    assert kept(seen) == [10, 11]
    place.position = 14
    seen.add([message(15, b"a")], 16)
    assert kept(seen) == [10, 11], "the message at 14 was left and is not decided"
    place.position = 16
    seen.add([message(16, b"a")], 17)
    assert kept(seen) == [10, 11, 16]


def test_a_host_may_be_ahead_by_its_share_of_what_was_decided_meanwhile() -> None:
    seen, place = lookahead_buffer()
    seen.add([message(10, b"loud"), message(11, b"a"), message(12, b"a")], 13)
    place.position = 14
    seen.add([message(20, b"a")], 21)
    assert kept(seen) == [10, 11, 12, 20], "two of two hosts' four"
    seen.add([message(21, b"a")], 22)
    assert kept(seen) == [10, 11, 12, 20]


def test_what_checkpoints_say_of_hosts_ahead_is_bounded() -> None:
    seen, _ = lookahead_buffer(room=2 * (1 + ENTRY_BYTES))
    seen.add([message(10 + number, key) for number, key in enumerate((b"a", b"b", b"c", b"a"))], 14)
    assert kept(seen) == [10, 11, 13]


def test_after_a_restart_what_is_ahead_already_is_neither_kept_nor_counted() -> None:
    ahead = {b"a": 14, b"b": 20}
    seen, _ = lookahead_buffer(ahead=ahead, room=3 * (1 + ENTRY_BYTES))
    seen.add([message(offset, b"a") for offset in range(10, 16)], 16)
    assert kept(seen) == [14, 15]
    seen.add([message(16, b"c"), message(17, b"d")], 18)
    assert kept(seen) == [14, 15, 16], "there is room for three hosts' names, and b is one of them"


def test_a_host_is_heard_as_far_as_was_looked_unless_something_it_said_is_undecided() -> None:
    seen, place = lookahead_buffer(room=len("loudquiet") + 2 * ENTRY_BYTES)
    seen.add([message(offset, b"loud") for offset in range(10, 20)], 20)
    assert seen.decided_before(b"quiet") == 0, "what is before it is not decided"
    place.position = 10
    assert (seen.decided_before(b"quiet"), seen.decided_before(b"loud")) == (20, 10)
    seen.add([message(20, b"quiet"), message(21, b"loud")], 22)
    assert seen.decided_before(b"quiet") == 10
    place.ahead = {b"quiet": 21}
    assert seen.decided_before(b"quiet") == 22
    seen.add([message(22, b"third")], 23)
    assert (seen.decided_before(b"third"), seen.decided_before(b"fourth")) == (10, 10), (
        "there was no room to say who it was"
    )
    assert seen.decided_before(b"quiet") == 23
    place.position = 30
    assert seen.decided_before(b"loud") == 30


def test_messages_of_nobody_are_decided_in_turn() -> None:
    seen, _ = lookahead_buffer()
    seen.add([message(10, None), message(11, b"no/name"), message(12, b"a")], 13)
    assert kept(seen) == [12]
