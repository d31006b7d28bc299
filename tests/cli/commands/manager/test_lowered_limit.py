"""An administrator lowers `max.message.bytes` of a served cluster's topics."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource

from outfitter_proto.names import topics
from support.kafka.broker import Broker
from support.managers.process import Manager, serving_on

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(180)]


@pytest.fixture
def one_gpu(tmp_path: Path, own_broker: Broker) -> Iterator[Manager]:
    with serving_on(own_broker, tmp_path / "manager", partitions=1) as manager:
        yield manager


def lower(broker: Broker, cluster: str, most: int) -> None:
    admin, names = AdminClient({"bootstrap.servers": broker.bootstrap}), topics(cluster)
    for name in (names.allocations, names.history, names.dead_letters):
        entry = ConfigEntry("max.message.bytes", str(most), incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ConfigResource.Type.TOPIC, name, incremental_configs=[entry])
        admin.incremental_alter_configs([resource])[resource].result(15)


def test_a_worker_with_a_large_record_can_be_deregistered_after_the_limit_was_lowered(
    one_gpu: Manager, own_broker: Broker
) -> None:
    arguments = ["--worker", "a", "--resource", "gpu=1", "--lease", "none", "--label", f"note={'x' * 3000}"]
    assert one_gpu.outfitter("register", *arguments, "--wait", "20s").returncode == 0
    lower(own_broker, one_gpu.cluster, 2000)
    ended = one_gpu.outfitter("deregister", "--worker", "a")
    assert ended.returncode == 0, ended.stderr
    one_gpu.wait_for_state("a", "ended")
    assert one_gpu.outfitter("dead-letters").stdout.count("larger than") == 0
    verified = one_gpu.outfitter("verify")
    assert verified.returncode == 0, verified.stdout
