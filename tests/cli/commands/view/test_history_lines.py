"""The lines of `outfitter history`."""

from __future__ import annotations

from outfitter_proto.records import Refresh
from outfitter_service.cli.commands.view.history import _cells
from support.wire_samples import AT


def test_the_step_in_which_a_held_device_falls_ill_says_so() -> None:
    ill = {"id": "GPU-1", "index": "1", "health": "unhealthy", "health.reason": "XID 79"}
    step = Refresh(
        at=AT, host="h", worker="w", incarnation="1", writer="host/h", event="driver-report",
        explanation="infos changed", changed={"resources": {"gpu": [{"id": "GPU-0", "index": "0"}, ill]}},
    )  # fmt: skip
    assert _cells(step, with_host=True) == [
        "-", "h/w", "driver-report: infos changed: gpu 1 is unhealthy (XID 79)",
    ]  # fmt: skip
