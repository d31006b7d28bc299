"""What a manager that starts takes up of the last one's work."""

from __future__ import annotations

from datetime import timedelta

import pytest

from outfitter_service.runtime.processor.tenure import GIVEN_BACK_WITHIN, was_long_ended
from support.api import allocation, checkpoint


@pytest.mark.parametrize(("before_s", "was"), [(0, False), (59, False), (61, True)])
def test_offers_of_workers_that_ended_long_before_the_last_commit_were_given_back(before_s: int, was: bool) -> None:
    """Else each start would ask the drivers about all who ended within the last hour."""
    assert GIVEN_BACK_WITHIN.total_seconds() == 60
    last, ended = checkpoint("host/h"), allocation("h", "w", "ended", offset=-before_s)
    assert was_long_ended(ended, last, None) is was
    assert was_long_ended(ended, last, last.at - timedelta(hours=1)) is was
    assert not was_long_ended(ended, None, None)


def test_a_manager_that_ended_soon_after_its_start_had_no_time_to_give_offers_back() -> None:
    """It was to give back all that its predecessor may have left, however long ago those workers had ended."""
    last, ended = checkpoint("host/h"), allocation("h", "w", "ended", offset=-100)
    assert not was_long_ended(ended, last, last.at - timedelta(seconds=59))
    assert was_long_ended(ended, last, last.at - timedelta(seconds=61))
