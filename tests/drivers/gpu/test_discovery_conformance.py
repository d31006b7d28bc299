"""outfitter-gpu-discovery answers as the tables of measured cases say: arguments, output, coordination file."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.drivers.gpu_machine import answer, discovery, nvidia_smi

TABLES = Path(__file__).parents[2] / "conformance"
NVIDIA_SCRIPT = json.loads((TABLES / "nvidia-script.json").read_text())["cases"]
COORDINATION = json.loads((TABLES / "coordination.json").read_text())["cases"]
ONE_CALLER = [case for case in COORDINATION if "race" not in case]


def ended_process() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


@pytest.mark.parametrize("case", NVIDIA_SCRIPT, ids=lambda case: case["id"])
def test_the_command_line_is_answered_as_the_table_says(case: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "coordination"
    bin_folder = nvidia_smi(tmp_path, case["smi"] or "", exit_code=case.get("smi_exit", 0))
    arguments = [str(file) if argument == "F" else argument for argument in case["args"]]
    stdout, code, stderr = answer(discovery(arguments, bin_folder))
    expected, expected_code = case["ours"]
    assert code == expected_code, stderr
    if expected is not None:
        assert stdout.removesuffix("\n") == expected
    if code:
        assert stdout == ""
        assert stderr.startswith("outfitter-gpu-discovery: ")
    coordinates = any(argument.startswith("--enable-coordination") for argument in arguments)
    assert file.exists() == (coordinates and code == 0)
    if file.exists():
        records = [line.split()[:2] for line in file.read_text().splitlines()]
        assert records == [[index, str(os.getpid())] for index in expected.split(",")]


@pytest.mark.parametrize("case", ONE_CALLER, ids=lambda case: case["id"])
def test_the_coordination_file_is_read_and_written_as_the_table_says(case: dict[str, Any], tmp_path: Path) -> None:
    pids = {"D": ended_process(), "L": os.getppid(), "me": os.getpid()}

    def written(text: str) -> str:
        for word, pid in pids.items():
            text = text.replace(f" {word}", f" {pid}")
        return text

    file = tmp_path / "coordination"
    if case["file"] is not None:
        file.write_text(written(case["file"]))
    devices = case["devices"] if isinstance(case["devices"], list) else range(case["devices"])
    bin_folder = nvidia_smi(tmp_path, "".join(f"{device}\n" for device in devices))
    arguments = [str(case["amount"]), "--enable-coordination-mode", "--coordination-file", str(file)]
    stdout, code, stderr = answer(discovery(arguments, bin_folder))
    expected, expected_code = case["ours"]
    assert code == expected_code, stderr
    if expected is not None:
        assert stdout.removesuffix("\n") == expected
    if code or case.get("file_after") == "unchanged":
        assert stdout == ""
        assert file.read_text() == written(case["file"])
    elif case.get("file_after", "") is None:
        assert not file.exists()
    else:
        records = [" ".join(line.split()[:2]) for line in file.read_text().splitlines()]
        for index in expected.split(","):
            assert [record for record in records if record.startswith(f"{index} ")] == [f"{index} {pids['me']}"]
        for record in case.get("must_keep", ()):
            assert written(record) in records


def test_of_20_callers_at_once_on_8_devices_8_get_distinct_ones_and_12_none(tmp_path: Path) -> None:
    """The table's race, C27."""
    assert [case["id"] for case in COORDINATION if "race" in case] == ["C27"]
    file = tmp_path / "coordination"
    bin_folder = nvidia_smi(tmp_path, "".join(f"{device}\n" for device in range(8)))
    callers = []
    for _ in range(20):
        # Each caller lives on after its call: a shell that waits for its standard input to end.
        script = 'outfitter-gpu-discovery 1 --enable-coordination-mode --coordination-file "$0"; echo "code $?"; read x'
        callers.append(
            subprocess.Popen(
                ["sh", "-c", script, str(file)],
                env={**os.environ, "PATH": f"{bin_folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        )
    winners: list[str] = []
    losers = 0
    try:
        for caller in callers:
            assert caller.stdout is not None
            line = caller.stdout.readline().strip()
            if line == "code 1":
                losers += 1
            else:
                winners.append(line)
                assert caller.stdout.readline().strip() == "code 0"
    finally:
        for caller in callers:
            caller.communicate("\n", timeout=30)
    assert sorted(winners) == [str(device) for device in range(8)]
    assert losers == 12
    assert len(file.read_text().splitlines()) == 8
