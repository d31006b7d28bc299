"""A bad message costs itself only: a dead letter or a failed record with a reason, a metric, and the next is served."""

from __future__ import annotations

import base64
import hashlib
import json
import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outfitter_proto import topics as all_topics
from outfitter_proto.bus import Entry, TooLargeError, TopicSpec
from outfitter_proto.codec import WireError, decode_registration
from runtime.conftest import Serve
from support.bus.faulty_bus import FaultyBus
from support.checker.verdict import verdict
from support.managers.in_process import CLUSTER, HOST, TOPICS, deregister, heartbeat, register, static


def body(**fields: Any) -> bytes:
    return json.dumps({**register("w"), **fields}).encode()


BAD = {
    "malformed JSON": (b'{"type":"register",', "h"),
    "no JSON at all": (b"\x00\xff\xfe", "h"),
    "empty": (b"", "h"),
    "a tombstone": (None, "h"),
    "a list": (b"[]", "h"),
    "a number too long for any float": (b"1" + b"0" * 5000, "h"),
    "nested without end": (b'{"labels":' + b"[" * 30_000, "h"),
    "an unknown type": (body(type="reboot"), "h"),
    "no type": (b'{"host":"h","worker":"w","incarnation":"1"}', "h"),
    "a missing field": (b'{"type":"register","host":"h","worker":"w"}', "h"),
    "a wrong type of field": (body(priority="high"), "h"),
    "a negative amount": (body(resources={"gpu": {"amount": -1}}), "h"),
    "an amount of nothing": (body(resources={"gpu": {"amount": 0}}), "h"),
    "an absurd amount": (body(resources={"gpu": {"amount": 2**63}}), "h"),
    "a fraction of a device": (body(resources={"gpu": {"amount": 0.5}}), "h"),
    "a name with a slash": (body(worker="a/b"), "h"),
    "an infinite lease": (b'{"type":"register","host":"h","worker":"w","incarnation":"1","lease_s":1e999}', "h"),
    "half a surrogate": (body(labels={"a": "\ud800"}), "h"),
    "half a surrogate in a name": (body(worker="\ud800"), "h"),
    "half a surrogate as a host": (body(host="\ud800"), "h"),
    "half a surrogate in an operator's name": (body(operators={"\udc00": {}}), "h"),
    "half a surrogate in an unknown field": (body(unknown="\ud800"), "h"),
    "an unknown field that is not UTF-8": (body(unknown="?").replace(b"?", b"\xed\xa0\x80"), "h"),
    "a body that contradicts its key": (body(host="other"), "h"),
    "a heartbeat of nobody": (json.dumps(heartbeat("nobody")).encode(), "h"),
    "a deregistration of nobody": (json.dumps(deregister("nobody", None)).encode(), "h"),
    "garbage as large as the topic takes": (b"\xab" * 65_000, "h"),
}


@pytest.mark.parametrize("case", BAD)
async def test_a_bad_message_becomes_a_dead_letter_and_the_next_one_is_served(serve: Serve, case: str) -> None:
    value, key = BAD[case]
    async with serve(static()) as manager:
        offset = await manager.publish(value, key.encode() if key else None)
        await manager.say(register("next", gpu=1))
        await manager.state("next", "allocated")
        [letter] = await manager.dead_letters(1)
        assert letter["source"] == {"topic": TOPICS.registrations, "partition": 0, "offset": offset}
        assert letter["length"] == len(value or b"")
        assert letter["sha256"] == hashlib.sha256(value or b"").hexdigest()
        assert base64.b64decode(letter["body"]) == (value or b"")[: 4 * 1024]
        assert letter["reason"]
        await manager.reported()
        assert manager.metric("outfitter_dead_letters_total") == 1
        assert manager.metric("outfitter_events_total", kind="dead-letter") == 1
        assert manager.metric("outfitter_events_total", kind="defect") == 0


