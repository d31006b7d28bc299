"""Factories are found by entry point, by Python path and by Flink's class name, and only the asked one is loaded."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from outfitter_drivers import registry
from outfitter_drivers.api import DriverParams, ExternalResourceDriver, ExternalResourceDriverFactory
from outfitter_drivers.gpu.factory import GPUDriverFactory
from outfitter_drivers.static import StaticDriverFactory


@pytest.mark.parametrize(
    ("name", "factory"),
    [
        ("gpu", GPUDriverFactory),
        (" nvidia ", GPUDriverFactory),
        ("org.apache.flink.externalresource.gpu.GPUDriverFactory", GPUDriverFactory),
        ("static", StaticDriverFactory),
        ("outfitter_drivers.static:StaticDriverFactory", StaticDriverFactory),
    ],
)
def test_a_factory_is_found_under_each_of_its_names(name: str, factory: type) -> None:
    assert type(registry.load_factory(name)) is factory


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gup", "no driver 'gup'; did you mean 'gpu'"),
        ("", "no driver ''"),
        ("no.such.module:Factory", "cannot be loaded: ModuleNotFoundError"),
        ("outfitter_drivers.static:Nothing", "cannot be loaded: AttributeError"),
        ("outfitter_drivers.api:ExternalResourceDriverFactory", "cannot be loaded: TypeError"),
        ("outfitter_drivers.static:StaticDriver", "cannot be loaded: TypeError"),
        ("outfitter_drivers.registry:GROUP", "is no ExternalResourceDriverFactory"),
        ("os; import x:y", "is no Python path"),
        ("a:b:c", "is no Python path"),
        (":x", "is no Python path"),
    ],
)
def test_what_cannot_be_had_is_an_error_that_says_why(name: str, says: str) -> None:
    with pytest.raises(registry.DriverLookupError, match=says):
        registry.load_factory(name)


def test_a_module_that_fails_in_its_import_is_that_drivers_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_driver.py").write_text("raise RuntimeError('out of order')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(registry.DriverLookupError, match="out of order"):
        registry.load_factory("broken_driver:Factory")


EXITS = {
    "SystemExit(4)": "SystemExit: 4",
    "SystemExit(0)": "SystemExit: 0",
    "KeyboardInterrupt": "KeyboardInterrupt",
    "GeneratorExit": "GeneratorExit",
    "type('PanicException', (BaseException,), {})('unwrap of None')": "PanicException: unwrap of None",
    "BaseExceptionGroup('two', [SystemExit(2)])": "BaseExceptionGroup: two",
}


@pytest.mark.parametrize(("raised", "words"), EXITS.items())
def test_a_module_that_wants_to_end_the_process_is_that_drivers_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: str, words: str
) -> None:
    (tmp_path / "ending_driver.py").write_text(f"raise {raised}")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(registry.DriverLookupError, match=re.escape(f"cannot be loaded: {words}")):
        registry.load_factory("ending_driver:Factory")


class Ending(ExternalResourceDriverFactory):
    """Raises what the parameter says."""

    def create_external_resource_driver(self, config: DriverParams) -> ExternalResourceDriver:
        raise eval(config["raised"])  # noqa: S307 - a text of this test


@pytest.mark.parametrize(("raised", "words"), EXITS.items())
def test_a_factory_that_wants_to_end_the_process_is_that_drivers_error(raised: str, words: str) -> None:
    with pytest.raises(registry.DriverExitError, match=f"^{re.escape(words)}"):
        registry.create_driver("drivers.test_registry:Ending", DriverParams({"raised": raised}))


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A process that Ctrl-C ends. One that a shell starts in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_by_a_signal_still_ends_the_process() -> None:
    with pytest.raises(KeyboardInterrupt), registry.contained():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("interruptible")
def test_a_handler_for_interrupts_that_a_driver_sets_stays() -> None:
    with registry.contained():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_factory_that_makes_no_driver_is_that_drivers_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty_driver.py").write_text(
        "from outfitter_drivers.api import ExternalResourceDriverFactory\n"
        "class Factory(ExternalResourceDriverFactory):\n    def create_external_resource_driver(self, config): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(registry.DriverLookupError, match="returned no ExternalResourceDriver but None"):
        registry.create_driver("empty_driver:Factory", DriverParams({}))


def test_a_name_that_two_distributions_offer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [EntryPoint(name="gpu", value=value, group=registry.GROUP) for value in ("a:F", "b:F", "a:F")]
    monkeypatch.setattr(registry, "entry_points", lambda **_: points)
    with pytest.raises(registry.DriverLookupError, match="more than one distribution: a:F, b:F"):
        registry.find("gpu")


def test_names_are_known_and_found_without_importing_any_driver() -> None:
    code = (
        "import sys; from outfitter_drivers import registry;"
        "assert {'gpu', 'static', 'files', 'nvidia'} <= set(registry.known_names()); registry.find('gpu');"
        "print(*(m for m in sys.modules if m.startswith('outfitter_drivers.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == {"outfitter_drivers.api", "outfitter_drivers.registry"}


@pytest.mark.parametrize(
    ("name", "is_java"),
    [
        ("org.apache.flink.externalresource.fpga.FPGADriverFactory", True),
        ("your.domain.Outer$Inner", True),
        ("gpu", False),
        ("pkg.mod:Factory", False),
        ("nvidia.gpu", False),
        ("FPGADriverFactory", False),
        ("a..B", False),
        ("a.B-C", False),
        ("", False),
    ],
)
def test_java_class_names_are_told_from_other_names(name: str, is_java: bool) -> None:
    assert registry.is_java_class_name(name) is is_java
