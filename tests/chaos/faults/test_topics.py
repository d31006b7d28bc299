"""What a stranger does to the shape of the topics: more partitions, made anew, emptied under another policy.

Managers refuse with a sentence that says what to do, or go on; whatever they say is done here, as they say it. No
device is lent twice: to that the workers are witnesses (`Fleet.clashes`), since a topic that was made anew has
forgotten. Lost is what a destroyed topic held, and nothing else. Where that was the ledger, every worker of its hosts
is ended before it is adopted, as the guide says; where it was the registrations, what was not answered is said again.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest

from chaos.fleet import FEED
from chaos.harm import Harmed, strike
from chaos.scene import PARTITIONS, Note, Scene, playing
from outfitter_proto.bus import Entry, connect
from outfitter_proto.names import topics
from support.bus import remaking
from support.kafka.proxy import END_TXN, Harm
from support.managers.process import Manager

pytestmark = [pytest.mark.chaos, pytest.mark.kafka, pytest.mark.timeout(300)]

ENDS_WITHIN = 60.0
ADDED = 5
ADOPT = "--adopt-ledger"
OF_THE_OLD_LEDGER = "history: .* goes from None, but its last step led to|replay: .*: the ledger has nothing, history {"
"""What the checker says of history beside a new ledger: it still has what the old one had."""


def ended(managers: Sequence[Manager], sentence: str) -> None:
    """Wait until each of them has ended by itself, and look at the last thing it said."""
    for manager in managers:
        assert manager.wait(ENDS_WITHIN) == 1
        assert re.search(sentence, last_words(manager)), last_words(manager)


def refused(managers: Sequence[Manager], sentence: str) -> None:
    """Start them, and have each of them end without having served."""
    for manager in managers:
        manager.start(ready=False)
    ended(managers, sentence)


def last_words(manager: Manager) -> str:
    return manager.log_tail().rstrip().rpartition("\n")[2]


def start_all(scene: Scene, *arguments: str) -> None:
    for manager in scene.managers.values():
        manager.start(*arguments, ready=False)


async def _remake(scene: Scene, names: Sequence[str]) -> None:
    async with connect(f"kafka://{scene.broker.direct}") as bus:
        await remaking.remake(bus, scene.cluster, names)


async def _add_partitions(scene: Scene, partitions: int) -> None:
    async with connect(f"kafka://{scene.broker.direct}") as bus:
        await remaking.add_partitions(bus, scene.cluster, partitions)


def adopt(scene: Scene) -> None:
    """What the guide says where the ledger is another one: no worker runs, and managers are told so, once."""
    scene.fleet.begin_anew(ended=True)
    start_all(scene, ADOPT)
    scene.fleet.await_answers(1, since=time.monotonic())
    for manager in scene.managers.values():  # and need not be told again
        manager.kill9()
        manager.start(ready=False)


def test_partitions_that_a_stranger_adds_under_load_lose_nothing(harmed: Harmed, tmp_path: Path, note: Note) -> None:
    with playing(harmed.broker, tmp_path, "partitions", note, keepers=1, adjusted=True) as scene:
        managers = list(scene.managers.values())
        with scene.fault(f"a stranger adds partitions ({PARTITIONS} → {ADDED}); then a new ledger") as trouble:
            trouble.begin(0)
            anyio.run(_add_partitions, scene, ADDED)
            ended(managers, f"into a new ledger with {ADDED} partitions")
            refused(managers, f"into a new ledger with {ADDED} partitions")
            manager = managers[0]
            for number, words in enumerate((["backup", "--out", "ledger.gz"], ["restore", "ledger.gz"])):
                done = manager.outfitter(*words)
                assert done.returncode == 0, done.stderr
                if number == 0:
                    anyio.run(_remake, scene, [topics(scene.cluster).allocations])
            scene.fleet.begin_anew()
            start_all(scene, ADOPT)


@pytest.mark.parametrize("which", ["the ledger", "all topics"])
def test_a_ledger_made_anew_is_refused_until_somebody_says_that_no_worker_runs(
    harmed: Harmed, tmp_path: Path, note: Note, which: str
) -> None:
    # of a manager that had not noticed yet what comes before is gone; history has what the old ledger had
    told = f"commits number [0-9]+ after 0|history: .* wrote no record of|{OF_THE_OLD_LEDGER}"
    with playing(harmed.broker, tmp_path, f"{which} anew", note, keepers=2, adjusted=True) as scene:
        names = topics(scene.cluster)
        lost = [names.allocations] if which == "the ledger" else list(names)
        managers = list(scene.managers.values())
        with scene.fault(f"{which} made anew under managers and workers, and adopted", expected=told) as trouble:
            scene.fleet.await_keepers()
            if which != "the ledger":
                scene.fleet.close()  # its client gives up where there is no topic to write to
            trouble.begin(0)
            anyio.run(_remake, scene, lost)
            ended(managers, ADOPT)
            refused(managers, ADOPT)
            adopt(scene)
        with scene.fault(f"{which} made anew while managers are down, and adopted", expected=told) as trouble:
            scene.fleet.await_keepers()
            if which == "the ledger":
                for manager in managers:
                    manager.kill9()
                    trouble.begin()
            else:  # a kill within a transaction would leave no sign: service/troubleshooting.md
                scene.fleet.close()
                for manager in managers:
                    assert manager.stop() == 0
                trouble.begin(0)
            anyio.run(_remake, scene, lost)
            refused(managers, ADOPT)
            adopt(scene)


def test_registrations_made_anew_and_filled_beyond_the_old_position_lose_what_they_held_and_nothing_else(
    harmed: Harmed, tmp_path: Path, note: Note
) -> None:
    """What was not answered is said again, as the guide says; whoever holds devices keeps them."""
    options = {"keepers": 2, "adjusted": True}
    with (
        playing(harmed.broker, tmp_path, "registrations anew", note, **options) as scene,
        scene.fault("registrations made anew and filled beyond the old position, under managers") as trouble,
    ):
        scene.fleet.await_keepers()
        trouble.begin(0)
        anyio.run(remake_and_fill, scene)
        scene.fleet.begin_anew()


async def remake_and_fill(scene: Scene) -> None:
    name = topics(scene.cluster).registrations
    async with connect(f"kafka://{scene.broker.direct}") as bus:
        before = [await bus.offsets(name, partition) for partition in range(PARTITIONS)]
        scene.fleet.close()
        await remaking.remake(bus, scene.cluster, [name])
        for partition, (_, end) in enumerate(before):
            async with anyio.create_task_group() as tasks:
                for _ in range(end + 50):
                    tasks.start_soon(bus.publish, name, partition, Entry(b"nobody", FEED))


def test_a_ledger_whose_records_were_deleted_under_another_policy_is_refused_until_somebody_says_that_no_worker_runs(
    harmed: Harmed, tmp_path: Path, note: Note
) -> None:
    with playing(harmed.broker, tmp_path, "policy", note, keepers=2, adjusted=True) as scene:
        ledger = topics(scene.cluster).allocations
        managers = list(scene.managers.values())
        # the checkpoint is gone, too: what the input still has is decided once more, and history has both
        name = "the ledger's cleanup.policy changed, its records deleted, and adopted"
        with scene.fault(name, expected=OF_THE_OLD_LEDGER) as trouble:
            scene.fleet.await_keepers()
            remaking.set_policy(scene.broker.direct, ledger, "delete")
            trouble.begin(0)
            remaking.delete_records(scene.broker.direct, ledger, dict.fromkeys(range(PARTITIONS), -1))
            for host in scene.hosts:  # which has it restore the ledger, if nothing else does
                strike(harmed, scene, END_TXN, Harm.CONNECTION_LOST, trouble, host=host)
            ended(managers, ADOPT)
            refused(managers, "cleanup.policy is delete")
            remaking.set_policy(scene.broker.direct, ledger, "compact")
            refused(managers, ADOPT)
            adopt(scene)
