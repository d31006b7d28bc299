"""Tests of workers with the fixtures `outfitter` and `outfitter_context`. Copy those in `EXAMPLES` for your own."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

import pytest

import outfitter as package
from outfitter import RuntimeContext
from outfitter.testing import FakeOutfitter

pytest_plugins = ["pytester"]

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]  # each starts pythons, on a machine that may be busy

WORKER = """
import outfitter
from outfitter import RuntimeContext

class Scorer:
    def __init__(self):
        self.devices = RuntimeContext(resources={"gpu": 1}, worker="scorer", ends_with="java").enter_for(self)

    def device(self):
        (info,) = self.devices.get_external_resource_infos("gpu")
        return info["index"]
"""

EXAMPLES = """
import outfitter as package
import pytest
from worker import Scorer


def test_the_scorer_asks_for_one_device_and_uses_it(outfitter):
    assert Scorer().device() == "0"
    assert outfitter.registrations[0].resources["gpu"].amount == 1


def test_the_scorer_stops_when_its_device_is_taken_away(outfitter):
    scorer = Scorer()  # it may have the name of the one before, which was left after its test
    outfitter.end("superseded")
    with pytest.raises(package.AllocationEndedError):
        scorer.device()


def test_a_function_gets_a_context_that_is_entered(outfitter_context):
    assert len(outfitter_context.get_external_resource_infos("gpu")) == 2


class TestOnOtherDevices:
    @pytest.fixture
    def outfitter_resources(self):
        return {"gpu": [{"index": "7"}], "fpga": [{"model": "X1"}]}

    def test_the_scorer_uses_what_there_is(self, outfitter):
        assert Scorer().device() == "7"
"""


@pytest.fixture
def worker(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makepyfile(worker=WORKER)
    return pytester


@pytest.mark.parametrize("arguments", [(), ("-n", "2")], ids=["one process", "xdist"])
def test_the_examples_pass_as_they_are_written(worker: pytest.Pytester, arguments: tuple[str, ...]) -> None:
    worker.makepyfile(EXAMPLES)
    done = worker.runpytest_subprocess("--strict-markers", "-W", "error", *arguments)
    done.assert_outcomes(passed=4)


def test_the_plugin_can_be_switched_off(worker: pytest.Pytester) -> None:
    worker.makepyfile("def test_it(outfitter): pass")
    done = worker.runpytest_subprocess("-p", "no:outfitter")
    done.assert_outcomes(errors=1)
    done.stdout.fnmatch_lines(["*fixture 'outfitter' not found*"])


def test_fixtures_of_the_users_own_with_these_names_win(worker: pytest.Pytester) -> None:
    worker.makeconftest(
        "import pytest\n@pytest.fixture\ndef outfitter(): return 'mine'\n"
        "@pytest.fixture\ndef outfitter_context(): return ', too'"
    )
    worker.makepyfile("def test_it(outfitter, outfitter_context): assert outfitter + outfitter_context == 'mine, too'")
    worker.runpytest_subprocess().assert_outcomes(passed=1)


def test_a_run_of_pytest_that_does_not_use_it_loads_nothing_of_it(worker: pytest.Pytester) -> None:
    worker.makepyfile(
        "import sys\ndef test_it():\n"
        "    assert 'outfitter.pytest_plugin' in sys.modules\n"
        "    assert not {'outfitter.context', 'outfitter.testing', 'msgspec', 'anyio', 'asyncio'} & set(sys.modules)"
    )
    others = [plugin.name for plugin in entry_points(group="pytest11") if plugin.name != "outfitter"]
    worker.runpytest_subprocess(*[f"-pno:{name}" for name in others]).assert_outcomes(passed=1)


def test_the_fake_needs_no_pytest() -> None:
    program = "import sys; sys.modules['pytest'] = None; import outfitter.testing as t; t.FakeOutfitter({'gpu': [{}]})"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=240)


def test_variables_of_a_worker_around_the_tests_do_not_count(
    worker: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTFITTER_INCARNATION", "1")
    monkeypatch.setenv("OUTFITTER_CLUSTER", "of/another")
    worker.makepyfile(EXAMPLES)
    worker.runpytest_subprocess().assert_outcomes(passed=4)


def test_contexts_that_code_makes_are_the_fakes_while_it_is_installed() -> None:
    with FakeOutfitter({"gpu": [{}]}).installed() as fake:
        context = RuntimeContext({"gpu": 1}, worker="w", bus="sqlite:////nowhere/at/all.db").__enter__()
        shared = [RuntimeContext({"gpu": 1}, shared="s").__enter__() for _ in range(2)]
        assert context.get_external_resource_infos("gpu")
        assert [each.worker for each in fake.registrations] == ["w", shared[0].worker]
    assert [worker for worker, _ in fake.departures] == ["w", shared[1].worker]
    with pytest.raises(package.ContextStateError, match="was left"):
        context.get_external_resource_infos("gpu")
    with pytest.raises(package.BusError):
        RuntimeContext({"gpu": 1}, worker="w", bus="sqlite:////nowhere/at/all.db").__enter__()
