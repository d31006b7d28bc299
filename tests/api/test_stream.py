"""The event stream: a reader that was away misses nothing, or is told that it did."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import anyio
import pytest
from aiohttp import ClientSession, web

from outfitter_service.api import stream
from outfitter_service.api.application import application
from outfitter_service.api.model import event_log
from outfitter_service.http.connections import MOST, Connections
from outfitter_service.http.listener import Listening, serving
from support.api import OPEN, Events, allocation, change, fleet_of, follower_of, host_record, serving_api

PATH = "/api/v1/events"


async def test_a_reader_gets_each_change_with_its_record() -> None:
    fleet = fleet_of()
    async with serving_api(follower_of(fleet)) as client, client.get(PATH) as response:
        assert response.content_type == "text/event-stream"
        events = Events(response)
        await events.until_open()
        fleet.change(change(host_record("a"), offset=3))
        kind, data = await events.next()
        assert (kind, data["key"], data["offset"], data["record"]["type"]) == ("host", "@host/a", 3, "host")
        fleet.change(change(allocation("a", "w")))
        assert (await events.next())[1]["key"] == "a/w/run-1"


async def test_a_reader_that_comes_back_gets_what_it_missed_and_nothing_twice() -> None:
    fleet = fleet_of()
    async with serving_api(follower_of(fleet)) as client:
        async with client.get(PATH) as response:
            events = Events(response)
            await events.until_open()
            fleet.change(change(host_record("a")))
            await events.next()
            last = events.last_id
        fleet.change(change(host_record("b")))
        fleet.change(change(host_record("c")))
        async with client.get(PATH, headers={"Last-Event-ID": last}) as response:
            events = Events(response)
            assert [(await events.next())[1]["key"] for _ in range(2)] == ["@host/b", "@host/c"]


async def test_whoever_reads_the_pages_first_and_then_follows_misses_nothing() -> None:
    fleet = fleet_of(host_record("a"))
    async with serving_api(follower_of(fleet)) as client:
        async with client.get("/api/v1/hosts") as response:
            last = response.headers["Outfitter-Event-Id"]
        fleet.change(change(host_record("b")))
        async with client.get(PATH, headers={"Last-Event-ID": last}) as response:
            assert (await Events(response).next())[1]["key"] == "@host/b"


@pytest.mark.parametrize("last", ["another-1", "nonsense", "-"])
async def test_a_reader_whose_place_is_gone_is_told_so_first_and_then_follows(last: str) -> None:
    fleet = fleet_of()
    fleet.change(change(host_record("a")))
    async with serving_api(follower_of(fleet)) as client:
        async with client.get(PATH, headers={"Last-Event-ID": last}) as response:
            events = Events(response)
            assert await events.next() == ("reset", {})
            assert events.last_id == fleet.events.last_id
            fleet.change(change(host_record("b")))
            assert (await events.next())[1]["key"] == "@host/b"


async def test_a_reader_that_falls_behind_the_log_is_closed_and_told_when_it_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_log, "MOST_EVENTS", 3)
    fleet = fleet_of()
    async with serving_api(follower_of(fleet)) as client:
        async with client.get(PATH) as response:
            events = Events(response)
            await events.until_open()
            for number in range(5):  # all at once: the reader had no chance
                fleet.change(change(host_record(f"h{number}")))
            assert await events.next() == ("end", None)
        async with client.get(PATH, headers={"Last-Event-ID": events.last_id}) as response:
            assert (await Events(response).next())[0] == "reset"


async def test_every_stream_ends_at_once_when_its_picture_is_replaced_or_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream, "BEAT_S", 1e6)
    follower = follower_of(fleet_of(host_record("a")))
    async with serving_api(follower) as client, client.get(PATH) as one, client.get(PATH) as another:
        readers = [Events(one), Events(another)]
        for events in readers:
            await events.until_open()
        follower.fleet = None
        for events in readers:
            assert await events.next() == ("end", None)
        follower.fleet = fleet_of(host_record("a"))
        async with client.get(PATH, headers={"Last-Event-ID": readers[0].last_id}) as again:
            events = Events(again)
            assert (await events.next())[0] == "reset"
            follower.fleet = fleet_of(host_record("a"))
            assert await events.next() == ("end", None)


async def test_a_reader_that_takes_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "WRITE_WITHIN_S", 0.05)
    monkeypatch.setattr(stream, "MOST_STREAMS", 1)
    fleet = fleet_of()
    async with serving_api(follower_of(fleet)) as client, client.get(PATH) as slow:
        await Events(slow).until_open()
        for number in range(150):  # more than the buffers of both sides hold
            fleet.change(change(allocation("a", f"w{number}", "pending", reason="x" * 100_000)))
        status = 503
        while status != 200:  # the slow reader's place becomes free
            async with client.get(PATH) as next_one:
                status = next_one.status


async def test_little_waits_for_a_reader_that_takes_nothing_and_then_its_connection_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream, "WRITE_WITHIN_S", 0.05)
    fleet, connections = fleet_of(), list[asyncio.Transport]()

    async def note(request: web.Request, _: web.StreamResponse) -> None:
        assert request.transport is not None
        connections.append(request.transport)

    def noting(held: Connections) -> web.Application:
        app = application(follower_of(fleet), held, OPEN)
        app.on_response_prepare.append(note)
        return app

    async with serving(noting, Listening(address="127.0.0.1:0")) as address, ClientSession() as client:
        async with client.get(f"http://{address}{PATH}") as slow:
            await Events(slow).until_open()
            for number in range(8):  # of two megabytes, more than the buffers of both sides hold
                fleet.change(change(allocation("a", f"w{number}", "pending", reason="x" * 1_900_000)))
            most = 0
            while not connections[0].is_closing():
                most = max(most, connections[0].get_write_buffer_size())
                await anyio.lowlevel.checkpoint()
            assert 0 < most <= 3 * 65_536


async def test_an_event_of_several_pieces_arrives_whole() -> None:
    fleet = fleet_of()
    async with serving_api(follower_of(fleet)) as client, client.get(PATH) as response:
        events = Events(response)
        await events.until_open()
        fleet.change(change(allocation("a", "w", "pending", reason="x" * 100_000)))
        assert len((await events.next())[1]["record"]["reason"]) == 100_000


async def test_a_reader_of_one_host_gets_nothing_of_others() -> None:
    fleet = fleet_of()
    async with serving_api(follower_of(fleet)) as client, client.get(PATH, params={"host": "b"}) as response:
        events = Events(response)
        await events.until_open()
        fleet.change(change(host_record("a")))
        fleet.change(change(host_record("b")))
        assert (await events.next())[1]["key"] == "@host/b"


async def test_a_quiet_stream_moves_the_readers_place_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "BEAT_S", 0.05)
    fleet = fleet_of()
    async with serving_api(follower_of(fleet)) as client, client.get(PATH, params={"host": "b"}) as response:
        events = Events(response)
        await events.until_open()
        fleet.change(change(host_record("a")))
        line = ""
        while line != f"id: {fleet.events.last_id}\n":
            line = (await response.content.readline()).decode()


async def test_when_the_model_is_replaced_readers_come_back_and_learn_it() -> None:
    follower = follower_of(fleet_of())
    async with serving_api(follower) as client:
        async with client.get(PATH) as response:
            events = Events(response)
            await events.until_open()
            before, follower.fleet = follower.fleet, fleet_of(host_record("a"))
            assert before is not None
            before.change(change(host_record("b")))
            while (await events.next())[0] != "end":
                pass
        async with client.get(PATH, headers={"Last-Event-ID": events.last_id}) as response:
            assert (await Events(response).next())[0] == "reset"


async def test_too_many_streams_are_refused_and_pages_still_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MOST_STREAMS", 1)
    async with serving_api(follower_of(fleet_of())) as client, client.get(PATH) as first:
        await Events(first).until_open()
        async with client.get(PATH) as second:
            assert (second.status, second.headers["Retry-After"]) == (503, "10")
        async with client.get("/api/v1/hosts") as page:
            assert page.status == 200


async def test_more_streams_than_a_manager_without_them_has_connections_are_all_served() -> None:
    fleet = fleet_of()
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(serving_api(follower_of(fleet)))
        streams = [Events(await stack.enter_async_context(client.get(PATH))) for _ in range(MOST + 10)]
        for each in streams:
            await each.until_open()
        fleet.change(change(host_record("a")))
        assert {(await each.next())[0] for each in streams} == {"host"}


async def test_open_streams_end_when_the_server_stops() -> None:
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(ClientSession())
        async with serving(
            lambda held: application(follower_of(fleet_of()), held, OPEN), Listening(address="127.0.0.1:0")
        ) as address:
            response = await client.get(f"http://{address}{PATH}")
            events = Events(response)
            await events.until_open()
        assert await events.next() == ("end", None)