async def test_a_wrong_field_is_named_in_the_dead_letter(serve: Serve) -> None:
    async with serve(static()) as manager:
        await manager.publish(body(resources={"gpu": {"amount": -1}}))
        [letter] = await manager.dead_letters(1)
        assert letter["field"] == "$.resources.gpu.amount"
        assert "-1" in letter["reason"] or "1" in letter["reason"]


async def test_a_megabyte_of_garbage_is_refused_by_the_topic_or_shortened(bus: FaultyBus, serve: Serve) -> None:
    """On a topic that an administrator made with Kafka's own limit, it is a dead letter of 4 KiB."""
    own = dict(all_topics.required(CLUSTER))[TOPICS.registrations]
    config = {setting.name: setting.value for setting in own} | {"max.message.bytes": "1048588"}
    await bus.create_topics([TopicSpec(TOPICS.registrations, 1, config)])
    garbage = b"{" * 1_000_000
    async with serve(static()) as manager:
        await manager.publish(garbage)
        await manager.say(register("next", gpu=1))
        await manager.state("next", "allocated")
        [letter] = await manager.dead_letters(1)
        assert letter["length"] == 1_000_000
        assert len(base64.b64decode(letter["body"])) == 4 * 1024


async def test_topics_as_we_make_them_take_no_larger_registration_than_is_read(serve: Serve) -> None:
    async with serve(static()) as manager:
        with pytest.raises(TooLargeError, match=r"max\.message\.bytes"):
            await manager.publish(b"x" * 1_000_000)


async def test_a_flood_of_large_garbage_is_shortened_and_what_follows_is_served(bus: FaultyBus, serve: Serve) -> None:
    await all_topics.create(bus, CLUSTER, partitions=1)
    for _ in range(60):
        await bus.publish(TOPICS.registrations, 0, Entry(HOST.encode(), b"\xab" * 60_000))
    async with serve(static(), ready=False) as manager:
        await manager.say(register("next", gpu=1))
        await manager.state("next", "allocated")
        letters = await manager.dead_letters(60)
        assert {letter["length"] for letter in letters} == {60_000}
        assert sum(len(letter["body"]) for letter in letters) < 60 * 6000


@pytest.mark.parametrize(
    ("asked", "code", "said"),
    [
        (register("w", gpu=3), "infeasible", "3"),
        (register("w", gpu=2**62), "infeasible", str(2**62)),
        (register("w", fpga=1), "unknown-resource", "fpga"),
        (register("w", gpu=1, operators={"a": {"gpu": {"amount": 2}}}), "invalid-request", "2"),
        (register("w", gpu=1, operators={"a": {"fpga": {"amount": 1}}}), "unknown-resource", "fpga"),
    ],
)
async def test_a_request_that_cannot_be_served_has_a_record_that_says_why(
    serve: Serve, asked: dict[str, Any], code: str, said: str
) -> None:
    async with serve(static()) as manager:
        await manager.say(asked, register("next", gpu=1))
        record = await manager.until(
            lambda records: (found := records.get("h/w/1")) and found["reason_code"] == code and found
        )
        assert record["state"] == "failed"
        assert said in record["reason"]
        await manager.state("next", "allocated")


async def test_a_heartbeat_of_an_older_incarnation_is_a_dead_letter_and_renews_nothing(serve: Serve) -> None:
    async with serve(static()) as manager:
        await manager.say(register("w", "old", gpu=1), register("w", "new", gpu=1), heartbeat("w", "old"))
        [letter] = await manager.dead_letters(1)
        assert "older incarnation" in letter["reason"]
        assert (await manager.state("w", "allocated", "old"))["reason_code"] == "superseded"


async def test_the_same_registration_again_publishes_the_unchanged_record_again(serve: Serve) -> None:
    async with serve(static()) as manager:
        await manager.say(register("w", gpu=1))
        first = await manager.state("w", "allocated")
        _, before = await manager.bus.offsets(TOPICS.allocations, 0)
        await manager.say(register("w", gpu=1))
        await manager.until(lambda _: manager.metric("outfitter_events_total", kind="repeated") == 1)
        assert (await manager.records())["h/w/1"] == first
        _, after = await manager.bus.offsets(TOPICS.allocations, 0)
        assert after > before


