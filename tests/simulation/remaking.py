"""Topics that are deleted and made anew, while managers serve or while they are all down."""

from __future__ import annotations

import json
import random
from collections.abc import Collection
from typing import NamedTuple

from outfitter_proto.bus import Entry
from outfitter_proto.names import Topics
from outfitter_proto.partitioning import partition_of
from simulation.broker import COMPLETE, PREPARE, Broker

BEYOND = 5


class Remaking(NamedTuple):
    """What becomes of a world's topics: which one is made anew, after how many seconds, whether no manager runs then,
    and after how many more seconds the registrations reach further than they did before (None: they need not)."""

    topic: str
    after_s: float
    down: bool
    fill_s: float | None
    look_s: float

    @property
    def of_ledger(self) -> bool:
        return self.topic.endswith(".allocations")


SHARE = 0.2
"""The worlds in which a topic is made anew."""


def remaking(topics: Topics, seed: int, trouble_s: float) -> Remaking | None:
    """What becomes of the topics of a seed's world."""
    dice = random.Random(f"{seed}/remaking")
    if dice.random() >= SHARE:
        return None
    ledger = dice.random() < 0.5
    down = dice.random() < 0.5
    # who reads on where another topic stood cannot know it before he looks: managers that run do not meet that here
    fill_s = dice.uniform(0.0, 4.0) if down and not ledger else None
    return Remaking(
        topics.allocations if ledger else topics.registrations,
        trouble_s * dice.uniform(0.3, 0.9),
        down,
        fill_s,
        dice.choice((1.0, 5.0, 30.0)),
    )


def is_told(broker: Broker, identities: Collection[str]) -> bool:
    """Whether the broker tells of each of these writers that is not new that it has committed something: that is what
    a manager knows of a ledger that is gone."""
    found = [broker.transactions[each] for each in identities if each in broker.transactions]
    return all(each.commit and each.state in (PREPARE, COMPLETE) for each in found)


def fill(broker: Broker, topics: Topics, partition: int, end: int) -> None:
    """Have the registrations of a partition reach further than `end`, with what nobody answers."""
    host = next(
        name for name in map("filler-{}".format, range(1000)) if partition_of(name, broker.partitions) == partition
    )
    log = broker.logs[topics.registrations, partition]
    body = json.dumps({"type": "heartbeat", "host": host, "worker": "w", "incarnation": "1"}).encode()
    while log.end < end + BEYOND:
        broker.publish(log, Entry(host.encode(), body))
