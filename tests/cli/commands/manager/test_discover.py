"""`outfitter discover`: one call of a driver."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from support.drivers.gpu_machine import executable
from support.managers.process import OUTFITTER, add_device, environment, files_config
from support.processes.ending import wait_until_ended

SLOW_DRIVER = """
import anyio
from outfitter.drivers import ExternalResourceDriver, ExternalResourceDriverFactory, ExternalResourceInfo

class PanicException(BaseException):
    pass

class Speechless(Exception):
    def __str__(self):
        raise SystemExit("no words at all")

class Driver(ExternalResourceDriver):
    async def aclose(self):
        raise SystemExit("no goodbye")

    async def retrieve_resource_info(self, amount, worker):
        if amount == 1:
            await anyio.sleep_forever()
        if amount == 2:
            raise RuntimeError("the card is on fire")
        if amount == 3:
            return None
        if amount == 8:
            raise PanicException("unwrap of None")
        if amount == 9:
            raise SystemExit(0)
        if amount == 7:
            return ["card0"] * 7
        print("the card says hello")
        return {ExternalResourceInfo({"index": str(index)}) for index in range(5)}

class Factory(ExternalResourceDriverFactory):
    def create_external_resource_driver(self, config):
        if config.get("makes") == "nothing":
            return None
        if config.get("makes") == "trouble":
            raise RuntimeError("no card here")
        if config.get("makes") == "an end":
            raise SystemExit(4)
        if config.get("makes") == "a panic":
            raise PanicException("unwrap of None")
        if config.get("makes") == "no words":
            raise Speechless
        driver = Driver()
        if config.get("makes") == "an odd time-out":
            driver.call_timeout = "soon"
        return driver
"""


MANY_DRIVER = """
from outfitter.drivers import Device, ExternalResourceDriver, ExternalResourceDriverFactory, ExternalResourceInfo
from outfitter.drivers import Inventory

class Driver(ExternalResourceDriver, Inventory):
    async def retrieve_resource_info(self, amount, worker):
        return [ExternalResourceInfo({"index": str(index)}) for index in range(10_001)]

    async def inventory(self, host):
        yield [Device(name=str(index), properties={}) for index in range(10_001)]

class Factory(ExternalResourceDriverFactory):
    def create_external_resource_driver(self, config):
        return Driver()
