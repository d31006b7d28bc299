"""The short form of `make chaos`."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.harm import harmed_cluster
from chaos.medley import play
from chaos.scene import Note, playing

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(300), pytest.mark.slow]


def test_with_brokers_managers_and_requests_coming_to_harm_nothing_is_lost_and_no_promise_broken(
    tmp_path: Path, note: Note
) -> None:
    with (
        harmed_cluster(tmp_path / "kafka", nodes=3) as harmed,
        playing(harmed.broker, tmp_path, "medley", note) as scene,
    ):
        play(harmed, scene)
