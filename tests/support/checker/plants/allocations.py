"""Plants in what allocations say: devices, steps, tokens."""

from __future__ import annotations

from support.checker.plants import planted
from support.checker.streams import DEVICES, HOST, PARTITION, World

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


def _parted(world: World) -> None:
    """The host's record says that MIG-0 is a part of GPU-0, and MIG-9 of GPU-9."""
    parts = {"GPU-0": ["MIG-0"], "GPU-9": ["MIG-9"]}
    listed = [{"id": one} for one in ("MIG-0", "MIG-9")]
    gpus = [{"id": one} for one in (*DEVICES, "GPU-9")]
    world.inventory(
        {
            "gpu": {"state": "reported", "devices": gpus},
            "mig": {"state": "reported", "devices": listed, "parts": parts},
        }
    )


@planted("exclusivity")
def a_part_is_lent_beside_its_whole(world: World) -> None:
    uses = {"GPU-0": [1, 720720, "parts"]}
    world.commit(world.allocation("e", "allocated", devices=["MIG-0"], resource="mig", uses=uses))


@planted("exclusivity")
def a_part_is_lent_beside_its_whole_and_its_record_does_not_say_so(world: World) -> None:
    _parted(world)
    world.commit(world.allocation("e", "allocated", devices=["MIG-0"], resource="mig"))


@planted("exclusivity")
def a_whole_is_lent_beside_its_part(world: World) -> None:
    uses = {"GPU-9": [1, 720720, "parts"]}
    world.commit(world.allocation("e", "allocated", devices=["MIG-9"], resource="mig", uses=uses))
    world.commit(world.allocation("f", "allocated", devices=["GPU-9"]))


@planted("exclusivity")
def a_device_of_which_others_have_parts_is_shared(world: World) -> None:
    uses = {"GPU-9": [1, 720720, "parts"]}
    world.commit(world.allocation("e", "allocated", devices=["MIG-9"], resource="mig", uses=uses))
    world.commit(world.allocation("f", "allocated", devices=["GPU-9"], resource="mon", shared=["mon"]))


@planted("exclusivity")
def a_device_is_lent_once_more_than_it_has_replicas(world: World) -> None:
    for worker in "efg":
        uses = {"GPU-9": [360360, 720720, "replicas"]}
        world.commit(world.allocation(worker, "allocated", devices=["GPU-9"], uses=uses))


@planted("exclusivity")
def a_device_is_lent_alone_of_which_somebody_has_a_replica_under_another_name(world: World) -> None:
    world.host(gpu=[["GPU-9", "card9"]])
    uses = {"GPU-9": [360360, 720720, "replicas"]}
    world.commit(world.allocation("e", "allocated", devices=["GPU-9"], aliases={"GPU-9": ["card9"]}, uses=uses))
    world.commit(world.allocation("f", "allocated", devices=["card9"]))


@planted("writers", says="a manager that knows no parts of devices would work on this ledger")
def a_part_is_lent_and_earlier_managers_are_not_told(world: World) -> None:
    uses = {"GPU-9": [1, 720720, "parts"]}
    record = world.allocation("e", "allocated", devices=["MIG-9"], resource="mig", uses=uses)
    world.needs.clear()
    world.commit(record)


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
