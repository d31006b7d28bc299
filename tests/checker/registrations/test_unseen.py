"""A client may show fewer registrations than a manager has read: an answer to one of the others is no violation."""

from __future__ import annotations

from support.checker.streams import World


def test_an_answer_whose_registration_the_client_does_not_show_is_left_out_and_said() -> None:
    world = World()
    world.register("first")
    unseen = world.register("second")
    world.commit(world.allocation("first", "pending"), world.allocation("second", "pending"))
    del world.registrations.records[unseen]
    report = world.report()
    assert report.violations == ()
    (answers,) = [check for check in report.checks if check.name == "answers"]
    assert any("does not show" in why for why in answers.partial)
