"""Harm done to the requests of one host's manager: which, whose, and until when."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from chaos.scene import Scene, Trouble
from support.kafka.broker import NEW
from support.kafka.cluster import KafkaCluster, running
from support.kafka.proxy import END_TXN, FETCH, FIND_COORDINATOR, INIT_PRODUCER_ID, Fault, Harm, KafkaProxy

STRIKES_WITHIN = 60.0


class Harmed(NamedTuple):
    """A broker, and the proxy that leads to it."""

    broker: KafkaCluster
    proxy: KafkaProxy


@contextmanager
def harmed_cluster(
    folder: Path,
    *,
    nodes: int,
    kafka: str = NEW,
    settings: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
) -> Iterator[Harmed]:
    """So many brokers with these settings and options, started, and one proxy before all of them."""
    with KafkaProxy() as proxy:
        cluster = KafkaCluster(folder, nodes=nodes, kafka=kafka, settings=settings, options=options, proxy=proxy.listen)
        with running(cluster):
            yield Harmed(cluster, proxy)


def strike(
    harmed: Harmed,
    scene: Scene,
    key: int,
    harm: Harm,
    trouble: Trouble,
    *,
    host: str | None = None,
    code: int = -1,
) -> Fault:
    """Do harm to the next request of this kind that one host's manager sends (any host's, unless `host` says)."""
    host = host or scene.dice.choice(scene.hosts)
    client = None if key == FETCH else scene.writer_id(host)
    fault = harmed.proxy.harm(key, harm, client=client, code=code)
    if key in (INIT_PRODUCER_ID, FIND_COORDINATOR):  # sent when a manager takes its partition
        scene.managers[host].kill9()
        scene.managers[host].start(ready=False)
    assert fault.struck.wait(STRIKES_WITHIN), "there was no such request"
    trouble.begin()
    if harm is Harm.LATE_REQUEST:
        assert fault.delivered.wait(STRIKES_WITHIN), "the late request was not answered"
    return fault


def in_a_transaction(harmed: Harmed, scene: Scene, host: str) -> None:
    """Return when this host's writer has written all of a transaction, and its request to commit went nowhere."""
    fault = harmed.proxy.harm(END_TXN, Harm.NEVER_SENT, client=scene.writer_id(host))
    assert fault.struck.wait(STRIKES_WITHIN), "it committed nothing"
