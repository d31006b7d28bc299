"""Fixtures of pytest for code that gets its devices from Outfitter. pytest finds them without any import or setting.

    def test_my_operator_computes_on_its_device(outfitter):
        assert MyOperator().run() == ...        # it makes a RuntimeContext, which is the fake's
        assert outfitter.registrations[0].resources["gpu"].amount == 1

`-p no:outfitter` switches them off, and a fixture of your own with one of these names replaces it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # pytest loads this module in each of its runs, so it imports nothing of ours
    from outfitter.context import RuntimeContext
    from outfitter.testing import Devices, FakeOutfitter


@pytest.fixture
def outfitter_resources() -> dict[str, Devices]:
    """The devices of the fixture `outfitter`: two of `gpu`. Write a fixture of this name to have others."""
    return {"gpu": [{}, {}]}


@pytest.fixture
def outfitter(outfitter_resources: dict[str, Devices], monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeOutfitter]:
    """A `FakeOutfitter`. During the test it answers each `RuntimeContext`, whoever makes it.

    Nothing in this process connects. Programs that the test starts do.
    """
    from outfitter.testing import FakeOutfitter

    for name in ("BUS", "CLUSTER", "HOST", "WORKER", "OPERATOR", "INCARNATION"):
        monkeypatch.delenv(f"OUTFITTER_{name}", raising=False)
    with FakeOutfitter(outfitter_resources).installed() as fake:
        yield fake


@pytest.fixture
def outfitter_context(outfitter: FakeOutfitter) -> Iterator[RuntimeContext]:
    """An entered `RuntimeContext` with all devices of the fixture `outfitter`."""
    with outfitter.context() as context:
        yield context
