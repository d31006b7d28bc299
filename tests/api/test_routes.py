"""The lists of the API: what they have, how they are narrowed and paged, and how errors look."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from msgspec import structs

from outfitter_proto.bus import Message
from outfitter_proto.codec import encode
from outfitter_proto.records import Allocation, DeadLetter, InventoryDevice, MessageSource, Transition
from outfitter_service.api import openapi
from outfitter_service.api.model.fleet import Fleet
from outfitter_service.api.routes import ROUTES
from outfitter_service.query import device_lines, held_devices, ledger_view
from support.api import (
    NOW,
    allocation,
    change,
    checkpoint,
    cordon,
    deletion,
    fleet_of,
    follower_of,
    host_record,
    message,
    resource_of,
    serving_api,
)


def crowd() -> Fleet:
    """Two hosts: on `a` one worker holds and two wait; `b` has stopped."""
    return fleet_of(
        host_record("a", ill=1),
        host_record("b", stopped=True),
        checkpoint("host/a"),
        allocation("a", "holder", devices=["a-1"], offset=1),
        allocation("a", "early", "pending", queue_position=1, reason="1 of gpu wanted", reason_code="busy", offset=2),
        allocation("a", "late", "pending", queue_position=2, reason="1 of gpu wanted", reason_code="busy", offset=3),
        allocation("b", "over", "ended", offset=1),
        cordon("b", device="b-1"),
    )


async def get(fleet: Fleet | None, path: str, status: int = 200, **query: Any) -> Any:
    async with serving_api(follower_of(fleet)) as client:
        async with client.get(f"/api/v1/{path}", params=query) as response:
            assert response.status == status, await response.text()
            return await response.json(content_type=None)


@pytest.mark.parametrize(
    ("path", "query", "field", "found"),
    [
        ("hosts", {}, "host", ["a", "b"]),
        ("hosts", {"managed": "true"}, "host", ["a"]),
        ("hosts", {"managed": "false"}, "host", ["b"]),
        ("hosts", {"planned": "true"}, "host", []),
        ("hosts", {"planned": "false"}, "host", ["a", "b"]),
        ("devices", {}, "id", ["a-0", "a-1", "b-0", "b-1"]),
        ("devices", {"host": "b"}, "id", ["b-0", "b-1"]),
        ("devices", {"health": "unhealthy"}, "id", ["a-0"]),
        ("devices", {"held": "true"}, "id", ["a-1"]),
        ("devices", {"resource": "fpga"}, "id", []),
        ("devices", {"free": "true"}, "id", []),
        ("devices", {"cordoned": "true"}, "id", ["b-1"]),
        ("devices", {"cordoned": "false"}, "id", ["a-0", "a-1", "b-0"]),
        ("devices", {"free": "false"}, "id", ["a-0", "a-1", "b-0", "b-1"]),
        ("resources", {}, "resource", ["gpu"]),
        ("resources", {"host": "b", "resource": "gpu"}, "resource", ["gpu"]),
        ("resources", {"resource": "fpga"}, "resource", []),
        ("workers", {}, "worker", ["early", "holder", "late", "over"]),
        ("workers", {"state": "pending"}, "worker", ["early", "late"]),
        ("workers", {"worker": "over"}, "worker", ["over"]),
        ("workers", {"host": "a", "resource": "gpu"}, "worker", ["early", "holder", "late"]),
        ("allocations", {"state": "allocated"}, "worker", ["holder"]),
        ("allocations", {"incarnation": "run-2"}, "worker", []),
        ("queue", {}, "worker", ["early", "late"]),
        ("queue", {"reason_code": "infeasible"}, "worker", []),
        ("workers/late/explanations", {}, "worker", ["late"]),
        ("writers", {}, "writer", ["host/a"]),
    ],
)  # fmt: skip
async def test_a_list_has_what_its_filters_let_through(
    path: str, query: dict[str, str], field: str, found: list[str]
) -> None:
    assert [item[field] for item in (await get(crowd(), path, **query))["items"]] == found


async def test_an_allocation_is_sent_byte_for_byte_as_it_is_on_the_bus() -> None:
    record = allocation("a", "holder", devices=["a-1"], offset=1)
    async with serving_api(follower_of(crowd())) as client:
        async with client.get("/api/v1/allocations/a/holder/run-1") as response:
            assert await response.read() == encode(record)


async def test_a_page_is_json_in_utf_8_whatever_the_unknown_fields_of_a_record_are() -> None:
    spoilt = structs.replace(message(allocation("a", "w")), value=encode(allocation("a", "w"))[:-1] + b',"x":"\xff"}')
    fleet = fleet_of(allocation("b", "w"))
    fleet.restore([ledger_view.decode(spoilt)])
    assert [item["worker"] for item in (await get(fleet, "allocations"))["items"]] == ["w", "w"]
    assert (await get(fleet, "allocations/a/w/run-1"))["x"] == "\ufffd"


async def test_the_queue_says_who_is_next_and_why_nobody_is_served() -> None:
    first = (await get(crowd(), "queue"))["items"][0]
    assert (first["queue_position"], first["reason_code"], first["reason"]) == (1, "busy", "1 of gpu wanted")


async def test_an_explanation_has_who_is_ahead_and_who_holds_the_devices() -> None:
    (found,) = (await get(crowd(), "workers/late/explanations"))["items"]
    assert [each["worker"] for each in found["ahead"]] == ["early"]
    assert [[holder["worker"] for holder in line["holders"]] for line in found["devices"]] == [[], ["holder"]]


async def test_pages_follow_each_other_though_items_come_and_go_between_them() -> None:
    fleet = fleet_of(*(allocation("a", f"w{number}") for number in range(5)))
    async with serving_api(follower_of(fleet)) as client:
        seen: list[str] = []
        cursor = ""
        while True:
            async with client.get("/api/v1/allocations", params={"limit": 2, "cursor": cursor}) as response:
                page = await response.json()
            seen += [item["worker"] for item in page["items"]]
            if page["next"] is None:
                break
            cursor = page["next"]
            fleet.change(change(None, key=f"a/{seen[-1]}/run-1"))  # the item that the cursor names is gone
            fleet.change(change(allocation("a", "w00")))
    assert seen == ["w0", "w1", "w2", "w3", "w4"]


@pytest.mark.parametrize("path", ["hosts", "devices", "workers", "allocations", "queue", "history", "dead-letters"])
async def test_every_list_in_pages_of_one_has_each_item_once(path: str) -> None:
    fleet = crowd()
    for number in range(3):
        add_step(fleet, f"w{number}", offset=number)
        add_letter(fleet, "a", offset=number)
    async with serving_api(follower_of(fleet)) as client:

        async def pages(limit: int) -> list[Any]:
            found: list[Any] = []
            cursor = ""
            while True:
                query = {"limit": limit, "cursor": cursor}
                async with client.get(f"/api/v1/{path}", params=query) as response:
                    page = await response.json()
                found += page["items"]
                if page["next"] is None:
                    return found
                cursor = page["next"]

        assert await pages(1) == await pages(1000) != []


def add_step(fleet: Fleet, worker: str, offset: int) -> None:
    step = Transition(
        at=NOW, host="a", worker=worker, incarnation="i", event="register", to="allocated", explanation="granted",
        record=allocation("a", worker, devices=["a-1"]),
    )  # fmt: skip
    fleet.add_step(message(step, key=f"a/{worker}/i", offset=offset), step, announce=True)


def add_letter(fleet: Fleet, host: str, offset: int) -> None:
    letter = DeadLetter(
        at=NOW, writer="host/a", source=MessageSource(topic="t", partition=0, offset=offset), reason="bad", length=1,
        sha256="0", body=b"\xff", message_key=host,
    )  # fmt: skip
    fleet.add_letter(Message("t", 0, offset, None, encode(letter), 0), letter, announce=True)


async def test_pages_of_the_queue_keep_its_order_whatever_the_priorities() -> None:
    served = [10**12, 10, 9, 0, -1, -10]
    fleet = fleet_of(
        *(allocation("a", f"w{number}", "pending", priority=priority) for number, priority in enumerate(served))
    )
    seen: list[int] = []
    cursor: str | None = ""
    while cursor is not None:
        page = await get(fleet, "queue", limit=1, cursor=cursor)
        seen += [item["priority"] for item in page["items"]]
        cursor = page["next"]
    assert seen == served


async def test_history_has_the_last_step_first_and_is_narrowed_by_any_name_of_a_device() -> None:
    fleet = crowd()
    add_step(fleet, "one", offset=1)
    add_step(fleet, "two", offset=2)
    found = await get(fleet, "history", device="a-1")
    assert [item["record"]["worker"] for item in found["items"]] == ["two", "one"]
    assert (await get(fleet, "history", device="a-0"))["items"] == []
    assert (await get(fleet, "history", since="2026-01-31T12:00:01Z"))["items"] == []


async def test_a_dead_letter_that_is_no_text_is_sent_as_base64() -> None:
    fleet = crowd()
    add_letter(fleet, "a", offset=1)
    (found,) = (await get(fleet, "dead-letters", host="a"))["items"]
    assert (found["text"], found["base64"]) == (None, "/w==")
    assert (await get(fleet, "dead-letters", host="b"))["items"] == []


async def test_a_topic_that_cannot_be_read_is_a_503_with_the_reason_and_the_others_answer() -> None:
    fleet = crowd()
    fleet.steps.unavailable = "no right to read"
    assert (await get(fleet, "history", 503))["detail"] == "no right to read"
    assert (await get(fleet, "status"))["history"] == "no right to read"
    assert (await get(fleet, "hosts"))["items"]


async def test_before_the_topics_are_read_each_page_is_a_503_that_says_how_far_it_is() -> None:
    async with serving_api(follower_of(None, "restoring: 3 of 7")) as client:
        async with client.get("/api/v1/hosts") as response:
            assert (response.status, response.content_type) == (503, "application/problem+json")
            assert response.headers["Retry-After"] == "5"
            assert (await response.json(content_type=None))["detail"] == "restoring: 3 of 7"
        async with client.get("/api/v1/status") as response:
            body = await response.json()
            assert (body["ready"], body["condition"]) == (False, "restoring: 3 of 7")
        async with client.get("/readyz") as response:
            assert (response.status, await response.text()) == (503, "not ready: restoring: 3 of 7\n")
        async with client.get("/livez") as response:
            assert response.status == 200


async def test_a_page_that_has_not_changed_is_not_sent_again() -> None:
    fleet = crowd()
    async with serving_api(follower_of(fleet)) as client:
        async with client.get("/api/v1/hosts") as response:
            tag = response.headers["ETag"]
        for known in (tag, f'"x", W/{tag}', "*"):
            async with client.get("/api/v1/hosts", headers={"If-None-Match": known}) as response:
                assert (response.status, await response.read(), response.headers["ETag"]) == (304, b"", tag)
        fleet.change(change(host_record("c")))
        async with client.get("/api/v1/hosts", headers={"If-None-Match": tag}) as response:
            assert response.status == 200
            assert response.headers["Outfitter-Event-Id"] == fleet.events.last_id
            assert response.headers["Outfitter-As-Of"] == "2026-01-31T12:00:00.000000Z"


@pytest.mark.parametrize(
    ("path", "query", "status", "detail"),
    [
        ("nope", {}, 404, "there is no such page; /api/v1/openapi.json lists all"),
        ("hosts/x", {}, 404, "there is no record of host 'x'"),
        ("allocations/a/b/c", {}, 404, "there is no allocation 'a/b/c'"),
        ("workers/x/explanations", {}, 404, "there is no such worker 'x'"),
        ("hosts", {"limit": "0"}, 400, "Expected `int` >= 1 - at `$.limit`"),
        ("hosts", {"limit": "1001"}, 400, "Expected `int` <= 1000 - at `$.limit`"),
        ("hosts", {"nope": "1"}, 400, "unknown field `nope`"),
        ("workers", {"state": "late"}, 400, "Invalid enum value 'late' - at `$.state`"),
        ("history", {"since": "0.5"}, 400, "the parameter since is no time"),
        ("history", {"since": "2026-01-31T12:00:00"}, 400, "with a timezone"),
        ("hosts", [("limit", "1"), ("limit", "2")], 400, "the parameter limit is given twice"),
        ("workers", {"limit": "1e3"}, 400, "the parameter limit is no whole number"),
        ("workers", {"limit": "+5"}, 400, "the parameter limit is no whole number"),
        ("workers", {"limit": "5.0"}, 400, "the parameter limit is no whole number"),
        ("openapi.json", {"x": "1"}, 400, "unknown field `x`"),
    ],
)  # fmt: skip
async def test_an_error_is_a_problem_that_says_what_is_wrong(path: str, query: Any, status: int, detail: str) -> None:
    async with serving_api(follower_of(crowd())) as client:
        async with client.get(f"/api/v1/{path}", params=query) as response:
            assert (response.status, response.content_type) == (status, "application/problem+json")
            problem = await response.json(content_type=None)
            assert problem["status"] == status
            assert detail in problem["detail"]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
async def test_nothing_can_be_changed(method: str) -> None:
    async with serving_api(follower_of(crowd())) as client:
        async with client.request(method, "/api/v1/hosts") as response:
            assert (response.status, response.content_type) == (405, "application/problem+json")
            assert response.headers["Allow"] == "GET,HEAD"


async def test_no_other_page_of_a_browser_may_read_an_answer() -> None:
    async with serving_api(follower_of(crowd())) as client:
        async with client.get("/api/v1/hosts", headers={"Origin": "https://evil.example"}) as response:
            assert not [name for name in response.headers if name.lower().startswith("access-control")]


def shared_by_many(workers: int, devices: int) -> Fleet:
    """A host with shared devices, each of which all workers hold."""
    ids = [f"a-{number}" for number in range(devices)]
    host = host_record("a", gpus=devices)
    inventory: Any = structs.replace(host.resources["gpu"], sharing="shared")
    sharers = (allocation("a", f"w{number}", devices=ids, shared=["gpu"], offset=number) for number in range(workers))
    return fleet_of(structs.replace(host, resources={"gpu": inventory}), *sharers)


async def test_a_device_with_many_holders_costs_what_it_shows_and_a_change_what_its_worker_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet, shown, put = shared_by_many(workers=60, devices=30), list[Any](), list[Any]()
    show, put_holder = device_lines._holder, held_devices.HeldDevice.put
    monkeypatch.setattr(device_lines, "_holder", lambda record, **how: (shown.append(record), show(record, **how))[1])
    monkeypatch.setattr(held_devices.HeldDevice, "put", lambda *args: (put.append(args), put_holder(*args))[1])
    found = await get(fleet, "devices", limit=1)
    assert [(len(line["holders"]), line["holder_count"]) for line in found["items"]] == [(20, 60)]
    assert len(shown) == 20
    fleet.change(change(allocation("a", "w7", "ended")))
    fleet.change(change(allocation("a", "w8", devices=["a-1", "a-2"], shared=["gpu"])))
    assert len(put) == 2
    found = await get(fleet, "devices")
    assert [line["holder_count"] for line in found["items"]] == [
        59 if line["id"] in ("a-1", "a-2") else 58 for line in found["items"]
    ]


@pytest.mark.parametrize("path", ["workers", "allocations", "queue"])
async def test_a_page_ends_at_about_a_megabyte_and_the_next_one_goes_on(path: str) -> None:
    state, reason = ("pending" if path == "queue" else "allocated"), "x" * 100_000
    fleet = fleet_of(*(allocation("a", f"w{number:02}", state, offset=number, reason=reason) for number in range(25)))
    seen, pages, cursor = list[str](), 0, ""
    async with serving_api(follower_of(fleet)) as client:
        while cursor is not None:
            async with client.get(f"/api/v1/{path}", params={"limit": 1000, "cursor": cursor}) as response:
                body = await response.read()
            assert len(body) < 1_300_000
            page = json.loads(body)
            seen += [item["worker"] for item in page["items"]]
            pages, cursor = pages + 1, page["next"]
    assert seen == [f"w{number:02}" for number in range(25)]
    assert pages == 3


async def test_each_list_of_workers_is_narrowed_by_labels() -> None:
    def labelled(worker: str, state: str, offset: int, **labels: str) -> Allocation:
        record = allocation("a", worker, state, devices=["a-0"] if state == "allocated" else [], offset=offset)
        return structs.replace(record, request=structs.replace(record.request, labels=labels))

    fleet = fleet_of(
        host_record("a"),
        labelled("one", "allocated", 1, team="vision", job="a=b"),
        labelled("two", "pending", 2, team="vision"),
        labelled("three", "pending", 3),
    )
    step = Transition(
        at=NOW, host="a", worker="one", incarnation="i", event="register", to="allocated", explanation="granted",
        record=labelled("one", "allocated", 1, team="vision"),
    )  # fmt: skip
    fleet.add_step(message(step, key="a/one/i"), step, announce=True)
    for path, found in {"workers": ["one", "two"], "allocations": ["one", "two"], "queue": ["two"]}.items():
        assert [item["worker"] for item in (await get(fleet, path, label="team=vision"))["items"]] == found
    async with serving_api(follower_of(fleet)) as client:
        async with client.get("/api/v1/workers?label=team%3Dvision&label=job%3Da%3Db") as response:
            assert [item["worker"] for item in (await response.json())["items"]] == ["one"]
    assert [line["id"] for line in (await get(fleet, "devices", label="team=vision"))["items"]] == ["a-0"]
    assert (await get(fleet, "devices", label="team=speech"))["items"] == []
    assert len((await get(fleet, "history", label="team=vision"))["items"]) == 1
    assert (await get(fleet, "history", label="team=speech"))["items"] == []
    assert (await get(fleet, "queue"))["items"][0]["labels"] == {"team": "vision"}
    assert (await get(fleet, "workers/two/explanations"))["items"][0]["labels"] == {"team": "vision"}
    assert "regex" in (await get(fleet, "workers", 400, label="vision"))["detail"]


def test_the_document_describes_the_fields_of_records() -> None:
    document = openapi.document(ROUTES, "/api/v1/events", secured=False)
    about = document["components"]["schemas"]["Allocation"]["properties"]["outcome"]
    assert about["description"] == "The next state of a `releasing` record: `ended` or `failed`."


def of_models() -> Fleet:
    """Two hosts with GPUs of two models, and network cards. Two workers of team vision: one holds, one waits."""

    def inventory(name: str, *models: str, **more: Any) -> Any:
        devices = [
            InventoryDevice(
                id=f"{name}-{number}", properties={"model": model, "index": f"{number}"} if model else {}, **more
            )
            for number, model in enumerate(models)
        ]
        return resource_of(devices)

    def of_vision(worker: str, state: str, offset: int, *devices: str) -> Allocation:
        record = allocation("a", worker, state, devices=list(devices), offset=offset)
        return structs.replace(record, request=structs.replace(record.request, labels={"team": "vision"}))

    return fleet_of(
        host_record("a", resources={"gpu": inventory("a", "A100", "A100", "H100"), "nic": inventory("n", "", "")}),
        host_record("b", resources={"gpu": inventory("b", "H100", health="unhealthy")}),
        of_vision("holder", "allocated", 1, "a-1"),
        of_vision("waits", "pending", 2),
        allocation("b", "waits", "pending", offset=3),
    )


async def test_the_devices_are_counted_by_resource_and_by_model() -> None:
    gpu, nic = (await get(of_models(), "resources"))["items"]
    numbers = {"total": 4, "healthy": 3, "free": 2, "held": 1, "held_ill": 0, "unhealthy": 1, "unknown": 0}
    assert gpu == {
        "resource": "gpu",
        "waiting": 2,
        "held_back": 0,
        "cordoned": 0,
        "held_cordoned": 0,
        "used_by_stranger": 0,
        "unserved": 0,
        **numbers,
        "models": {
            "A100": {**dict.fromkeys(gpu["models"]["A100"], 0), "total": 2, "healthy": 2, "free": 1, "held": 1},
            "H100": {**dict.fromkeys(gpu["models"]["A100"], 0), "total": 2, "healthy": 1, "free": 1, "unhealthy": 1},
        },
    }
    assert (nic["resource"], nic["total"], nic["free"], nic["waiting"], nic["models"]) == ("nic", 2, 2, 0, {})


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ({}, {"gpu": (2, 4, 2), "nic": (2, 2, 0)}),
        ({"host": "b"}, {"gpu": (0, 1, 1)}),
        ({"resource": "nic"}, {"nic": (2, 2, 0)}),
        ({"model": "h1"}, {"gpu": (1, 2, 2)}),
        ({"health": "unhealthy"}, {"gpu": (0, 1, 2)}),
        ({"label": "team=vision"}, {"gpu": (0, 1, 1)}),
        ({"model": "nope"}, {}),
        ({"limit": "1"}, {"gpu": (2, 4, 2)}),
        ({"cursor": "gpu"}, {"nic": (2, 2, 0)}),
    ],
)
async def test_the_numbers_are_of_the_devices_that_the_filters_leave(query: dict[str, str], found: Any) -> None:
    items = (await get(of_models(), "resources", **query))["items"]
    assert {item["resource"]: (item["free"], item["total"], item["waiting"]) for item in items} == found


async def test_devices_are_found_by_model_and_by_whether_they_are_free() -> None:
    for query, found in (
        ({"model": "h100"}, ["a-2", "b-0"]),
        ({"model": "h100", "free": "true"}, ["a-2"]),
        ({"resource": "gpu", "free": "false"}, ["a-1", "b-0"]),
    ):
        assert [line["id"] for line in (await get(of_models(), "devices", **query))["items"]] == found


async def test_devices_and_hosts_name_the_orders_that_take_them_out() -> None:
    on_device = cordon("a", device="a-1", reason="XID 79", until=NOW + timedelta(hours=1))
    fleet = fleet_of(host_record("a"), cordon("a", "o-2", since=NOW + timedelta(minutes=1), resource="nic"), on_device)
    order = {
        "id": "k3v9-01", "author": "ada@ops-1", "reason": "XID 79", "since": "2026-01-31T12:00:00Z",
        "until": "2026-01-31T13:00:00Z", "resource": None, "device": "a-1",
    }  # fmt: skip
    well, out = (await get(fleet, "devices"))["items"]
    assert (well["cordon"], well["orders"]) == (None, [])
    assert (out["cordon"], out["orders"]) == ("k3v9-01", [order])
    (host,) = (await get(fleet, "hosts"))["items"]
    assert [each["id"] for each in host["orders"]] == ["k3v9-01", "o-2"]
    assert host["orders"][0] == order
    assert (await get(fleet, "hosts/a"))["orders"] == host["orders"]
    assert (await get(fleet, "resources"))["items"][0]["cordoned"] == 1
    fleet.change(deletion(on_device))
    assert (await get(fleet, "devices", cordoned="true"))["items"] == []


async def test_a_resource_says_how_many_of_its_devices_are_no_items() -> None:
    devices = [InventoryDevice(id="a-0"), InventoryDevice(id="a-1", cordon="k3v9-01")]
    long = structs.replace(resource_of(devices), total=300, healthy=298, cordoned=3)
    fleet = fleet_of(host_record("a", resources={"gpu": long}), cordon("a", resource="gpu"), host_record("b"))
    a, b = (await get(fleet, "hosts"))["items"]
    assert a["resources"]["gpu"]["left_out"] == {"total": 298, "healthy": 296, "cordoned": 2}
    assert (b["resources"]["gpu"]["cordoned"], b["resources"]["gpu"]["left_out"]) == (0, None)
    for query, total in (({}, 302), ({"host": "a"}, 300), ({"health": "healthy"}, 4), ({"resource": "gpu"}, 302)):
        assert (await get(fleet, "resources", **query))["items"][0]["total"] == total


async def test_a_host_says_that_its_manager_cannot_read_orders() -> None:
    unread = structs.replace(checkpoint("host/a"), orders_unread="no leader")
    fleet = fleet_of(host_record("a"), host_record("b", stopped=True), checkpoint("host/a"), checkpoint("host/b"))
    assert [each["orders_unread"] for each in (await get(fleet, "hosts"))["items"]] == [None, None]
    for changed in (unread, structs.replace(unread, writer="host/b")):
        fleet.change(change(changed, partition=0))
    assert [each["orders_unread"] for each in (await get(fleet, "hosts"))["items"]] == ["no leader", None]


PAST, COMING = datetime(2020, 1, 1, tzinfo=UTC), datetime(2120, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("order", "stopped", "planned"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"until": COMING}, True, True),
        ({"until": PAST}, True, False),
        ({"resource": "gpu"}, True, False),
        ({"device": "a-0"}, True, False),
    ],
)
async def test_the_end_of_a_manager_is_planned_while_an_order_is_about_the_whole_host(
    order: dict[str, Any], stopped: bool, planned: bool
) -> None:
    fleet = fleet_of(host_record("a", stopped=stopped), cordon("a", **order), allocation("a", "w", "pending"))
    (host,) = (await get(fleet, "hosts"))["items"]
    assert (host["planned"], host["missed"]) == (planned, stopped and not planned)
    if planned:
        assert [each["host"] for each in (await get(fleet, "hosts", planned="true"))["items"]] == ["a"]
        fleet.change(deletion(cordon("a")))
        assert (await get(fleet, "hosts"))["items"][0]["missed"]
