"""What a forged record, or a careless driver's, may not do to the process of a worker."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from operators.conftest import GPUS, HOST
from outfitter import InvalidRequestError, RuntimeContext, VariableNotAllowedError
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


USES: dict[str, Callable[[RuntimeContext], object]] = {
    "env": lambda context: context.env,
    "child_env": lambda context: context.child_env,
    "infos": lambda context: context.get_external_resource_infos("gpu"),
    "infos that may be empty": lambda context: context.get_external_resource_infos("gpu", strict=False),
    "all infos": lambda context: context.external_resource_infos(),
    "changes": lambda context: next(context.changes("gpu")),
    "an operator's infos": lambda context: context.for_operator("infer").get_external_resource_infos("gpu"),
    "an operator's env": lambda context: context.for_operator("infer").env,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_a_variable_that_nobody_knows_ends_the_use_with_the_line_to_add(
    use: Callable[[RuntimeContext], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeOutfitter({"gpu": GPUS}, env=HONEST | {"LICENCE_FILE": "/etc/a", "MODE": "fast"})
    with fake.context({"gpu": 2}, {"infer": {"gpu": 1}}) as context:
        with pytest.raises(VariableNotAllowedError, match=r"set OUTFITTER_ALLOW_ENV=LICENCE_FILE,MODE in its env"):
            use(context)
        assert context.record.env["MODE"] == "fast"
    monkeypatch.setenv("OUTFITTER_ALLOW_ENV", "OTHER, LICENCE_FILE")
    with (
        fake.context({"gpu": 2}, {"infer": {"gpu": 1}}) as context,
        pytest.raises(VariableNotAllowedError, match=r"set OUTFITTER_ALLOW_ENV=LICENCE_FILE,MODE,OTHER in its env"),
    ):
        use(context)
    monkeypatch.setenv("OUTFITTER_ALLOW_ENV", "LICENCE_FILE,MODE")
    with fake.context({"gpu": 2}, {"infer": {"gpu": 1}}) as context:
        assert use(context)


def test_on_a_bus_it_is_the_same(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeOutfitter({"gpu": GPUS}, env=HONEST | {"LICENCE_FILE": "/etc/a"})
    with ScriptedManager(url, HOST, fake):
        with (
            RuntimeContext({"gpu": 1}, bus=url, host=HOST) as context,
            pytest.raises(VariableNotAllowedError, match="LICENCE_FILE"),
        ):
            context.get_external_resource_infos("gpu")
        monkeypatch.setenv("OUTFITTER_ALLOW_ENV", "LICENCE_FILE")
        with RuntimeContext({"gpu": 1}, bus=url, host=HOST) as context:
            assert context.env == HONEST | {"LICENCE_FILE": "/etc/a"}


def test_what_decides_about_code_cannot_be_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTFITTER_ALLOW_ENV", "LD_PRELOAD")
    with pytest.raises(InvalidRequestError, match=r"OUTFITTER_ALLOW_ENV: 'LD_PRELOAD' cannot be allowed"):
        RuntimeContext({"gpu": 1})


def test_the_fake_holds_to_the_same_rule(fake: FakeOutfitter) -> None:
    with fake.context({"gpu": 1}) as context:
        assert context.env == HONEST
