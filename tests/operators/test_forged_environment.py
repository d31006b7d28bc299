"""What a forged record, or a careless driver's, may not do to the process of a worker."""

from __future__ import annotations

import logging

import pytest

from operators.conftest import GPUS, HOST
from outfitter import RuntimeContext
from outfitter.testing import FakeOutfitter
from support.managers.scripted import ScriptedManager

FORGED = {"LD_PRELOAD": "/tmp/evil.so", "PATH": "/tmp", "OUTFITTER_BUS": "sqlite:///tmp/x", "A=B": "c", "N": "a\0b"}
HONEST = {"CUDA_VISIBLE_DEVICES": "GPU-a"}


@pytest.fixture
def fake() -> FakeOutfitter:
    return FakeOutfitter({"gpu": GPUS}, env=FORGED | HONEST)


def test_no_record_sets_a_variable_that_decides_which_code_runs(
    url: str, manager: ScriptedManager, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING),
        RuntimeContext({"gpu": 2}, {"infer": {"gpu": 1}}, bus=url, host=HOST) as context,
    ):
        assert context.env == HONEST
        assert context.for_operator("infer").env == HONEST
        changes = context.changes("gpu")
        next(changes)
        manager.fake.set("gpu", GPUS[1:])
        assert next(changes), "another record, of which nothing new is to be said"
    for name in FORGED:
        assert caplog.text.count(f"variable {name!r} of its record is not set") == 1


def test_the_fake_holds_to_the_same_rule(fake: FakeOutfitter) -> None:
    with fake.context({"gpu": 1}) as context:
        assert context.env == HONEST
