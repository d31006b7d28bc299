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


def test_a_commit_that_the_topics_do_not_take_is_written_once_the_named_command_was_run(
    one_gpu: Manager, own_broker: Broker
) -> None:
    """The manager says which topic takes too little, and needs no restart."""
    assert one_gpu.outfitter("register", "--worker", "a", "--resource", "gpu=1", "--lease", "none").returncode == 0
    one_gpu.wait_for_state("a", "allocated")
    limit(one_gpu, own_broker, 1500)
    # enough for the worker's end together with the host's record, which each tenure writes anew
    limit_messages(own_broker, topics(one_gpu.cluster).allocations, 2500)
    assert one_gpu.outfitter("deregister", "--worker", "a", "--wait", "0s").returncode == 0
    named = re.compile(
        r"topic (\S+) takes less than a commit, .*: kafka-configs .* --alter --topic \1 --add-config (\S+)"
    )
    one_gpu.wait_for(lambda: named.search(one_gpu.readiness()))
    check = one_gpu.outfitter("topics", "check")
    assert check.stdout.count("max.message.bytes is 1500, must be at least 1048588") == 2
    assert check.stdout.count("max.message.bytes is 2500, must be at least 1048588") == 1
    refusals = one_gpu.metric("outfitter_commits_total", outcome="too-large") or 0
    one_gpu.wait_for(lambda: (one_gpu.metric("outfitter_commits_total", outcome="too-large") or 0) > refusals + 2)
    assert one_gpu.log.read_text().count("the bus refuses this manager") == 1
    match = named.search(one_gpu.readiness())
    assert match
    topic, setting = match.groups()
    assert topic == topics(one_gpu.cluster).history  # a step has more than its record
    assert setting == "max.message.bytes=1048588"
    limit_messages(own_broker, topic, 1_048_588)
    one_gpu.wait_for_state("a", "ended")
    one_gpu.wait_for(lambda: one_gpu.readiness() == "ok\n")
    assert "the bus works again" in one_gpu.log.read_text()
    assert one_gpu.metric("outfitter_dead_letters_total") == 0
    verified = one_gpu.outfitter("verify")
    assert verified.returncode == 0, verified.stdout


def test_a_manager_that_starts_with_a_lower_limit_is_not_ready_before_it_is_raised(
    one_gpu: Manager, own_broker: Broker
) -> None:
    one_gpu.stop()
    ledger = topics(one_gpu.cluster).allocations
    limit_messages(own_broker, ledger, 1_000_000)
    one_gpu.start(ready=False)
    one_gpu.wait_for(one_gpu.listens)
    said = re.compile(
        rf"topic {re.escape(ledger)}: max.message.bytes is 1000000, should be at least 1048588 .*: kafka-configs .*"
    )
    one_gpu.wait_for(lambda: said.search(one_gpu.readiness()))
    limit_messages(own_broker, ledger, 1_048_576)
    one_gpu.wait_for(lambda: one_gpu.readiness() == "ok\n")
