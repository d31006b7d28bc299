"""A discovery script may do what it likes: the call ends in time, says why, and leaves nothing behind."""

import itertools
import json
import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outfitter_drivers import program
from outfitter_drivers.api import (
    DriverError,
    DriverParams,
    NotEnoughDevicesError,
    PermanentDriverError,
    TemporaryDriverError,
    Worker,
)
from outfitter_drivers.gpu.discovery_script import ScriptDriver
from outfitter_drivers.gpu.factory import GPUDriverFactory
from outfitter_drivers.script import parse_indexes, run_script, shortened
from support.drivers.gpu_machine import executable
from support.processes.ending import has_ended, wait_until_ended

TABLE = json.loads((Path(__file__).parent.parent / "conformance/discovery-stdout.json").read_text())["cases"]
WORKER = Worker(host="h", resource="gpu", worker="w", incarnation="i")


async def until_written(file: Path) -> int:
    with anyio.fail_after(10):
        while not file.exists() or not file.read_text().endswith("\n"):  # noqa: ASYNC110  another process
            await anyio.sleep(0.01)
    return int(file.read_text())


@pytest.mark.parametrize("case", TABLE, ids=lambda case: case["id"])
def test_conformance_of_what_is_read_from_standard_output(case: dict[str, Any]) -> None:
    if case["ours"] == "error":
        with pytest.raises(PermanentDriverError, match=r"\\x00"):
            parse_indexes(case["stdout"].encode())
    else:
        assert parse_indexes(case["stdout"].encode()) == case["ours"]


@pytest.mark.parametrize(
    ("stdout", "indexes"),
    [
        (b" \t\n\r\n 3 ,1\n", ["3", "1"]),
        (b"0,1\r2,3", ["0", "1"]),
        ("\u00a0\u200b\n0,1\n".encode(), ["0", "1"]),
        (b"b,a,b,a\n", ["b", "a"]),
        ("gpu–0,\u00a01\n".encode(), ["gpu–0", "1"]),
        (b"/dev/davinci0,/dev/davinci1\n", ["/dev/davinci0", "/dev/davinci1"]),
        (b"GPU-8a56,MIG-GPU-8a56/1/0,00000000:01:00.0\n", ["GPU-8a56", "MIG-GPU-8a56/1/0", "00000000:01:00.0"]),
        (b"vendor.com/gpu=0,card_1@node\n", ["vendor.com/gpu=0", "card_1@node"]),
        (b'{"name": "gpu", "addresses": [0, 1]}\n', ["0", "1"]),
        (b'{"name": 5, "addresses": [0, "1", 10],\n "units": ["x"]}\nlog line\n', ["0", "1", "10"]),
        (b'{"name": "gpu", "addresses": ["0"]} trailing words', ["0"]),
        (b'{"name": "gpu",\n "addresses": ["1", " 0 ", "1", ""]}\n', ["1", "0"]),
        (b'{"name": "gpu", "addresses": []}', []),
        (b"0,1\nlog \xff\n", ["0", "1"]),
        ("0\n\ufeff\ufffd\n".encode(), ["0"]),
        (b'{"name": "gpu", "addresses": ["0"]}\n\xff\n', ["0"]),
    ],
)
def test_indexes_are_opaque_words_on_the_first_line_that_says_anything(stdout: bytes, indexes: list[str]) -> None:
    assert parse_indexes(stdout) == indexes


@pytest.mark.parametrize(
    "stdout",
    [
        b"\xef\xbb\xbf0,1\n",
        b"0,\xff\n",
        "0,\ufffd\n".encode(),
        b"0,1\n\0",
        b"{",
        b'{"name": "gpu"}',
        b'{"addresses": [0, 1.0]}',
        b'{"addresses": [0, true]}',
        b'{"addresses": [0, null]}',
        b'{"addresses": null}',
        b'{"addresses": [[0]]}',
        b'{"error": "Failed to initialize NVML"}',
        b'{"addresses": "0,1"}',
        b'{"addresses": ["\\u0000"]}',
        b'{"addresses": ["\xff"]}',
        b"\xff\n0,1\n",
        b'{\xff\n"addresses": ["0"]}',
        b'{"a":' * 100_000,
    ],
)
def test_output_that_is_no_text_or_no_address_list_is_an_error_for_good(stdout: bytes) -> None:
    with pytest.raises(PermanentDriverError, match="the discovery script printed"):
        parse_indexes(stdout)


