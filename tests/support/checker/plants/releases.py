"""Plants in why devices were given back: deregistrations, deaths, leases, drivers."""

from __future__ import annotations

from typing import Any

from support.checker.plants import planted
from support.checker.streams import AT, HOST, World

ALONE = {"amounts": {"gpu": 1}, "owner": None, "lease_s": 30.0}


def _at(second: int) -> str:
    """So many seconds after all that has happened."""
    return AT.replace("12:00:00", f"{12 + second // 3600:02}:{second // 60 % 60:02}:{second % 60:02}")


def _held(world: World, **fields: Any) -> None:
    """`e`, whose registration was the last message, has a device."""
    world.commit(world.allocation("e", "allocated", devices=["GPU-7"], **fields))


@planted("releases")
def a_worker_is_deregistered_that_never_deregistered(world: World) -> None:
    world.commit(world.allocation("b", "ended", reason_code="deregistered"))


@planted("releases")
def a_worker_is_deregistered_by_the_deregistration_of_another_run(world: World) -> None:
    world.deregister("b", "2")
    world.commit(
        world.allocation("b", "ended", reason_code="deregistered"), world.allocation("b", "ended", incarnation="2")
    )


@planted("releases")
def an_older_run_is_deregistered_by_a_deregistration_that_names_no_run(world: World) -> None:
    """…while the newest one, which it means, lives on."""
    world.register("b", "2")
    world.commit(world.allocation("b", "allocated", incarnation="2", devices=["GPU-7"]), world.allocation("e", "ended"))
    world.say({"type": "deregister", "host": HOST, "worker": "b"})
    world.commit(world.allocation("b", "ended", reason_code="deregistered"))


@planted("releases")
def a_worker_is_ended_before_it_has_deregistered(world: World) -> None:
    world.commit(world.allocation("b", "ended", reason_code="deregistered"))
    world.deregister("b")
    world.commit()


@planted("releases", says="its owner died")
def an_owner_dies_that_was_never_named(world: World) -> None:
    _held(world, request=ALONE)
    world.commit(world.allocation("e", "ended"))


@planted("releases")
def a_superseded_worker_is_over_for_that_alone(world: World) -> None:
    world.commit(world.allocation("b", "ended", reason_code="superseded"))


@planted("releases", says="never took it back")
def a_driver_that_prepared_a_device_is_not_asked_to_take_it_back(world: World) -> None:
    _held(world, prepared=["gpu"])
    world.commit(world.allocation("e", "ended"))


@planted("releases", says="nobody looked for the processes")
def a_worker_whose_processes_may_still_run_is_over_at_once(world: World) -> None:
    request = ALONE | {"owner": {"pid": 1}, "survivors": {"uid": 1000}}
    _held(world, request=request)
    world.commit(world.allocation("e", "ended", request=request))


@planted("releases", says="after 619.99")
def a_lease_ends_before_its_time(world: World) -> None:
    _held(world, request=ALONE | {"lease_s": 700.0})
    world.commit(world.allocation("e", "ended", reason_code="lease-expired", since=_at(20)), at=_at(20))


@planted("releases", says="after 819.99")
def a_lease_ends_at_its_time_without_the_managers_grace(world: World) -> None:
    _held(world, request=ALONE | {"lease_s": 805.0})
    world.commit(
        world.allocation("e", "ended", reason_code="lease-expired", since=_at(220)), at=_at(220), lease_grace_s=60
    )


@planted("releases", says="waits 60 s more")
def a_manager_waits_half_of_its_grace(world: World) -> None:
    _held(world, request=ALONE | {"lease_s": 700.0})
    world.commit(
        world.allocation("e", "ended", reason_code="lease-expired", since=_at(130)), at=_at(130), lease_grace_s=60
    )


@planted("releases", says="it has none")
def a_lease_ends_that_there_is_not(world: World) -> None:
    _held(world, request=ALONE | {"lease_s": None})
    world.commit(world.allocation("e", "ended", reason_code="lease-expired"))


@planted("releases", says="long over")
def a_lease_never_ends(world: World) -> None:
    _held(world, request=ALONE)
    for minute in (0, 12, 24, 36):
        world.commit(at=_at(60 * minute))


@planted("answers", says="refused")
def a_deregistration_is_refused(world: World) -> None:
    world.refuse(world.deregister("b"))
    world.commit()
    assert f"{HOST}/b/1" in world.now
