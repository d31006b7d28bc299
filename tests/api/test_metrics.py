"""What `outfitter api` shows to Prometheus: requests, readers, and how fresh its picture is."""

from __future__ import annotations

import re

from aiohttp import ClientSession
from prometheus_client.parser import text_string_to_metric_families

from outfitter_service.api.access import Guard
from support.api import NOW, Events, change, cordon, deletion, fleet_of, follower_of, host_record, serving_api
from support.documents import ROOT
from support.exposition import of_api

EVENTS = "/api/v1/events"


async def samples(client: ClientSession) -> dict[tuple[str, ...], float]:
    """The values by name and values of labels."""
    async with client.get("/metrics") as response:
        assert response.status == 200
        families = [*text_string_to_metric_families(await response.text())]
    return {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}


async def test_requests_are_counted_by_route_and_status() -> None:
    async with serving_api(follower_of(fleet_of(host_record("a")))) as client:
        for path in ("hosts/a", "hosts/b", "hosts", "hosts?x=1", "nowhere"):
            async with client.get(f"/api/v1/{path}"):
                pass
        found = await samples(client)
    counted = {key[1:]: value for key, value in found.items() if key[0] == "outfitter_api_requests_total"}
    assert counted == {
        ("/api/v1/hosts/{host}", "200"): 1, ("/api/v1/hosts/{host}", "404"): 1, ("/api/v1/hosts", "200"): 1,
        ("/api/v1/hosts", "400"): 1, ("(none)", "404"): 1,
    }  # fmt: skip


async def test_it_says_how_fresh_the_picture_is_and_when_something_changed() -> None:
    fleet = fleet_of(host_record("a"))
    follower = follower_of(fleet)
    async with serving_api(follower) as client:
        found = await samples(client)
        assert found["outfitter_api_ready",] == found["outfitter_api_hosts",] == 1
        assert found["outfitter_api_as_of_timestamp_seconds",] == NOW.timestamp()
        assert ("outfitter_api_behind_records",) not in found
        assert ("outfitter_api_last_event_timestamp_seconds",) not in found
        fleet.change(change(host_record("b")))
        follower.behind, follower.outage = 7, "no broker answers"
        found = await samples(client)
        assert (found["outfitter_api_behind_records",], found["outfitter_api_bus_readable",]) == (7, 0)
        assert found["outfitter_api_last_event_timestamp_seconds",] == fleet.events.changed_at


async def test_it_names_the_hosts_without_a_manager_that_operators_have_taken_out() -> None:
    hosts = [host_record("a", stopped=True), host_record("b", stopped=True), host_record("c")]
    fleet = fleet_of(*hosts, cordon("a"), cordon("b", device="b-0"), cordon("c"))
    async with serving_api(follower_of(fleet)) as client:
        found = await samples(client)
        assert [key for key in found if key[0] == "outfitter_api_host_planned"] == [
            ("outfitter_api_host_planned", "c", "a")
        ]
        fleet.change(deletion(cordon("a")))
        assert "outfitter_api_host_planned" not in {key[0] for key in await samples(client)}


async def test_it_counts_the_readers_that_are_there() -> None:
    async with serving_api(follower_of(fleet_of())) as client:
        assert (await samples(client))["outfitter_api_streams",] == 0
        async with client.get(EVENTS) as response:
            await Events(response).until_open()
            assert (await samples(client))["outfitter_api_streams",] == 1


async def test_before_the_ledger_is_read_it_is_not_ready_and_says_no_age() -> None:
    follower = follower_of(None, "starting")
    follower.as_of = None
    async with serving_api(follower) as client:
        found = await samples(client)
    assert (found["outfitter_api_ready",], found["outfitter_api_hosts",]) == (0, 0)
    assert ("outfitter_api_as_of_timestamp_seconds",) not in found


async def test_metrics_need_no_token_as_the_probes() -> None:
    async with serving_api(follower_of(fleet_of()), Guard(token=lambda: b"x" * 16, local=False)) as client:
        async with client.get("/api/v1/hosts") as response:
            assert response.status == 401
        assert (await samples(client))["outfitter_api_ready",] == 1


def test_the_page_has_each_metric_with_its_labels_and_no_other() -> None:
    section = (ROOT / "service" / "api.md").read_text().partition("## Metrics")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(outfitter_\w+)` \|([^|]*)\|", section, re.MULTILINE)
    told = {name: set(re.findall(r"`(\w+)`", labels)) for name, labels in rows}
    labels = {name: {key for each in series for key in each} for name, series in of_api().items()}
    labels["outfitter_api_requests_total"] = {"route", "status"}  # nobody has asked yet
    assert told == {name: names for name, names in labels.items() if name.startswith("outfitter_")}
