"""Why a device is not lent is one answer, whoever asks: placement, metrics, `explain`, `top`, the API's troubles."""

from __future__ import annotations

import pytest

from outfitter_proto.records import Health
from outfitter_service.core.state.lending import HELD_BACK, Block, Use, block_of, not_lent, use_of

EACH_HEALTH = [
    (Health.HEALTHY, None, None),
    (Health.HEALTHY, "held back: so it was", None),
    (Health.UNHEALTHY, "held back: and ill", Block.UNHEALTHY),
    (Health.UNKNOWN, None, Block.UNKNOWN),
    (Health.UNKNOWN, "its driver is silent", Block.UNKNOWN),
    (Health.UNKNOWN, f"{HELD_BACK}h/w/1 holds g0 of gpu, which is no longer reported", Block.HELD_BACK),
]


@pytest.mark.parametrize(("health", "reason", "block"), EACH_HEALTH)
def test_a_device_that_is_not_healthy_is_lent_to_nobody_whoever_holds_it(
    health: Health, reason: str | None, block: Block | None
) -> None:
    assert block_of(health, reason) == block
    for use in (None, *Use):
        for shares in (True, False):
            if block is not None:
                assert not_lent(block, use, shares=shares) == block


def test_a_device_that_a_stranger_uses_is_lent_to_nobody_and_its_health_and_orders_weigh_more() -> None:
    assert block_of(Health.HEALTHY, None, stranger=True) == Block.STRANGER
    assert block_of(Health.UNHEALTHY, "XID 79", stranger=True) == Block.UNHEALTHY
    assert block_of(Health.HEALTHY, None, cordoned=True, stranger=True) == Block.CORDONED
    assert [not_lent(Block.STRANGER, use, shares=True) for use in (None, *Use)] == [Block.STRANGER] * (1 + len(Use))


def test_a_held_device_is_lent_only_to_those_who_share_it_with_sharers() -> None:
    alone, shared, nobody = (
        use_of(alone=True, shared=True),
        use_of(alone=False, shared=True),
        use_of(alone=False, shared=False),
    )
    assert (alone, shared, nobody) == (Use.ALONE, Use.SHARED, None)
    assert [not_lent(None, use, shares=True) for use in (alone, shared, nobody)] == [Use.ALONE, None, None]
    assert [not_lent(None, use, shares=False) for use in (alone, shared, nobody)] == [Use.ALONE, Use.SHARED, None]
