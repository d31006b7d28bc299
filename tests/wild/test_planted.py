"""The judge of the crash matrix finds planted bugs, in cells like all others."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from wild.integrations import CONTEXT, LEASE, programs
from wild.report import Row, document, table
from wild.scene import PLAIN, Integration, Scene, play

pytestmark = pytest.mark.timeout(240)


def free_too_early(scene: Scene) -> None:
    """Have the manager free all devices of workers that live: nobody tells the callers of `outfitter-lease`."""
    for record in scene.manager.records():
        if record["worker"] != "successor":
            assert scene.manager.outfitter("deregister", "--worker", record["worker"]).returncode == 0


CARELESS_WORKER = structs.replace(CONTEXT, name="gives back what it uses", start=programs(*PLAIN, "careless"))
EARLY_MANAGER = structs.replace(LEASE, name="a manager frees too early", crashes={"exception": free_too_early})


@pytest.mark.parametrize("planted", [CARELESS_WORKER, EARLY_MANAGER], ids=lambda planted: planted.name)
def test_a_device_that_is_freed_while_its_user_lives_makes_the_cell_red(planted: Integration, tmp_path: Path) -> None:
    rows: list[Row] = []
    with pytest.raises(AssertionError, match="had it"):
        play(planted, "exception", tmp_path, rows.append)
    (row,) = rows
    assert row.overlaps
    assert "OVERLAP" in table(rows)
    assert document(rows, failed=1)["overlaps"] == len(row.overlaps)


def test_a_cell_that_is_like_these_and_has_no_bug_is_green(tmp_path: Path) -> None:
    rows: list[Row] = []
    play(LEASE, "exception", tmp_path, rows.append)
    (row,) = rows
    assert (row.outcome, row.overlaps) == ("moved", ())
    assert row.away_s > 0