async def test_the_same_incarnation_with_another_request_is_refused_and_keeps_its_grant(serve: Serve) -> None:
    async with serve(static()) as manager:
        await manager.say(register("w", gpu=1))
        first = await manager.state("w", "allocated")
        await manager.say(register("w", gpu=2))
        [letter] = await manager.dead_letters(1)
        assert "resources" in letter["reason"]
        assert (await manager.records())["h/w/1"] == first


async def test_what_comes_late_or_in_the_wrong_order_grants_nothing(serve: Serve) -> None:
    async with serve(static(1)) as manager:
        await manager.say(
            deregister("early"), register("early", gpu=1),
            register("w", gpu=1), deregister("w"), register("w", gpu=1), heartbeat("w"), deregister("w"),
            register("next", gpu=1),
        )  # fmt: skip
        await manager.state("next", "allocated")
        records = await manager.records()
        assert records["h/early/1"]["state"] == "ended"
        assert records["h/w/1"]["state"] == "ended"
        assert (await verdict(manager.bus.url)).violations == ()


@pytest.mark.parametrize("topic", [TOPICS.registrations, TOPICS.allocations, TOPICS.history, TOPICS.dead_letters])
async def test_rows_that_are_no_bytes_end_no_manager_now_or_at_its_next_start(
    serve: Serve, tmp_path: Path, topic: str
) -> None:
    """A member of the bus's group whose program binds strings and numbers; older files take those."""
    odd = ("'h'", "7", "1.5", "x'68'", "NULL", "CAST(x'ff' AS TEXT)")
    rows = [(key, value) for key in odd for value in (*odd, f"'{body(worker='text').decode()}'")]
    if topic == TOPICS.allocations:  # the test reads these itself, and believes that they are UTF-8 and JSON
        rows = [(key, value) for key in odd[:4] for value in ("7", "1.5", "NULL")]
    async with serve(static()) as manager:
        with closing(sqlite3.connect(tmp_path / "bus.db", isolation_level=None)) as stranger:
            stranger.execute("PRAGMA ignore_check_constraints = ON")
            for key, value in rows:
                stranger.execute(
                    "INSERT INTO record (topic, part, off, time, key, value) SELECT id, 0, next, 0, "
                    f"{key}, {value} FROM topic JOIN part ON topic = id WHERE name = ?",
                    (topic,),
                )
                stranger.execute(
                    "UPDATE part SET next = next + 1 WHERE topic = (SELECT id FROM topic WHERE name = ?)", (topic,)
                )
        await manager.say(register("before", gpu=1))
        await manager.state("before", "allocated")
    async with serve(static()) as manager:
        await manager.say(deregister("before"))
        await manager.state("before", "ended")
        await manager.say(register("after", gpu=1))
        await manager.state("after", "allocated")


async def test_messages_of_another_host_are_passed_over_in_silence(serve: Serve) -> None:
    async with serve(static()) as manager:
        await manager.publish(json.dumps(register("w", host="other", gpu=1)).encode(), b"other")
        await manager.publish(b"\xff garbage of theirs", b"other")
        await manager.say(register("next", gpu=1))
        await manager.state("next", "allocated")
        await manager.reported()
        assert manager.metric("outfitter_dead_letters_total") == 0
        assert not any(key.startswith("other/") for key in await manager.records())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = ["resources", "operators", "owner", "lease_s", "wait_s", "priority", "labels", "worker", "incarnation", "type"]


@given(st.binary(max_size=200) | st.builds(lambda name, value: body(**{name: value}), st.sampled_from(FIELDS), JSON))
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_whatever_the_bytes_they_are_a_registration_or_one_kind_of_error(value: bytes) -> None:
    found = None
    with suppress(WireError):
        found = decode_registration(value, key=b"h")
    assert found is None or found.host == "h"
