"""A worker that takes certain devices only gets these, or an error."""

from __future__ import annotations

from typing import Any

import pytest

from operators.conftest import HOST, WorkerSetup
from outfitter import AllocationFailedError, ChoiceIgnoredError, InvalidRequestError, RuntimeContext
from outfitter.testing import FakeOutfitter
from support.managers.scripted import ScriptedManager

CARDS = [
    {"index": "0", "model": "A100", "group": "x"},
    {"index": "1", "model": "H100", "group": "y"},
    {"index": "2", "model": "H100", "group": "x,y"},
    {"index": "3", "model": "H100", "group": "z"},
]


@pytest.fixture
def fake() -> FakeOutfitter:
    return FakeOutfitter({"gpu": CARDS})


def indexes(context: RuntimeContext) -> list[str]:
    return [info["index"] for info in context.get_external_resource_infos("gpu")]


@pytest.mark.parametrize(
    ("wanted", "got"),
    [
        ({"amount": 1, "where": {"model": "H1*"}}, ["1"]),
        ({"amount": 2, "where": {"model": {"not": "A100"}, "index": {"min": 2}}}, ["2", "3"]),
        ({"amount": 2, "where": {"model": ["H100"]}, "same": ["group"]}, ["1", "2"]),
        ({"amount": 1}, ["0"]),
        (1, ["0"]),
    ],
)
def test_a_worker_gets_the_devices_that_it_takes(setup: WorkerSetup, wanted: Any, got: list[str]) -> None:
    with setup.context(resources={"gpu": wanted}) as context:
        assert indexes(context) == got


def test_what_there_is_not_fails(setup: WorkerSetup) -> None:
    with (
        pytest.raises(AllocationFailedError, match=r"with model is H200"),
        setup.context(resources={"gpu": {"amount": 1, "where": {"model": "H200"}}}),
    ):
        pass


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"amount": 1, "where": {"model": {"mn": 1}}}, "resources.gpu: Object contains unknown field `mn`"),
        ({"amount": 1, "wher": {}}, "resources.gpu: Object contains unknown field `wher`"),
        ({"where": {}}, "resources.gpu: Object missing required field `amount`"),
        ({"amount": 1, "where": {"cc": 8.1}}, "resources.gpu: Expected `int | str | object | array`, got `float`"),
        ({"amount": 1, "where": {"m": {"min": "x"}}}, "resources.gpu: where.m.min is 'x', which is no number"),
        ({"amount": 1, "same": ["local_index"]}, "resources.gpu: local_index is no property to choose by"),
    ],
)
def test_a_wrong_clause_is_refused_before_anything_connects(wanted: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        RuntimeContext(resources={"gpu": wanted})
    assert str(caught.value).startswith(words)


H100 = {"gpu": {"amount": 1, "where": {"model": "H100"}}}


def test_nothing_is_registered_with_a_manager_that_ignores_clauses(url: str, fake: FakeOutfitter) -> None:
    with ScriptedManager(url, HOST, fake, obeys=False) as manager:
        with pytest.raises(ChoiceIgnoredError) as caught, RuntimeContext(resources=H100, bus=url, host=HOST):
            pass
        with RuntimeContext(resources={"gpu": 1}, bus=url, host=HOST) as context:
            assert indexes(context) == ["0"]
        assert [message.resources for message in manager.registrations if message.resources["gpu"].where] == []
    assert str(caught.value) == (
        "the manager of host 'gpu-3' (version 0) ignores where and same, and would grant any device: upgrade it, or "
        "leave where and same out"
    )


def test_what_was_granted_without_regard_to_clauses_is_given_back(url: str, fake: FakeOutfitter) -> None:
    """No record says which manager there is until it has answered."""
    with ScriptedManager(url, HOST, fake, obeys=False, is_known=False) as manager:
        with pytest.raises(ChoiceIgnoredError) as caught, RuntimeContext(resources=H100, bus=url, host=HOST):
            pass
        manager.wait_until(lambda: bool(manager.deregistrations))
    assert str(caught.value) == (
        "gpu was granted without regard to where and same (device gpu:0: model is A100): the manager of host 'gpu-3' "
        "ignores them; upgrade it"
    )


def test_what_happens_to_be_right_is_kept(url: str, fake: FakeOutfitter) -> None:
    wanted = {"gpu": {"amount": 1, "where": {"model": "A*"}}}
    with (
        ScriptedManager(url, HOST, fake, obeys=False, is_known=False),
        RuntimeContext(resources=wanted, bus=url, host=HOST) as context,
    ):
        assert indexes(context) == ["0"]


def test_under_outfitter_run_the_devices_there_are_must_be_those(
    real: WorkerSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    with real.context(resources={"gpu": 1}) as outer:
        for name, value in outer.child_env.items():
            monkeypatch.setenv(name, value)
        with RuntimeContext(resources={"gpu": {"amount": 1, "where": {"model": "A100"}}}) as inner:
            assert indexes(inner) == ["0"]
        with pytest.raises(InvalidRequestError) as caught, RuntimeContext(resources=H100):
            pass
    assert str(caught.value) == (
        "'gpu' is not what is needed (device gpu:0: model is A100): run `outfitter run` with --where and --same for "
        "model is H100"
    )
