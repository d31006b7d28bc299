"""What needs a person: each kind of trouble is said once, with what it means and what to do."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from msgspec import structs

from outfitter_proto.records import Host, ResourceInventory
from outfitter_service.api import troubles
from outfitter_service.api.items import Trouble
from outfitter_service.api.model.fleet import Fleet
from outfitter_service.api.routes import _host
from outfitter_service.core.reasons import HEALING
from outfitter_service.core.state.lending import HELD_BACK
from support.api import allocation, change, checkpoint, cordon, fleet_of, follower_of, message, serving_api
from support.console import fleets
from support.documents import ROOT

MINUTE = timedelta(minutes=1)
RULES = (ROOT / "deploy/prometheus/rules.yml").read_text()


def well(name: str = "h") -> Host:
    return fleets.host(name, ["healthy"])


def failing(state: str) -> Host:
    record: Host = fleets.host("h", ["healthy"], fpga=ResourceInventory(state=state, reason="no smi"))
    return record


def started(minutes: float) -> Host:
    """A host whose manager has run for so long."""
    record = well()
    return structs.replace(record, manager=structs.replace(record.manager, since=datetime.now(UTC) - minutes * MINUTE))


def waiter(worker: str, minutes: float, code: str, reason: str) -> Any:
    return fleets.waiter("h", worker, 1, minutes, reason_code=code, reason=reason)


def failed(worker: str, minutes: float = 1) -> Any:
    record = structs.replace(allocation("h", worker, "failed"), reason="prepare failed.")
    return structs.replace(record, since=datetime.now(UTC) - minutes * MINUTE)


STOPPED = datetime.now(UTC) - 3 * MINUTE
IN_VAIN = f"8 gpu requested, 6 of 8 healthy; {HEALING}"
HELD = fleets.holder("h", 0, worker="w")


def cases() -> dict[str, tuple[list[Any], dict[str, Any], str, str, str]]:
    """By kind: records of now, what the trouble names, its title, its text and its remedy."""
    return {
        "lent-twice": (
            [well(), HELD, fleets.holder("h", 0, worker="v")],
            {"host": "h", "device": "GPU-h-0"},
            "1 device is lent twice",
            "w and v have GPU-h-0 on h.",
            "Stop one of them, keep the topics, and report what `outfitter verify` says.",
        ),
        "no-manager": (
            [fleets.host("h", ["healthy"], stopped=STOPPED), HELD, waiter("late", 1, "busy", "busy")],
            {"host": "h", "since": STOPPED},
            "h has no manager",
            "1 worker there keeps devices, and 1 worker waits.",
            "Nobody answers before `outfitter serve` runs again.",
        ),
        "driver-failed": (
            [failing("driver-failed")],
            {"host": "h"},
            "The driver of fpga fails on h",
            "Nobody gets any fpga there: no smi.",
            "The manager tries again by itself. `outfitter doctor` on the host says what it lacks.",
        ),
        "misconfigured": (
            [failing("misconfigured")],
            {"host": "h"},
            "fpga is misconfigured on h",
            "Nobody gets any fpga there: no smi.",
            "Correct the host's configuration: `outfitter config check` says where.",
        ),
        "no-driver": (
            [failing("no-driver")],
            {"host": "h"},
            "fpga has no driver on h",
            "Nobody gets any fpga there: no smi.",
            "Name its driver in the host's configuration.",
        ),
        "unhealthy": (
            [fleets.host("h", ["unhealthy"], reason="XID 79"), HELD],
            {"host": "h"},
            "1 device on h is unhealthy",
            "GPU-h-0 on h: XID 79. Worker w still holds it.",
            "Look at it, or replace it: drivers/health.md says what makes a device ill.",
        ),
        "waits-for-healing": (
            [well(), waiter("w", 5, "infeasible", IN_VAIN)],
            {"host": "h", "worker": "w"},
            "1 worker wants devices that are ill",
            f"w on h: {IN_VAIN}.",
            "Mend or replace the ill ones.",
        ),
        "infeasible": (
            [well(), waiter("w", 5, "infeasible", "only 1 there")],
            {"host": "h", "worker": "w"},
            "1 worker wants more than the host has",
            "w on h: only 1 there.",
            "That never comes by waiting: register with less, or add devices.",
        ),
        "not-reported": (
            [
                started(60),
                waiter("w", 10.1, "not-reported", "gpu has not reported yet"),
                waiter("x", 9, "not-reported", "gpu has not reported yet"),
            ],
            {"host": "h", "worker": "w"},
            "1 worker waits for a driver's answer",
            "w on h: gpu has not reported yet.",
            "`outfitter doctor` on the host says what the driver lacks.",
        ),
        "beside-free": (
            [
                well(),
                waiter("w", 15.1, "busy", "waits for 1 gpu"),
                waiter("v", 15, "placement-not-found", "no choice of 2 gpu was found"),
                waiter("x", 14, "busy", "waits for 1 gpu"),
            ],
            {"host": "h", "worker": "w"},
            "2 workers wait although devices are free",
            "w on h: waits for 1 gpu.",
            "A large request may keep them for itself: `outfitter explain` says more.",
        ),
        "still-used": (
            [well(), structs.replace(HELD, state="releasing", delayed_by="in use by 42")],
            {"host": "h", "device": "GPU-h-0"},
            "1 device is still in use after release",
            "GPU-h-0 of w on h: in use by 42.",
            "It is lent again when nobody uses it.",
        ),
        "used-by-stranger": (
            [fleets.host("h", ["healthy"], used_by="process 4711 (python) of ada")],
            {"host": "h"},
            "1 device on h is used by strangers",
            "GPU-h-0 on h: process 4711 (python) of ada, which Outfitter did not lend to.",
            "End that process, or have its user register for the device.",
        ),
        "held-back": (
            [fleets.host("h", ["unknown"], reason=f"{HELD_BACK}h/w/1 holds 0 of gpu")],
            {"host": "h"},
            "1 device on h is held back",
            "GPU-h-0 on h: held back: h/w/1 holds 0 of gpu.",
            "End that worker, or let the driver report the old id as an alias.",
        ),
        "unknown": (
            [fleets.host("h", ["unknown", "unknown"])],
            {"host": "h"},
            "The health of 2 devices on h is unknown",
            "GPU-h-0 on h: no reason is given.",
            "Nobody gets it before it is known to be well: drivers/health.md says when that is.",
        ),
        "orders-unread": (
            [
                well(),
                structs.replace(checkpoint("host/h"), orders_unread="topic 'outfitter.control' is not on the bus"),
            ],
            {"host": "h"},
            "Operators' orders are not read on h",
            "topic 'outfitter.control' is not on the bus. What is cordoned stays so.",
            "`outfitter topics check` says what is missing.",
        ),
        "failed": (
            [well(), failed("w"), failed("x", 3)],
            {"host": "h", "worker": "w"},
            "2 workers failed in the last hour",
            "The last was w on h: prepare failed.",
            "`outfitter history` says what led to it.",
        ),
    }


def found_in(fleet: Fleet, *, outage: str | None = None, host: str | None = None, **said: Any) -> list[Trouble]:
    """The list. `said`: what is known of all managers."""
    hosts = [structs.replace(_host(fleet, name), **said) for name in fleet.hosts if host in {None, name}]
    placed = troubles.troubles_of(fleet, hosts, host=host, outage=outage, now=datetime.now(UTC))
    assert [place for place, _ in placed] == sorted({place for place, _ in placed}), "each place is another"
    return [trouble for _, trouble in placed]


@pytest.mark.parametrize("kind", cases())
def test_each_trouble_is_said_with_what_it_means_what_to_do_and_where_to_look(kind: str) -> None:
    records, places, title, text, remedy = cases()[kind]
    (found,) = found_in(fleet_of(*records))
    assert (found.kind, found.title, found.text, found.remedy) == (kind, title, text, remedy)
    told = {name: getattr(found, name) for name in ("host", "device", "worker") if getattr(found, name) is not None}
    assert told.items() <= places.items()
    assert places.items() <= {"since": found.since, **told}.items()


def test_a_manager_that_was_killed_and_one_that_is_not_heard_are_different_troubles() -> None:
    dead: dict[str, Any] = {"life": "dead", "managed": False, "missed": True, "life_at": STOPPED}
    fleet = fleet_of(well("a"), well("b"), well("c"), well("d"), fleets.holder("a", 0))
    (killed,) = found_in(fleet, **dead, unanswered=1)
    assert (killed.kind, killed.since) == ("killed", STOPPED)
    assert killed.title == "The manager of 4 hosts was killed, or hangs"
    assert killed.text == "1 worker there keeps devices, and 4 messages lie unanswered."
    assert killed.remedy == "Nobody answers before `outfitter serve` runs again: a, b, c and 1 more."
    (silent,) = found_in(fleet_of(well()), **dead, process=77)
    assert (silent.kind, silent.title) == ("not-heard", "The manager of h lives, but was not heard")
    assert silent.remedy == (
        "Nobody answers before it writes again. See its log, and whether it is stopped or on another bus: "
        "process 77 for h."
    )
    (foreign,) = found_in(fleet_of(well()), **dead, process=0)
    assert foreign.remedy.endswith("on another bus: h.")


def test_a_manager_that_stopped_in_order_is_missed_once_somebody_waits_for_it() -> None:
    stopped = fleets.host("h", ["healthy"], stopped=STOPPED)
    assert found_in(fleet_of(stopped, HELD)) == []
    fleet = fleet_of(stopped)
    fleet.unanswered = {"h": 2}
    (missed,) = found_in(fleet)
    assert (missed.kind, missed.text) == ("no-manager", "2 messages lie unanswered.")


@pytest.mark.parametrize("life", ["stopped", "dead"])
def test_a_host_that_is_taken_out_as_a_whole_is_no_trouble_without_its_manager(life: str) -> None:
    host = fleets.host("h", ["healthy"], stopped=STOPPED if life == "stopped" else None)
    records = [host, HELD, waiter("late", 60, "cordoned", "waits for 1 gpu")]
    said: dict[str, Any] = {"life": life, "managed": False}
    assert found_in(fleet_of(*records, cordon("h")), **said, planned=True, missed=False) == []
    assert len(found_in(fleet_of(*records), **said, missed=True)) == 1


@pytest.mark.parametrize("order", [{}, {"resource": "gpu"}, {"device": "GPU-h-0"}], ids=str)
@pytest.mark.parametrize(
    ("health", "reason"), [("unhealthy", "XID 79"), ("unknown", ""), ("unknown", f"{HELD_BACK}h/w/1 holds 0 of gpu")]
)
def test_a_device_that_is_taken_out_needs_nobody_though_it_is_ill(
    order: dict[str, str], health: str, reason: str
) -> None:
    waits = waiter("w", 60, "cordoned", "1 gpu requested; cordoned: XID 79 (ada@ops-1, order k3v9-01)")
    ill = [fleets.host("h", [health], reason=reason), waits]
    assert found_in(fleet_of(*ill, cordon("h", **order))) == []
    assert len(found_in(fleet_of(*ill, cordon("h", device="another")))) == 1


def test_who_waits_for_ill_devices_of_which_operators_have_taken_out_all_needs_nobody() -> None:
    waits = waiter("w", 60, "infeasible", IN_VAIN)
    records = [fleets.host("h", ["unhealthy", "unhealthy", "healthy"]), waits, cordon("h", device="GPU-h-0")]
    assert [each.kind for each in found_in(fleet_of(*records))] == ["unhealthy", "waits-for-healing"]
    assert found_in(fleet_of(*records, cordon("h", "o-2", device="GPU-h-1"))) == []


def test_while_the_bus_is_away_that_is_urgent() -> None:
    (away,) = found_in(fleet_of(), outage="no broker answers")
    assert (away.kind, away.urgent, away.title) == ("bus-away", True, "The bus cannot be read")
    assert away.text == "no broker answers. Workers keep what they have."


def test_refused_messages_are_counted_for_an_hour_with_the_last_reason() -> None:
    fleet = fleet_of(well("a"), well("b"))
    for offset, (host, ago) in enumerate([("a", 61), ("a", 2), ("b", 1)]):
        letter = structs.replace(fleets.letter(host, f"reason {offset}"), at=datetime.now(UTC) - ago * MINUTE)
        fleet.add_letter(message(letter, key=letter.key, partition=0, offset=offset), letter, announce=False)
    (refused,) = found_in(fleet)
    assert (refused.title, refused.text) == ("2 messages were refused in the last hour", "The last: reason 2.")
    (of_a,) = found_in(fleet, host="a")
    assert (of_a.title, of_a.text) == ("1 message was refused in the last hour", "The last: reason 1.")
    many = structs.replace(fleets.letter("a", "many"), at=datetime.now(UTC), count=600)
    fleet.add_letter(message(many, key=many.key, partition=0, offset=9), many, announce=False)
    assert found_in(fleet)[0].title == "602 messages were refused in the last hour"


def test_what_is_over_an_hour_old_is_no_trouble() -> None:
    assert found_in(fleet_of(well(), failed("w", 61))) == []


def test_who_may_share_a_device_or_has_it_under_two_names_is_no_trouble() -> None:
    sharers = [fleets.holder("h", 0, worker=worker, shared=["gpu"]) for worker in "ab"]
    assert found_in(fleet_of(well(), *sharers)) == []
    both = structs.replace(HELD, resources={"gpu": [{"id": "GPU-h-0"}], "cuda": [{"id": "0"}]})
    (gpu,) = well().resources["gpu"].devices
    cuda = ResourceInventory(state="reported", devices=[structs.replace(gpu, id="0")], names=[["0", "GPU-h-0"]])
    assert found_in(fleet_of(fleets.host("h", ["healthy"], cuda=cuda), both)) == []


def test_a_driver_has_time_to_answer_from_the_start_of_its_manager_on() -> None:
    late = waiter("w", 60, "not-reported", "not reported yet")
    assert found_in(fleet_of(started(9), late)) == []


def test_of_a_host_without_a_manager_only_that_is_said() -> None:
    ill = fleets.host("h", ["unhealthy"], stopped=STOPPED, fpga=ResourceInventory(state="driver-failed"))
    late = waiter("w", 60, "not-reported", "not reported yet")
    assert [each.kind for each in found_in(fleet_of(ill, late))] == ["no-manager"]


def test_all_that_have_one_cause_are_one_trouble_and_the_urgent_ones_come_first() -> None:
    records = [fleets.host(name, ["unhealthy"] * 2, fpga=ResourceInventory(state="no-driver")) for name in "abcd"]
    missed = fleets.host("z", ["healthy"], stopped=STOPPED)
    found = found_in(fleet_of(*records, missed, fleets.waiter("z", "w", 1, 1)))
    assert [each.kind for each in found] == ["no-manager", "no-driver", "unhealthy"]
    assert [each.title for each in found[1:]] == ["fpga has no driver on 4 hosts", "8 devices on 4 hosts are unhealthy"]


@pytest.mark.parametrize("kind", [kind for kind in troubles.KINDS if kind.alert], ids=lambda kind: kind.code)
def test_a_trouble_is_as_urgent_as_its_alert_is_severe_and_waits_as_long(kind: troubles.TroubleKind) -> None:
    rule = RULES.partition(f"alert: {kind.alert}\n")[2].partition("- alert:")[0]
    assert ("severity: critical" in rule) == kind.urgent
    (minutes,) = re.findall(r"\bfor: (\d+)m\n", rule)
    assert kind.after in {timedelta(), int(minutes) * MINUTE}


def test_the_urgent_kinds_come_first_and_each_has_a_code_of_its_own() -> None:
    assert len({kind.code for kind in troubles.KINDS}) == len(troubles.KINDS)
    urgent = [kind.urgent for kind in troubles.KINDS]
    assert urgent == sorted(urgent, reverse=True)


def test_the_apis_page_names_the_kinds_in_their_order() -> None:
    text = (ROOT / "service/api.md").read_text().partition("The kinds, in the list's order: ")[2].partition("The first")
    assert re.findall(r"`([a-z-]+)`", text[0]) == [kind.code for kind in troubles.KINDS]


async def test_the_page_has_all_troubles_in_pages_and_of_one_host_and_follows_what_happens() -> None:
    fleet = fleet_of(fleets.host("a", ["unhealthy"], fpga=ResourceInventory(state="no-driver")), well("b"))
    follower = follower_of(fleet)

    async def read(**query: Any) -> Any:
        async with client.get("/api/v1/troubles", params=query) as response:
            assert response.status == 200
            return await response.json()

    async with serving_api(follower) as client:
        first = await read(limit=1)
        rest = await read(limit=1, cursor=first["next"])
        assert [page["items"][0]["kind"] for page in (first, rest)] == ["no-driver", "unhealthy"]
        assert rest["next"] is None
        assert (await read(host="b"))["items"] == []
        fleet.change(change(fleets.host("b", ["unhealthy"])))
        assert len((await read(host="b"))["items"]) == 1
        follower.outage = "no broker"
        assert [each["kind"] for each in (await read())["items"]] == ["bus-away", "no-driver", "unhealthy"]
        msgspec.convert((await read())["items"], list[Trouble], strict=True)


async def test_a_reader_with_the_newest_troubles_is_told_so_and_others_get_them() -> None:
    fleet = fleet_of(fleets.host("a", ["unhealthy"]))
    async with serving_api(follower_of(fleet)) as client:
        async with client.get("/api/v1/troubles") as response:
            tag, body = response.headers["ETag"], await response.read()
        async with client.get("/api/v1/troubles", headers={"If-None-Match": tag}) as response:
            assert response.status == 304
        fleet.change(change(fleets.host("a", ["healthy"])))
        async with client.get("/api/v1/troubles", headers={"If-None-Match": tag}) as response:
            assert json.loads(await response.read()) != json.loads(body)
