"""Plants in what allocations say: devices, steps, tokens."""

from __future__ import annotations

from support.checker.plants import planted
from support.checker.streams import HOST, PARTITION, World

# --- exclusivity ---


@planted("exclusivity")
def a_device_is_granted_while_another_holds_it(world: World) -> None:
    world.commit(world.allocation("e", "allocated", devices=["GPU-0"]))


@planted("exclusivity")
def a_device_is_granted_under_an_alias_of_its_name(world: World) -> None:
    world.commit(world.allocation("e", "allocated", devices=["card0"], aliases={"card0": ["GPU-0"]}))


@planted("exclusivity")
def a_device_is_granted_as_another_resource(world: World) -> None:
    world.commit(world.allocation("e", "allocated", devices=["GPU-0"], resource="accelerator"))


@planted("exclusivity")
def a_device_is_granted_under_a_name_that_only_the_hosts_record_connects(world: World) -> None:
    world.host(fpga=[["GPU-0", "0000:01:00.0", "/dev/x0"]], gpu=None)
    world.commit(world.allocation("e", "allocated", devices=["/dev/x0"], resource="fpga"))


@planted("exclusivity")
def a_device_is_granted_under_a_name_that_two_resources_connect(world: World) -> None:
    world.host(fpga=[["0000:01:00.0", "/dev/x0"]], gpu=[["GPU-0", "0000:01:00.0"]])
    world.commit(world.allocation("e", "allocated", devices=["/dev/x0"], resource="fpga"))


@planted("exclusivity")
def a_device_that_somebody_has_alone_is_shared(world: World) -> None:
    world.commit(world.allocation("e", "allocated", devices=["GPU-0"], shared=["gpu"]))


@planted("exclusivity")
def a_grant_stands_before_the_release_in_one_transaction(world: World) -> None:
    world.commit(world.allocation("b", "ended"), world.allocation("e", "allocated", devices=["GPU-0"]))
    records = world.allocations.records
    last, grant = records[-2], records[-3]
    records[-2], records[-3] = grant._replace(offset=last.offset), last._replace(offset=grant.offset)


@planted("exclusivity")
def a_device_of_a_releasing_allocation_is_granted(world: World) -> None:
    world.commit(world.allocation("b", "releasing", outcome="ended"))
    world.commit(world.allocation("e", "allocated", devices=["GPU-0"]))


# --- steps ---


@planted("steps")
def what_failed_is_granted_after_all(world: World) -> None:
    world.commit(world.allocation("c", "allocated", devices=["GPU-9"]))


@planted("steps")
def what_failed_ends_once_more(world: World) -> None:
    world.commit(world.allocation("c", "ended"))


@planted("steps")
def what_is_over_is_over_for_another_reason(world: World) -> None:
    world.commit(world.allocation("c", "failed", reason="because"))


@planted("steps")
def what_is_allocated_waits_again(world: World) -> None:
    world.commit(world.allocation("b", "pending"))


@planted("steps")
def a_releasing_allocation_ends_otherwise_than_it_said(world: World) -> None:
    world.commit(world.allocation("b", "releasing", outcome="ended"))
    world.commit(world.allocation("b", "failed"))


@planted("steps")
def a_live_record_is_deleted(world: World) -> None:
    world.commit(f"{HOST}/b/1")


@planted("steps")
def a_deleted_record_comes_back_for_the_same_registration(world: World) -> None:
    world.commit(world.allocation("a", "allocated", devices=["GPU-9"]))


@planted("steps")
def a_record_answers_another_registration_than_before(world: World) -> None:
    world.register("b")
    source = {"partition": PARTITION, "offset": world.registrations.end - 1}
    world.commit(world.allocation("b", "allocated", source=source), world.allocation("e", "pending"))


@planted("steps")
def what_ended_before_it_registered_changes(world: World) -> None:
    world.deregister("f")
    world.commit(world.allocation("f", "ended"), world.allocation("e", "pending"))
    world.commit(world.allocation("f", "ended", reason="another"))


# --- tokens ---


@planted("tokens")
def a_token_is_given_twice(world: World) -> None:
    world.token -= 1
    world.commit(world.allocation("e", "allocated", devices=["GPU-5"]))


@planted("tokens", says="was granted before")
def a_token_is_lower_than_the_last_one(world: World) -> None:
    world.token += 5
    world.commit()
    record = world.allocation("e", "allocated", devices=["GPU-5"])
    world.commit(record | {"token": record["token"] - 3})


@planted("tokens")
def two_grants_of_one_commit_have_one_token(world: World) -> None:
    world.register("f")
    grants = [
        world.allocation("e", "allocated", devices=["GPU-5"]),
        world.allocation("f", "allocated", devices=["GPU-6"]),
    ]
    grants[1]["token"] = grants[0]["token"]
    world.commit(*grants)


@planted("tokens")
def a_grant_has_no_token(world: World) -> None:
    world.commit(world.allocation("e", "allocated", devices=["GPU-5"], token=None))


@planted("tokens")
def a_grants_token_changes(world: World) -> None:
    world.token += 1
    world.commit(world.allocation("b", "allocated", token=world.token))


@planted("tokens")
def a_token_is_ahead_of_its_checkpoint(world: World) -> None:
    world.commit(world.allocation("e", "allocated", devices=["GPU-5"]), token=world.token)
    world.allocations.change(-1, token=world.token - 1)


@planted("tokens")
def the_token_counter_goes_back(world: World) -> None:
    world.commit(token=world.token - 1)