"""


def discover(config: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*OUTFITTER, "discover", *arguments, "--config", str(config)],
        env=environment(**more), capture_output=True, text=True, timeout=60,
    )  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "outfitter.toml"
    path.write_text(files_config(tmp_path / "gpus", gpus=3, amount=2))
    return path


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    (tmp_path / "slow_driver.py").write_text(SLOW_DRIVER)
    path = tmp_path / "outfitter.toml"
    path.write_text(
        'external-resources = ["card"]\n[external-resource.card]\namount = 9\ndriver = "slow_driver:Factory"\n'
        'driver-timeout = "100ms"\n'
    )
    return path


def test_it_prints_all_devices_as_property_objects_with_their_health(config: Path, tmp_path: Path) -> None:
    add_device(tmp_path / "gpus", 1, health="unhealthy", reason="XID 79")
    done = discover(config, "gpu", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = [(info["index"], info["health"], info.get("health.reason")) for info in json.loads(done.stdout)]
    assert found == [("0", "healthy", None), ("1", "unhealthy", "XID 79"), ("2", "healthy", None)]


def test_it_says_that_a_worker_gets_none_where_too_few_are_healthy(config: Path, tmp_path: Path) -> None:
    for index in (0, 1):
        add_device(tmp_path / "gpus", index, health="unhealthy", reason="XID 79")
    done = discover(config, "gpu")
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 4)
    assert "1 of 3 gpu is healthy; a worker gets 2" in done.stderr


def test_a_driver_that_names_no_device_is_a_failure(tmp_path: Path) -> None:
    config = tmp_path / "outfitter.toml"
    config.write_text(files_config(tmp_path / "none", gpus=0))
    done = discover(config, "gpu")
    assert (done.returncode, done.stdout) == (1, "")
    assert "the driver of gpu names no device" in done.stderr


@pytest.mark.parametrize("amount", [(), ("--amount", "10")])
def test_more_devices_than_a_manager_takes_are_refused_with_its_words(tmp_path: Path, amount: tuple[str, ...]) -> None:
    (tmp_path / "many_driver.py").write_text(MANY_DRIVER)
    config = tmp_path / "outfitter.toml"
    config.write_text(
        'external-resources = ["card"]\n[external-resource.card]\namount = 1\ndriver = "many_driver:Factory"\n'
    )
    done = discover(config, "card", *amount, PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert "the driver of card reported more than 10000 devices, which is the limit" in done.stderr


def test_it_prints_as_many_as_are_asked_for(config: Path) -> None:
    assert len(json.loads(discover(config, "gpu", "--amount", "3", "--json").stdout)) == 3


def test_it_prints_a_table_for_people(config: Path) -> None:
    lines = discover(config, "gpu").stdout.splitlines()
    assert lines[0].split()[:2] == ["INDEX", "NAME"]
    assert len(lines) == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["gpu", "--amount", "4"], "4 wanted"),
        (["gpu", "--amount", "0"], "--amount is 0; valid is a whole number from 1"),
        (["gpu", "--amount", "-1"], "--amount is -1; valid is a whole number from 1"),
        (["fpga"], "'fpga' is not configured; configured: gpu"),
    ],
)
def test_a_failure_prints_nothing_but_the_reason(config: Path, arguments: list[str], words: str) -> None:
    done = discover(config, *arguments, "--json")
    assert (done.returncode, done.stdout) == (1, "")
    assert words in done.stderr


@pytest.mark.parametrize(
    ("amount", "words"),
    [
        ("1", "has not answered within 0.1 s"),
        ("2", "the card is on fire"),
        ("3", "3 card requested, but its driver returned 0"),
        ("6", "6 card requested, but its driver returned 5"),
        ("7", "returned 'card0', which is no ExternalResourceInfo"),
        ("8", "the driver of card failed: PanicException: unwrap of None"),
        ("9", "the driver of card failed: SystemExit: 0"),
    ],
)
def test_whatever_a_driver_does_is_told_in_words(slow: Path, amount: str, words: str) -> None:
    done = discover(slow, "card", "--amount", amount, "--json", PYTHONPATH=str(slow.parent))
    assert (done.returncode, done.stdout) == (1, "")
    assert words in done.stderr
    assert "the driver of card did not close well: SystemExit: no goodbye" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("makes", "words"),
    [
        ("nothing", "but None"),
        ("trouble", "RuntimeError: no card here"),
        ("an end", "SystemExit: 4"),
        ("a panic", "PanicException: unwrap of None"),
        ("an odd time-out", "call_timeout is 'soon'"),
        ("no words", "its message cannot be read (SystemExit)"),
    ],
)
def test_a_factory_that_makes_no_driver_is_to_blame_itself(slow: Path, makes: str, words: str) -> None:
    slow.write_text(slow.read_text().replace("driver-timeout", "# driver-timeout"))
    with slow.open("a") as file:
        file.write(f'param.makes = "{makes}"\n')
    done = discover(slow, "card", "--json", PYTHONPATH=str(slow.parent))
    assert (done.returncode, done.stdout) == (1, "")
    assert "the driver of card cannot be built" in done.stderr
    assert words in done.stderr
    assert "defect" not in done.stderr


def test_more_devices_than_wanted_are_all_printed_and_a_drivers_own_words_are_no_data(slow: Path) -> None:
    done = discover(slow, "card", "--amount", "4", "--json", PYTHONPATH=str(slow.parent))
    assert len(json.loads(done.stdout)) == 5
    assert "the card says hello" in done.stderr


@pytest.fixture
def scripted(tmp_path: Path) -> Path:
    """A configuration whose script is `tmp_path/script`. It may take ten minutes."""
    config = tmp_path / "outfitter.toml"
    config.write_text(
        'external-resources = ["gpu"]\n[external-resource.gpu]\namount = 1\ndriver = "gpu"\n'
        f'param.discovery-script.path = "{tmp_path}/script"\nparam.discovery-script.timeout = "600s"\n'
    )
    return config


@pytest.mark.parametrize(("number", "handling"), [("TERM", "-"), ("HUP", "-"), ("HUP", "''")])
def test_a_signal_that_ends_the_command_ends_its_script(
    scripted: Path, tmp_path: Path, number: str, handling: str
) -> None:
    asked, proceed = tmp_path / "asked", tmp_path / "proceed"
    os.mkfifo(asked)
    os.mkfifo(proceed)
    executable(tmp_path / "script", f"echo $$ > {asked}; read _ < {proceed}; echo 0")
    is_ignored = handling == "''"
    writer = os.open(proceed, os.O_RDWR)
    command = ["sh", "-c", f'trap {handling} {number}; exec "$@"', "sh", *OUTFITTER, "discover", "gpu"]
    with subprocess.Popen([*command, "--config", str(scripted)], env=environment(), stdout=subprocess.PIPE) as process:
        try:
            pid = int(asked.read_text())
            process.send_signal(signal.Signals[f"SIG{number}"])
            if is_ignored:
                os.write(writer, b"\n")
            assert process.wait(60) == (0 if is_ignored else -signal.Signals[f"SIG{number}"])
        finally:
            process.kill()
            os.close(writer)
    wait_until_ended(pid)


def test_the_first_process_of_a_namespace_ends_as_well(scripted: Path, tmp_path: Path) -> None:
    """The kernel ignores signals that such a process sends to itself."""
    executable(tmp_path / "script", "kill -TERM 1; sleep 1000")
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    done = subprocess.run(
        ["unshare", *user, "--pid", "--fork", "--kill-child", *OUTFITTER, "discover", "gpu", "--config", str(scripted)],
        env=environment(), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, "")


def test_a_resource_without_a_driver_and_one_that_is_switched_off_say_so(tmp_path: Path) -> None:
    config = tmp_path / "flink-conf.yaml"
    config.write_text(
        "external-resources: a;b\nexternal-resource.a.amount: 1\n"
        "external-resource.b.amount: 0\nexternal-resource.b.driver-factory.class: static\n"
    )
    assert "no driver" in discover(config, "a", "--json").stderr
    done = discover(config, "b", "--json")
    assert (done.returncode, done.stdout) == (1, "")
    assert "switched off" in done.stderr
