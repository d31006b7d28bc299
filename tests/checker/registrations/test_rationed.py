"""So many dead letters are written in a minute, and the rest is counted: what the checker makes of messages without."""

from __future__ import annotations

import pytest

from outfitter_verify.registrations.answers import RATION
from support.checker.streams import World


def refused(*, letters: int, late_ms: int = 0) -> World:
    """A commit that has read one message more than there are dead letters for, and `letters` of the others, each with
    the timestamp of its own batch."""
    world = World()
    for _ in range(RATION + 1):
        world.say(b"nonsense")
    for offset in range(letters):
        world.refuse(offset)
    world.commit()
    commit_ms = world.allocations.records[-1].timestamp_ms
    world.letters.records = [each._replace(timestamp_ms=commit_ms + late_ms) for each in world.letters.records]
    return world


@pytest.mark.parametrize("late_ms", [-60_000, 0, 2000], ids=["a minute before", "at once", "a batch later"])
def test_a_message_beyond_those_that_get_a_dead_letter_needs_none(late_ms: int) -> None:
    report = refused(letters=RATION, late_ms=late_ms).report()
    assert report.violations == ()
    [judged] = [check for check in report.checks if check.name == "dead-letters"]
    assert any("more messages were refused" in why for why in judged.partial)


@pytest.mark.parametrize(
    ("letters", "late_ms"), [(RATION - 1, 0), (RATION, 60_000), (RATION, -180_000)], ids=["fewer", "later", "earlier"]
)
def test_a_message_without_a_dead_letter_is_found_where_there_was_one_left(letters: int, late_ms: int) -> None:
    assert refused(letters=letters, late_ms=late_ms).violated() == {"dead-letters"}
