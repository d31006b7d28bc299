"""The request layer: answers lost or late, connections cut, requests that never arrive or arrive late.

The rows of the table are Kafka's requests, its columns `Harm`. All of it strikes one manager's requests, on one broker
behind a proxy, while the others work on beside it.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from chaos.chosen import ADDS_PARTITIONS
from chaos.harm import STRIKES_WITHIN, Harmed, strike
from chaos.scene import Note, playing
from support.kafka.proxy import (
    ADD_PARTITIONS_TO_TXN,
    END_TXN,
    FETCH,
    FIND_COORDINATOR,
    INIT_PRODUCER_ID,
    NAMES,
    PRODUCE,
    Harm,
)

pytestmark = [pytest.mark.chaos, pytest.mark.kafka, pytest.mark.timeout(300)]

ADDING = [ADD_PARTITIONS_TO_TXN] if ADDS_PARTITIONS else []


@pytest.mark.parametrize("key", [INIT_PRODUCER_ID, *ADDING, PRODUCE, END_TXN, FETCH], ids=NAMES.get)
def test_no_harm_to_a_request_or_its_answer_loses_or_doubles_anything(
    harmed: Harmed, tmp_path: Path, note: Note, key: int
) -> None:
    with playing(harmed.broker, tmp_path, NAMES[key], note) as scene:
        for harm in (harm for harm in Harm if harm is not Harm.ERROR):
            with scene.fault(f"{NAMES[key]}: {harm.value}") as trouble:
                strike(harmed, scene, key, harm, trouble)


CODES = {
    FIND_COORDINATOR: (13, 16, -1),
    INIT_PRODUCER_ID: (7, 16, 52, -1),
    ADD_PARTITIONS_TO_TXN: (3, 7, 13, 14, 16, 51, 52, 90, 120, -1),
    PRODUCE: (3, 6, 7, 9, 13, 19, 51, 59, 74, 75, 100, 120, -1),
    END_TXN: (7, 13, 14, 16, 51, 52, 90, 120, -1),
}
"""Error codes by Kafka's protocol guide; most are of passing trouble."""


@pytest.mark.parametrize("key", [INIT_PRODUCER_ID, FIND_COORDINATOR, *ADDING, PRODUCE, END_TXN], ids=NAMES.get)
def test_no_error_code_in_an_answer_loses_or_doubles_anything(
    harmed: Harmed, tmp_path: Path, note: Note, key: int
) -> None:
    codes = CODES[key]
    name = f"{NAMES[key]}: answered with {', '.join(map(str, codes))}"
    with playing(harmed.broker, tmp_path, name, note) as scene, scene.fault(name) as trouble:
        for code in codes:
            strike(harmed, scene, key, Harm.ERROR, trouble, code=code)
            scene.fleet.await_answers(1, since=time.monotonic())


@pytest.mark.parametrize("harm", [Harm.LOST_ANSWER, Harm.NEVER_SENT], ids=lambda harm: harm.value.replace(" ", "-"))
def test_a_commit_whose_outcome_is_unknown_is_found_out_and_never_repeated(
    harmed: Harmed, tmp_path: Path, note: Note, harm: Harm
) -> None:
    done = "done" if harm is Harm.LOST_ANSWER else "not done"
    with playing(harmed.broker, tmp_path, f"unknown {done}", note) as scene:
        host = scene.dice.choice(scene.hosts)
        manager = scene.managers[host]
        with scene.fault(f"a commit of unknown outcome ({done})") as trouble:
            fault = harmed.proxy.harm(END_TXN, harm, client=scene.writer_id(host), times=1000)
            assert fault.struck.wait(STRIKES_WITHIN)
            trouble.begin()
            manager.wait_for(lambda: manager.metric("outfitter_commits_total", outcome="unknown"))
            harmed.proxy.heal()