NVML = "Failed to initialize NVML: Driver/library version mismatch"
MESSAGES = [
    f"{NVML}\nNVML library version: 550.54\n",
    json.dumps({"name": "gpu", "addresses": [NVML, "NVML library version: 550.54"]}),
    json.dumps({"name": "gpu", "addresses": ["0", NVML]}),
    json.dumps({"name": "gpu", "addresses": ["N/A"]}),
    json.dumps({"name": "gpu", "addresses": ["0,1"]}),
    'Loading cuda/12.2\n{"name": "gpu", "addresses": ["0"]}\n',
    'module-loaded\n{"name": "gpu", "addresses": ["0"]}\n',
    "No devices were found\n",
    "No,devices\n",
    "Failed,to\n",
    "NVIDIA-SMI,has\n",
    f"0,{NVML}\n",
    "Error: the driver is busy, try again, or reboot\n",
    "Error,none\n",
    "ERR!\n",
    "[N/A]\n",
    "[Unknown Error],0\n",
    "<html>\n<body>502 Bad Gateway</body></html>\n",
    "<!DOCTYPE html>\n",
    'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\n',
    "sh: 1: nvidia-smi: not found\n",
    '["0", "1"]\n',
    "usage:\n",
    "a\u2003b\n",
]


@pytest.mark.parametrize("printed", MESSAGES)
def test_a_message_is_no_list_of_devices_and_an_error_that_shows_it_until_it_is_gone(printed: str) -> None:
    with pytest.raises(TemporaryDriverError, match="the discovery script named no device but") as failure:
        parse_indexes(printed.encode())
    assert shortened(printed) in str(failure.value)


@given(st.lists(st.sampled_from([*"abc", "0", "GPU-8a56", "/dev/davinci0", *NVML.split()]), min_size=1).map(",".join))
def test_no_word_of_a_message_becomes_a_device_beside_names(printed: str) -> None:
    words = set(printed.split(","))
    try:
        assert set(parse_indexes(printed.encode())) == words
    except TemporaryDriverError:
        assert not words <= {*"abc", "0", "GPU-8a56", "/dev/davinci0"}
    else:
        assert not words & {"Failed", "NVML:"}


def test_the_error_shows_the_bytes_that_are_no_text_wherever_they_are() -> None:
    with pytest.raises(PermanentDriverError, match=r"bytes that are not UTF-8: b'x{40}\\xfe\\xffy{38}'"):
        parse_indexes(b"0," + b"x" * 5000 + b"\xfe\xff" + b"y" * 5000 + b"\n")
    with pytest.raises(PermanentDriverError, match=r"a NUL: b'0\\nlog \\x00\\n'"):
        parse_indexes(b"0\nlog \0\n")


@pytest.mark.parametrize("address", ["\\ud800", "a\\udfff"])
def test_half_a_character_is_no_address(address: str) -> None:
    with pytest.raises(PermanentDriverError, match="with an invisible sign in it"):
        parse_indexes(b'{"addresses": ["0", "%b"]}' % address.encode())


@pytest.mark.parametrize("line", ["#!/nonexistent/sh", "#!/bin/sh\r"])
async def test_a_script_whose_interpreter_is_missing_says_which_one(tmp_path: Path, line: str) -> None:
    script = executable(tmp_path / "s", "echo 0")
    script.write_bytes(f"{line}\necho 0\n".encode())
    with pytest.raises(PermanentDriverError) as failure:
        await run_script([str(script)], timeout=10)
    assert str(failure.value).endswith(f"does not exist; its first line is {line.encode()!r}")
    with pytest.raises(PermanentDriverError, match=r"cannot run .*/none: No such file or directory"):
        await run_script([str(tmp_path / "none")], timeout=10)


