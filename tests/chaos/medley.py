"""A little of everything in one scene: the short form of `make chaos`, and the other Kafka's share of it.

The long form has each fault by itself and many more of them (`faults/`).
"""

from __future__ import annotations

from chaos.harm import Harmed, in_a_transaction, strike
from chaos.scene import Scene
from support.kafka.proxy import ADD_PARTITIONS_TO_TXN, END_TXN, FETCH, PRODUCE, Harm


def play(harmed: Harmed, scene: Scene) -> None:
    """Kill, freeze, lose and delay, on three brokers behind a proxy; whom and what is the seed's choice."""
    brokers, dice = harmed.broker.brokers, scene.dice
    with scene.fault("a request to commit, delivered late") as trouble:
        strike(harmed, scene, END_TXN, Harm.LATE_REQUEST, trouble)
    of_version_1 = [ADD_PARTITIONS_TO_TXN] if harmed.broker.transactions == 1 else []
    key = dice.choice([*of_version_1, PRODUCE, END_TXN, FETCH])
    harm = dice.choice([Harm.LOST_ANSWER, Harm.NEVER_SENT, Harm.LATE_ANSWER])
    with scene.fault("a request or its answer, lost or late") as trouble:
        strike(harmed, scene, key, harm, trouble)
    with scene.fault("a manager: kill -9 in a transaction, started at once") as trouble:
        host = dice.choice(scene.hosts)
        in_a_transaction(harmed, scene, host)
        scene.managers[host].kill9()
        trouble.begin()
        scene.managers[host].start(ready=False)
    with scene.fault("one broker of 3: SIGSTOP 5 s") as trouble:
        scene.freeze(brokers[dice.choice(list(brokers))].pid, 5, trouble)
    harmed.broker.settle()
    with scene.fault("one broker of 3: kill -9, started at once") as trouble:
        node = dice.choice(list(brokers))
        brokers[node].kill9()
        trouble.begin()
        harmed.broker.restart(node)
