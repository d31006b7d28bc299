"""What a manager that starts takes up of the last one's work."""

from __future__ import annotations

import pytest

from outfitter_service.runtime.processor.tenure import GIVEN_BACK_WITHIN, was_long_ended
from support.api import allocation, checkpoint


@pytest.mark.parametrize(("before_s", "was"), [(0, False), (59, False), (61, True)])
def test_offers_of_workers_that_ended_long_before_the_last_commit_were_given_back(before_s: int, was: bool) -> None:
    """Else each start would ask the drivers about all who ended within the last hour."""
    assert GIVEN_BACK_WITHIN.total_seconds() == 60
    assert was_long_ended(allocation("h", "w", "ended", offset=-before_s), checkpoint("host/h")) is was
    assert not was_long_ended(allocation("h", "w", "ended", offset=-before_s), None)
