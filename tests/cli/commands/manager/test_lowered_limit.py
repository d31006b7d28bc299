"""An administrator lowers `max.message.bytes` of a served cluster's topics."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from outfitter_proto.names import topics
from support.kafka.broker import Broker
from support.kafka.limits import limit_messages
from support.managers.process import Manager, serving_on

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(180), pytest.mark.slow]


@pytest.fixture
def one_gpu(tmp_path: Path, own_broker: Broker) -> Iterator[Manager]:
    with serving_on(own_broker, tmp_path / "manager", partitions=1) as manager:
        yield manager


def limit(manager: Manager, broker: Broker, most: int) -> None:
    """Set what the topics take that a manager writes to."""
    for topic in topics(manager.cluster).written(history=True):
        limit_messages(broker, topic, most)


def test_a_worker_with_a_large_record_can_be_deregistered_after_the_limit_was_lowered(
    one_gpu: Manager, own_broker: Broker
) -> None:
    arguments = ["--worker", "a", "--resource", "gpu=1", "--lease", "none", "--label", f"note={'x' * 3000}"]
    assert one_gpu.outfitter("register", *arguments, "--wait", "20s").returncode == 0
    limit(one_gpu, own_broker, 2000)
    ended = one_gpu.outfitter("deregister", "--worker", "a")
    assert ended.returncode == 0, ended.stderr
    one_gpu.wait_for_state("a", "ended")
    assert one_gpu.outfitter("dead-letters").stdout.count("larger than") == 0
    verified = one_gpu.outfitter("verify")
    assert verified.returncode == 0, verified.stdout


def test_a_deregistration_that_the_topics_do_not_take_waits_and_is_written_once_the_named_limit_is_set(
    one_gpu: Manager, own_broker: Broker
) -> None:
    """The manager says once which topic takes too little, and how much would do; it needs no restart."""
    assert one_gpu.outfitter("register", "--worker", "a", "--resource", "gpu=1", "--lease", "none").returncode == 0
    one_gpu.wait_for_state("a", "allocated")
    limit(one_gpu, own_broker, 1500)
    assert one_gpu.outfitter("deregister", "--worker", "a", "--wait", "0s").returncode == 0
    named = re.compile(
        r"topic (\S+) takes less than the smallest commit: set its max\.message\.bytes to (\d+) at least"
    )
    one_gpu.wait_for(lambda: named.search(one_gpu.readiness()))
    check = one_gpu.outfitter("topics", "check")
    assert check.stdout.count("max.message.bytes is 1500, must be at least 1048588") == 3
    refusals = one_gpu.metric("outfitter_commits_total", outcome="too-large") or 0
    one_gpu.wait_for(lambda: (one_gpu.metric("outfitter_commits_total", outcome="too-large") or 0) > refusals + 2)
    assert one_gpu.log.read_text().count("waiting until a topic takes larger commits") == 1
    assert "the bus is away" not in one_gpu.log.read_text()
    match = named.search(one_gpu.readiness())
    assert match
    topic, least = match.groups()
    assert topic == topics(one_gpu.cluster).history  # a step has more than its record
    limit_messages(own_broker, topic, int(least))
    one_gpu.wait_for_state("a", "ended")
    one_gpu.wait_for(lambda: one_gpu.readiness() == "ok\n")
    assert "the topics take the commit by now" in one_gpu.log.read_text()
    assert one_gpu.outfitter("dead-letters").stdout.count("larger than") == 0
    verified = one_gpu.outfitter("verify")
    assert verified.returncode == 0, verified.stdout