async def test_a_program_whose_loader_is_missing_says_so(tmp_path: Path) -> None:
    program, found = tmp_path / "program", re.search(rb"/lib[^\0]*/ld-[^\0]+", Path("/bin/sh").read_bytes())
    assert found is not None
    program.write_bytes(Path("/bin/sh").read_bytes().replace(found[0], found[0][:-1] + b"!"))
    program.chmod(0o755)
    with pytest.raises(PermanentDriverError, match="program: the loader that it needs does not exist"):
        await run_script([str(program)], timeout=10)


def test_a_further_line_is_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert parse_indexes(b"0\nwhat is this\n") == ["0"]
    assert "ignored: what is this" in caplog.text


@pytest.mark.parametrize("timeout", [2.5])
async def test_a_hanging_script_is_ended_with_all_that_it_started(tmp_path: Path, timeout: float) -> None:
    child = tmp_path / "child"
    script = executable(tmp_path / "s", f"sleep 1000 & echo $! > {child}; trap '' TERM; echo so far; wait")
    with pytest.raises(TemporaryDriverError, match=r"did not end within 2\.5 s and was killed; stdout: so far"):
        await run_script([str(script)], timeout=timeout)
    wait_until_ended(int(child.read_text()))


async def test_a_child_that_keeps_the_output_open_is_ended_after_the_script(tmp_path: Path) -> None:
    script = executable(tmp_path / "s", f"sleep 1000 & echo $! > {tmp_path}/child; echo 0,1")
    with anyio.fail_after(60):
        outcome = await run_script([str(script)], timeout=100)
    assert (outcome.code, outcome.stdout) == (0, b"0,1\n")
    wait_until_ended(int((tmp_path / "child").read_text()))


