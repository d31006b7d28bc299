"""A manager may have heard what the checker's client does not show: then a release, or none, is not judged by it."""

from __future__ import annotations

from outfitter_verify.report import Report
from support.checker.streams import AT, AT_MS, HOST, World, lived_in

ALONE = {"amounts": {"gpu": 1}, "owner": None, "lease_s": 30.0}


def at(second: int) -> str:
    """So many seconds after all that has happened."""
    return AT.replace("12:00:00", f"{12 + second // 3600:02}:{second // 60 % 60:02}:{second % 60:02}")


def held(**request: object) -> World:
    """A world in which `e` has a device and no owner."""
    world = lived_in()
    world.commit(world.allocation("e", "allocated", devices=["GPU-2"], request=ALONE | request))
    return world


def heard(world: World, incarnation: str = "1", *, second: int = 0) -> int:
    """A heartbeat of `e` at that second."""
    offset = world.say({"type": "heartbeat", "host": HOST, "worker": "e", "incarnation": incarnation})
    [record] = [record for record in world.registrations.records if record.offset == offset]
    world.registrations.records[-1] = record._replace(timestamp_ms=AT_MS + second * 1000)
    return offset


def hide(world: World, offset: int) -> None:
    """The client does not show this message."""
    records = world.registrations.records
    records[:] = [record for record in records if record.offset != offset]


def partial(report: Report) -> bool:
    """Whether the report says that not all releases were judged."""
    [releases] = [check for check in report.checks if check.name == "releases"]
    return any("does not show" in why for why in releases.partial)


def test_a_lease_that_unseen_heartbeats_may_have_renewed_is_not_called_long_over() -> None:
    world = held()
    hidden = [heard(world, second=60 * minute) for minute in (0, 12, 24, 36)]
    for minute in (0, 12, 24, 36):
        world.commit(at=at(60 * minute))
    for offset in hidden:
        hide(world, offset)
    report = world.report()
    assert report.violations == ()
    assert partial(report)


def test_a_release_by_a_deregistration_that_is_not_shown_is_not_called_wrong() -> None:
    world = held()
    hidden = world.deregister("e")
    world.commit(world.allocation("e", "ended", reason_code="deregistered"))
    hide(world, hidden)
    report = world.report()
    assert report.violations == ()
    assert partial(report)


def test_a_lease_of_a_run_that_an_unseen_newer_one_superseded_is_not_called_none() -> None:
    world = held(lease_s=None)
    hidden = world.register("e", "2")
    world.commit(world.allocation("e", "pending", incarnation="2"))
    world.commit(world.allocation("e", "ended", reason_code="lease-expired"))
    hide(world, hidden)
    report = world.report()
    assert report.violations == ()
    assert partial(report)


def test_a_lease_that_an_unseen_newer_run_kept_from_being_renewed_is_not_called_too_short() -> None:
    world = held()
    hidden = world.register("e", "2")
    heard(world, second=29)
    world.commit(world.allocation("e", "pending", incarnation="2"), at=at(29))
    world.commit(world.allocation("e", "ended", reason_code="lease-expired", since=at(31)), at=at(31))
    hide(world, hidden)
    report = world.report()
    assert report.violations == ()
    assert partial(report)


def test_a_newer_run_that_was_refused_keeps_no_heartbeat_from_renewing_the_lease() -> None:
    world = held()
    world.refuse(world.register("e", "2"))
    world.commit()
    for minute in (0, 12, 24, 36):
        heard(world, second=60 * minute)
        world.commit(at=at(60 * minute))
    assert world.report().violations == ()
