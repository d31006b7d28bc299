"""`outfitter` in a worker's environment, which has not the packages that commands need."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from outfitter_service.cli._lib.missing_extra import NEEDED

WITHOUT = """#!{python}
import sys
sys.modules[{module!r}] = None
from outfitter_service.cli import main
main()
"""
"""The script of an environment that lacks a module."""

OTHER = """#!/bin/sh
echo "the other one: $*"
exit 7
"""


def put(folder: Path, text: str, name: str = "outfitter") -> Path:
    folder.mkdir()
    script = folder / name
    script.write_text(text)
    script.chmod(0o755)
    return script


def put_without(folder: Path, module: str = "click") -> Path:
    return put(folder, WITHOUT.format(python=sys.executable, module=module))


def run(script: Path, *path: Path) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.pathsep.join([*map(str, path), "/usr/bin", "/bin"])}
    return subprocess.run(
        [script, "status", "--host", "a b"], env=environment, capture_output=True, text=True, timeout=50
    )


@pytest.mark.parametrize("module", NEEDED)
def test_it_says_what_to_install_whatever_is_missing(tmp_path: Path, module: str) -> None:
    done = run(put_without(tmp_path / "worker", module), tmp_path / "worker")
    assert (done.returncode, done.stdout) == (127, "")
    assert done.stderr.startswith(f"outfitter: the command line is an extra, and {sys.prefix} has no {module}: ")
    assert "install the extra `service`" in done.stderr
    assert done.stderr.count("\n") == 1


def test_it_hides_no_other_one_on_the_path(tmp_path: Path) -> None:
    worker = put_without(tmp_path / "worker")
    put(tmp_path / "other", OTHER)
    for path in (("worker", "other"), ("other", "worker"), ("other",), ("worker", "worker", "other")):
        done = run(worker, *(tmp_path / folder for folder in path))
        assert (done.returncode, done.stdout, done.stderr) == (7, "the other one: status --host a b\n", "")


@pytest.mark.parametrize("name", ["outfitter-lease", "outfitter-lease-spark"])
def test_the_other_programs_hide_none_of_their_name(tmp_path: Path, name: str) -> None:
    worker = put(tmp_path / "worker", WITHOUT.format(python=sys.executable, module="click"), name)
    put(tmp_path / "outfitter", OTHER)
    put(tmp_path / "other", OTHER, name)
    done = run(worker, tmp_path / "outfitter", tmp_path / "worker", tmp_path / "other")
    assert (done.returncode, done.stdout, done.stderr) == (7, "the other one: status --host a b\n", "")
    assert run(worker, tmp_path / "outfitter").returncode == 127


def test_two_environments_without_the_extra_do_not_send_each_other_round(tmp_path: Path) -> None:
    first, second = put_without(tmp_path / "first"), put_without(tmp_path / "second")
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "outfitter").symlink_to(first)
    folders = [first.parent, second.parent, linked, first.parent]
    assert run(first, *folders).returncode == 127
    put(tmp_path / "other", OTHER)
    for order in (folders, folders[::-1]):
        assert run(first, *order, tmp_path / "other").returncode == 7


def test_a_shim_that_leads_back_is_tried_once(tmp_path: Path) -> None:
    worker = put_without(tmp_path / "worker")
    shim = put(tmp_path / "shim", f'#!/bin/sh\nexec {worker} "$@"\n')
    assert run(shim, shim.parent, worker.parent).returncode == 127
    put(tmp_path / "other", OTHER)
    assert run(shim, shim.parent, worker.parent, tmp_path / "other").returncode == 7


BROKEN: dict[str, Callable[[Path], Path]] = {
    "its interpreter is gone": lambda folder: put(folder, "#!/no/such/python\n"),
    "nobody may execute it": lambda folder: put(folder, OTHER),
}


@pytest.mark.parametrize("why", BROKEN)
def test_one_that_cannot_be_started_is_passed_over(tmp_path: Path, why: str) -> None:
    worker, other = put_without(tmp_path / "worker"), put(tmp_path / "other", OTHER)
    broken = BROKEN[why](tmp_path / "broken")
    if why == "nobody may execute it":
        broken.chmod(0o644)
    assert run(worker, broken.parent, other.parent).returncode == 7


def test_a_program_that_only_imports_the_command_line_is_not_replaced(tmp_path: Path) -> None:
    put(tmp_path / "other", OTHER)
    program = "import sys; sys.modules['click'] = None; import outfitter_service.cli"
    environment = {"PATH": str(tmp_path / "other")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout) == (127, "")
