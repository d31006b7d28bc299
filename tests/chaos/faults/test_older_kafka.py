"""The other release of Kafka that is supported: a little of everything."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.chosen import KAFKA
from chaos.harm import harmed_cluster
from chaos.medley import play
from chaos.scene import Note, playing
from support.kafka.broker import NEW, OLD

pytestmark = [pytest.mark.chaos, pytest.mark.kafka, pytest.mark.timeout(300)]


def test_the_other_release_of_kafka_is_survived_as_well(tmp_path: Path, note: Note) -> None:
    other = OLD if KAFKA == NEW else NEW
    with (
        harmed_cluster(tmp_path / "kafka", nodes=3, kafka=other) as harmed,
        playing(harmed.broker, tmp_path, "medley", note) as scene,
    ):
        play(harmed, scene)