async def test_what_a_script_says_last_is_read_although_time_has_flown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends between two looks at its output, and the caller is held up between two looks at the clock."""
    script = executable(tmp_path / "s", "sleep 0.5; echo 0,1")
    seconds, waitid = itertools.count(), os.waitid
    monkeypatch.setattr(program, "time", SimpleNamespace(monotonic=lambda: float(next(seconds))))
    monkeypatch.setattr(os, "waitid", lambda kind, pid, options: waitid(kind, pid, options & ~os.WNOHANG))
    outcome = await run_script([str(script)], timeout=100_000)
    assert (outcome.code, outcome.stdout) == (0, b"0,1\n")


async def test_a_child_that_left_the_session_does_not_hold_up_the_answer(tmp_path: Path) -> None:
    child = tmp_path / "child"
    left = f"setsid sh -c 'echo $$ > {child}; exec sleep 1000' & while [ ! -s {child} ]; do :; done"
    script = executable(tmp_path / "s", f"{left}; echo 0,1")
    try:
        with anyio.fail_after(60):
            outcome = await run_script([str(script)], timeout=100)
        assert (outcome.code, outcome.stdout) == (0, b"0,1\n")
    finally:
        os.kill(await until_written(child), signal.SIGKILL)


async def test_more_output_than_a_pipe_holds_is_read_while_the_script_runs(tmp_path: Path) -> None:
    script = executable(tmp_path / "s", "echo 7; head -c 300000 /dev/zero | tr '\\0' x; head -c 300000 /dev/zero >&2")
    outcome = await run_script([str(script)], timeout=30)
    assert parse_indexes(outcome.stdout) == ["7"]
    assert len(outcome.stdout) == 300_002


async def test_a_flooding_script_is_ended_at_a_megabyte(tmp_path: Path) -> None:
    script = executable(tmp_path / "s", f"echo $$ > {tmp_path}/pid; exec yes")
    with pytest.raises(PermanentDriverError, match="printed more than 1048576 bytes") as raised:
        await run_script([str(script)], timeout=60)
    assert len(str(raised.value)) < 2_000
    wait_until_ended(int((tmp_path / "pid").read_text()))


async def test_exactly_a_megabyte_is_not_too_much(tmp_path: Path) -> None:
    script = executable(tmp_path / "s", "head -c 1048576 /dev/zero")
    assert len((await run_script([str(script)], timeout=30)).stdout) == 1_048_576


async def test_a_script_that_floods_standard_error_is_read_to_its_end(tmp_path: Path) -> None:
    script = executable(tmp_path / "s", "head -c 5000000 /dev/zero | tr '\\0' e >&2; echo 0")
    outcome = await run_script([str(script)], timeout=30)
    assert outcome.stdout == b"0\n"
    assert len(outcome.stderr) == 65_536


async def test_cancellation_ends_the_script_before_it_returns(tmp_path: Path) -> None:
    script = executable(tmp_path / "s", f"echo $$ > {tmp_path}/pid; exec sleep 1000")
    async with anyio.create_task_group() as tasks:
        # Far beyond the time limit of a test: only cancellation can end it.
        tasks.start_soon(lambda: run_script([str(script)], timeout=100_000))
        pid = await until_written(tmp_path / "pid")
        tasks.cancel_scope.cancel()
    assert has_ended(pid)


async def test_a_cancelled_scope_starts_nothing_and_leaks_nothing(tmp_path: Path) -> None:
    script = executable(tmp_path / "s", f"touch {tmp_path}/ran")
    open_files = len(list(Path("/proc/self/fd").iterdir()))
    with anyio.CancelScope() as scope:
        scope.cancel()
        await run_script([str(script)], timeout=60)
    assert not (tmp_path / "ran").exists()
    assert len(list(Path("/proc/self/fd").iterdir())) <= open_files


@pytest.mark.parametrize(
    ("script", "kind", "says"),
    [
        ("echo out; echo err >&2; exit 3", NotEnoughDevicesError, "ended with exit code 3; stdout: out; stderr: err"),
        ("kill -KILL $$", TemporaryDriverError, "was killed by SIGKILL"),
        ("kill -SEGV $$", TemporaryDriverError, "was killed by SIGSEGV"),
        ("echo 0", NotEnoughDevicesError, "2 devices wanted, but .* names 1"),
        ("exit 0", NotEnoughDevicesError, "2 devices wanted, but .* names 0"),
        ("printf '0,\\377'", PermanentDriverError, "not UTF-8"),
    ],
)
async def test_each_way_to_fail_is_a_verdict_with_its_reason(
    tmp_path: Path, script: str, kind: type[DriverError], says: str
) -> None:
    driver = ScriptDriver(str(executable(tmp_path / "s", script)))
    with pytest.raises(kind, match=says):
        await driver.retrieve_resource_info(2, WORKER)


async def test_a_script_that_cannot_be_executed_is_a_failure_for_good(tmp_path: Path) -> None:
    script = executable(tmp_path / "s", "true")
    driver = ScriptDriver(str(script))
    script.write_text("#!/no/such/interpreter\n")
    with pytest.raises(PermanentDriverError, match="cannot run"):
        await driver.retrieve_resource_info(1, WORKER)


async def test_a_script_that_names_no_interpreter_is_run_by_the_shell_as_for_flink(tmp_path: Path) -> None:
    script = executable(tmp_path / "s", "")
    script.write_text('echo "$1,$2"\n')
    driver = ScriptDriver(str(script), ["7"])
    assert [info["index"] for info in await driver.retrieve_resource_info(2, WORKER)] == ["2", "7"]


async def test_output_in_a_message_is_one_short_printable_line(tmp_path: Path) -> None:
    text = shortened(b"\x1b[31mred\x00\n\nsecond \xff\n" + b"x" * 10_000)
    assert text.isprintable()
    assert text.startswith("\\x1b[31mred\\x00 | second")
    assert len(text) < 350
    assert text.endswith("in all)")


PASSED = {
    "PATH": os.environ["PATH"], "HOME": "/home/x", "LANG": "C", "LC_ALL": "C", "LD_LIBRARY_PATH": "/usr/lib/nvidia",
    "CUDA_VISIBLE_DEVICES": "0", "CUDA_HOME": "/cuda", "NVIDIA_VISIBLE_DEVICES": "all", "FLINK_HOME": "/flink",
    "SPARK_HOME": "/spark", "JAVA_HOME": "/java", "TZ": "UTC",
}  # fmt: skip
KEPT = (
    "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "OUTFITTER_KAFKA_SASL_PASSWORD", "OUTFITTER_KAFKA_SASL_USERNAME",
    "OUTFITTER_BUS", "GITHUB_TOKEN", "KUBECONFIG", "NVIDIA_API_KEY", "SLURM_JWT", "DATABASE_URL", "FLINK_PROPERTIES",
    "https_proxy", "SSH_AUTH_SOCK",
)  # fmt: skip


def told(output: bytes) -> dict[str, str]:
    return dict(line.split("=", 1) for line in output.decode().splitlines() if "=" in line)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        monkeypatch.delenv(name)
    for name, value in {**PASSED, **dict.fromkeys(KEPT, "hunter2")}.items():
        monkeypatch.setenv(name, value)


async def test_a_script_gets_what_it_needs_of_the_environment_and_no_secret(tmp_path: Path, environment: None) -> None:
    found = told((await run_script([str(executable(tmp_path / "tell", "env"))], timeout=20)).stdout)
    assert {name: found.get(name) for name in PASSED} == PASSED
    assert not set(KEPT) & set(found)


@pytest.mark.parametrize("contract", [{}, {"discovery-script.contract": "allocate-release"}])
async def test_a_setting_passes_more_of_the_environment_to_a_script(
    tmp_path: Path, environment: None, contract: dict[str, str]
) -> None:
    script = executable(tmp_path / "tell", f"env > {tmp_path}/env; echo 0")
    params = {"discovery-script.path": str(script), "discovery-script.environment": "AWS_*; DATABASE_URL"} | contract
    driver = GPUDriverFactory().create_external_resource_driver(DriverParams(params))
    await driver.retrieve_resource_info(1, WORKER)
    found = told((tmp_path / "env").read_bytes())
    assert {name for name in KEPT if name in found} == {"AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "DATABASE_URL"}
    assert ("OUTFITTER_WORKER" in found) == bool(contract)
    with pytest.raises(ValueError, match=r"discovery-script\.environment has 'A B'"):
        GPUDriverFactory().create_external_resource_driver(
            DriverParams(params | {"discovery-script.environment": "A B"})
        )


UNSEEN = [chr(code) for code in range(0x110000) if chr(code).isspace()] + list(
    "\u00ad\u034f\u061c\u115f\u1160\u17b4\u180b\u180e\u200b\u200c\u200d\u200e\u2060\u2064\u2800\u3164\ufe00\ufe0f\uffa0"
    "\U000e0020\U000e0100\U000e01ef"
)


@pytest.mark.parametrize("sign", UNSEEN, ids=lambda sign: f"U+{ord(sign):04X}")
def test_no_device_is_named_by_what_nobody_sees(sign: str) -> None:
    for stdout in (f"0,{sign},1\n", f"0,{sign} {sign},1\n", json.dumps({"name": "gpu", "addresses": ["0", sign, "1"]})):
        if sign in "\n\r" and stdout[0] != "{":
            continue  # a line's end
        assert parse_indexes(stdout.encode()) == ["0", "1"]
    if not sign.isspace() and sign != "\u2800":  # it has no width, and would make another device of the same one
        with pytest.raises(PermanentDriverError, match="with an invisible sign"):
            parse_indexes(f"0,0{sign}0,1".encode())


def test_marks_that_are_seen_belong_to_a_name() -> None:
    assert parse_indexes("Zürich-0,Zu\u0308rich-1,\u0939\u093f\u0928\u094d\u0926\u0940".encode()) == [
        "Zürich-0",
        "Zu\u0308rich-1",
        "\u0939\u093f\u0928\u094d\u0926\u0940",
    ]
