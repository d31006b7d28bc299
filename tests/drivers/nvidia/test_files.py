"""What is read below a root: the kernel's files about GPUs, and CDI's specs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outfitter_drivers.nvidia import cdi, pci
from outfitter_drivers.nvidia.testing import FakeGpu, FakeMachine
from outfitter_drivers.support.tree import MAX_BYTES, Tree

# As `nvidia-ctk cdi generate` of NVIDIA's container toolkit writes it: its page "Support for CDI".
YAML = """\
---
cdiVersion: 0.5.0
containerEdits:
  deviceNodes:
  - path: /dev/nvidiactl
devices:
- containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
      name: not-this
  name: "0"
- containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
  name: GPU-00000000-0000-4000-8000-000000000000
- name: all
  containerEdits:
    env:
    - NVIDIA_VISIBLE_DEVICES=void
kind: nvidia.com/gpu
"""
JSON = '{"cdiVersion": "0.6.0", "kind": "nvidia.com/gpu", "devices": [{"name": "1:0", "containerEdits": {}}]}'


def write(root: Path, path: str, text: str) -> Path:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


# --- the tree ---


def test_an_absolute_link_leads_below_the_root(tmp_path: Path) -> None:
    write(tmp_path, "run/cdi/a.json", "here")
    (tmp_path / "var").mkdir()
    (tmp_path / "var/run").symlink_to("/run")
    assert Tree(tmp_path).text("var/run/cdi/a.json") == "here"


@pytest.mark.parametrize("target", ["../../outside", "loop"])
def test_a_link_that_leaves_the_root_or_does_not_end_is_an_error(tmp_path: Path, target: str) -> None:
    (tmp_path / "outside").write_text("secret")
    root = tmp_path / "root"
    (root / "sys").mkdir(parents=True)
    (root / "sys/loop").symlink_to(target)
    with pytest.raises(OSError, match=r"leads out of the root|levels of symbolic links"):
        Tree(root).text("sys/loop")
    assert Tree(root).line("sys/loop") is None


def test_what_could_block_or_is_too_large_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "large").write_bytes(b"x" * (MAX_BYTES + 1))
    for name in ("fifo", "large", "."):
        with pytest.raises(OSError):  # noqa: PT011  of three kinds
            Tree(tmp_path).text(name)


# --- the kernel's files ---


def test_gpus_are_the_displays_of_nvidia_that_its_driver_has(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path, [FakeGpu(0), FakeGpu(1, is_bound=False), FakeGpu(2)])
    for number, (name, text) in enumerate((("vendor", "0x1002"), ("class", "0x020700"))):
        folder = f"sys/bus/pci/devices/0000:e{number}:00.0"
        write(machine.root, f"{folder}/vendor", "0x10de\n")
        write(machine.root, f"{folder}/class", "0x030000\n")
        write(machine.root, f"{folder}/{name}", text)
        (machine.root / folder / "driver").symlink_to("../drivers/nvidia")
    functions = pci.functions(Tree(machine.root))
    assert functions is not None
    assert list(functions) == ["0000:19:00.0", "0000:3b:00.0"]
    assert functions["0000:19:00.0"].uuid == "GPU-00000000-0000-4000-8000-000000000000"


def test_a_gpu_is_offered_here_if_it_has_a_node_and_is_not_excluded(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path, [FakeGpu(0), FakeGpu(1), FakeGpu(2), FakeGpu(3)])
    (machine.root / "dev/nvidia1").unlink()  # a container with some of the GPUs
    information = machine.root / "proc/driver/nvidia/gpus/0000:3b:00.0/information"
    information.write_text(information.read_text().replace("Excluded:\t No", "Excluded:\t Yes"))
    (machine.root / "proc/driver/nvidia/gpus/0000:4c:00.0/information").unlink()
    functions = pci.functions(Tree(machine.root))
    assert functions is not None
    assert [function.is_offered for function in functions.values()] == [True, False, False, False]


def test_without_a_list_of_devices_nobody_knows_them(tmp_path: Path) -> None:
    assert pci.functions(Tree(tmp_path)) is None


def test_a_machine_without_numa_has_no_node(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path, [FakeGpu(0, numa_node=-1), FakeGpu(1, numa_node=1)])
    nodes = [pci.numa_node(Tree(machine.root), gpu.bus_id) for gpu in machine.state.gpus]
    assert nodes == [None, "1"]


@pytest.mark.parametrize(
    ("text", "normal"),
    [("00000000:0C:00.0", "0000:0c:00.0"), ("00010000:00:04.0", "10000:00:04.0"), ("", None), ("x", None)],
)
def test_bus_ids_are_written_as_linux_does(text: str, normal: str | None) -> None:
    assert pci.normal_bus_id(text) == normal


# --- CDI ---


def test_a_spec_defines_the_names_of_its_devices() -> None:
    assert cdi.defined(YAML) == {"0", "GPU-00000000-0000-4000-8000-000000000000", "all"}
    assert cdi.defined(JSON) == {"1:0"}


def test_a_spec_of_another_kind_or_in_another_form_defines_nothing() -> None:
    assert not cdi.defined(YAML.replace("nvidia.com/gpu", "amd.com/gpu"))
    assert not cdi.defined(JSON.replace("nvidia.com/gpu", "amd.com/gpu"))
    assert not cdi.defined("{" + JSON)
    assert not cdi.defined("kind: nvidia.com/gpu\ndevices: [{name: '0'}]\n")


def test_specs_of_both_folders_count(tmp_path: Path) -> None:
    write(tmp_path, "etc/cdi/nvidia.yaml", YAML)
    write(tmp_path, "run/cdi/more.json", JSON)
    write(tmp_path, "run/cdi/notes.txt", JSON.replace("1:0", "9"))
    (tmp_path / "var").mkdir()
    (tmp_path / "var/run").symlink_to("/run")
    assert cdi.names(Tree(tmp_path)) == {"0", "GPU-00000000-0000-4000-8000-000000000000", "all", "1:0"}


@given(st.text(alphabet='kinddevicsname:- \n"{}[]', max_size=200))
def test_any_text_is_a_spec_with_valid_names_or_none(text: str) -> None:
    assert all(name.isprintable() and name for name in cdi.defined(f"kind: nvidia.com/gpu\n{text}"))
