"""Both syntaxes lead to the same keys, and a file that cannot be read is one clear error."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from outfitter_service.config import ConfigurationError, Inspection, inspect, load, sources

Look = Callable[..., Inspection]

FLAT = """
taskmanager.numberOfTaskSlots: 4
external-resources: gpu;fpga
external-resource.gpu.driver-factory.class: org.apache.flink.externalresource.gpu.GPUDriverFactory
external-resource.gpu.amount: 2
external-resource.gpu.param.discovery-script.args: --enable-coordination
external-resource.fpga.amount: 1
external-resource.fpga.yarn.config-key: yarn.io/fpga
"""
NESTED = """
taskmanager:
  numberOfTaskSlots: 4
  memory: {process: {size: 1728m}}
external-resources: [gpu, fpga]
external-resource:
  gpu:
    driver-factory.class: org.apache.flink.externalresource.gpu.GPUDriverFactory
    amount: 2
    param:
      discovery-script:
        args: "--enable-coordination"
  fpga.amount: 1
external-resource.fpga:
  yarn: {config-key: yarn.io/fpga}
"""
BLOCK_LIST = NESTED.replace("[gpu, fpga]", "\n  - gpu\n  - fpga")
FOLDED = FLAT.replace("gpu;fpga", ">-\n  gpu;\n  fpga")
TOML = """
external-resources = ["gpu", "fpga"]
[external-resource.gpu]
amount = 2
driver = "org.apache.flink.externalresource.gpu.GPUDriverFactory"
[external-resource.gpu.param.discovery-script]
args = "--enable-coordination"
[external-resource.fpga]
amount = 1
yarn.config-key = "yarn.io/fpga"
"""
TOML_FLAT = "\n".join(
    f'"{line.split(": ")[0]}" = "{line.split(": ")[1]}"' for line in FLAT.split("\n") if "external" in line
)
SPELLINGS = {
    "flat YAML": ("config.yaml", FLAT),
    "nested YAML": ("config.yaml", NESTED),
    "YAML with a block list": ("config.yaml", BLOCK_LIST),
    "YAML with a list on folded lines": ("config.yaml", FOLDED),
    "Flink's old file": ("flink-conf.yaml", FLAT),
    "TOML": ("outfitter.toml", TOML),
    "TOML with flat keys": ("outfitter.toml", TOML_FLAT),
    "TOML by its content": ("outfitter.conf", TOML),
    "YAML by its content": ("flink.conf", FLAT),
    "with a byte order mark": ("config.yaml", "\ufeff" + FLAT),
    "with a byte order mark, TOML": ("outfitter.toml", "\ufeff" + TOML),
    "with Windows line ends": ("config.yaml", FLAT.replace("\n", "\r\n")),
    "with Windows line ends, TOML": ("outfitter.toml", TOML.replace("\n", "\r\n")),
}


@pytest.mark.parametrize(("name", "text"), SPELLINGS.values(), ids=SPELLINGS.keys())
def test_every_spelling_means_the_same(look: Look, name: str, text: str) -> None:
    settings = look(text, name).settings
    assert settings is not None
    gpu, fpga = settings.resources
    assert (gpu.name, gpu.amount, gpu.driver) == ("gpu", 2, "gpu")
    assert gpu.params == {"discovery-script.args": "--enable-coordination"}
    assert (fpga.name, fpga.amount, fpga.driver, fpga.yarn_key) == ("fpga", 1, None, "yarn.io/fpga")
    assert gpu.directory == settings.file.parent


def test_folded_lines_of_yaml_are_words_with_one_blank_between(look: Look) -> None:
    text = "external-resources: gpu\nexternal-resource.gpu:\n  amount: 1\n  param.discovery-script.args: "
    for style, args in (
        (">-\n    --mode fast\n    --pool\n\n    blue", "--mode fast --pool\nblue"),
        ("a\n    b", "a b"),
    ):
        (gpu,) = look(text + style + "\n", "config.yaml").settings.resources
        assert gpu.params == {"discovery-script.args": args}


def test_an_old_flink_file_needs_not_be_yaml(look: Look) -> None:
    text = (
        "env.java.opts: -Dx: y @z\nexternal-resources: gpu # and a comment\nexternal-resource.gpu.amount: 2\n"
        "external-resource.gpu.param.path: *what: [ever\nbroken line\n"
    )
    inspection = look(text, "flink-conf.yaml")
    (gpu,) = inspection.settings.resources
    assert gpu.params == {"path": "*what: [ever"}
    (warning,) = [problem for problem in inspection.problems if problem.severity == "warning"]
    assert warning.found == "broken line"
    assert "line 5" in warning.file


def test_in_an_old_flink_file_the_last_line_of_a_key_counts_and_both_are_named(look: Look) -> None:
    text = (
        "external-resources: gpu\nexternal-resource.gpu.amount: 1\njobmanager.rpc.port: 1\njobmanager.rpc.port: 2\n"
        "external-resource.gpu.param.path: /a\nexternal-resource.gpu.amount: 4\noutfitter.lease: 1s\n"
        "outfitter.lease: 20s\nexternal-resources: gpu\n"
    )
    inspection = look(text, "flink-conf.yaml")
    (gpu,) = inspection.settings.resources
    assert (gpu.amount, inspection.settings.lease) == (4, 20.0)
    names, amount, lease = [problem for problem in inspection.problems if problem.severity == "warning"]
    assert (names.key, amount.key, lease.key) == (
        "external-resources",
        "external-resource.gpu.amount",
        "outfitter.lease",
    )
    assert "line 2" in str(amount)
    assert "line 6" in str(amount)


def test_yaml_has_each_key_once_as_in_flink(look: Look) -> None:
    text = "external-resources: gpu\nexternal-resource.gpu.amount: 1\nexternal-resource.gpu.amount: 4\n"
    for name in ("config.yaml", "gpu.yaml"):
        assert "is given twice" in str(look(text, name).errors[0])


def test_an_old_flink_file_is_read_by_lines_also_if_it_is_yaml(look: Look) -> None:
    """Flink reads no nested keys there, and takes quotes, anchors and block marks for text."""
    text = (
        "external-resources: gpu\nexternal-resource:\n  gpu:\n    amount: 3\nexternal-resource.gpu.amount: 2\n"
        "external-resource.gpu.param.path: '/a'\nexternal-resource.gpu.param.args: >-\n  b\n"
    )
    inspection = look(text, "flink-conf.yaml")
    (gpu,) = inspection.settings.resources
    assert (gpu.amount, gpu.params) == (2, {"path": "'/a'", "args": ">-"})
    *unread, quoted = [problem for problem in inspection.problems if problem.severity == "warning"]
    assert "quotes" in str(quoted)
    assert [problem.found for problem in unread] == ["external-resource:", "gpu:", "b"]
    assert all("config.yaml" in str(problem) for problem in unread)


def test_flinks_yaml_file_is_never_read_by_lines(look: Look) -> None:
    assert look("external-resources: gpu\nenv.java.opts: -Dx: y @z\n", "config.yaml").settings is None


MANIFESTS = {
    "FlinkDeployment": ("spec:\n  flinkConfiguration:\n    external-resources: gpu\n", "spec.flinkConfiguration"),
    "flat": ("spec:\n  flinkConfiguration:\n    external-resource.gpu.amount: '1'\n", "spec.flinkConfiguration"),
    "ConfigMap": ("data:\n  config.yaml: |\n    external-resource.gpu.amount: 1\n", "data.config.yaml"),
}


@pytest.mark.parametrize("kind", MANIFESTS)
def test_a_manifest_with_flinks_configuration_within_is_told_where_it_is(look: Look, kind: str) -> None:
    text, place = MANIFESTS[kind]
    [warning] = look(f"kind: {kind}\n{text}", "deployment.yaml").problems
    assert (warning.severity, warning.key) == ("warning", place)
    assert "file of its own" in str(warning)


BAD_FILES = {
    "binary": ("x.yaml", b"a: \0b\n", "NUL in line 1"),
    "not UTF-8": ("x.toml", b"a = 1\nb = '\xff'\n", "byte 0xff in line 2"),
    "UTF-16": ("x.toml", "a = 1".encode("utf-16"), "is UTF-16"),
    "too long": ("x.yaml", b"# " + b"x" * sources.MAX_BYTES, "longer than"),
    "broken TOML": ("x.toml", b"a = \n", "is no TOML"),
    "TOML with a key twice": ("x.toml", b"a = 1\na = 2\n", "is no TOML"),
    "broken YAML": ("x.yaml", b"a:\n  - b\n c: [\n", "is no YAML"),
    "a YAML list": ("x.yaml", b"- a\n- b\n", "no YAML mapping"),
    "two YAML documents": ("x.yaml", b"a:\n  b: 1\n---\na: 2\n", "is no YAML"),
    "deep YAML": ("x.yaml", b"a: " + b"[" * 1_000, "nested too deeply"),
    "deep YAML maps": ("x.yaml", "\n".join(" " * i + "a:" for i in range(40)).encode(), "nested more than"),
    "a YAML bomb": (
        "x.yaml",
        b"a0: &a0 {x: 1, y: 1, z: 1, u: 1, v: 1, w: 1, r: 1, s: 1, t: 1}\n"
        + b"".join(
            b"a%d: &a%d {%s}\n" % (i, i, b", ".join(b"k%d: *a%d" % (k, i - 1) for k in range(9))) for i in range(1, 9)
        ),
        "more than",
    ),
    "a YAML map that holds itself": ("x.yaml", b"a: &a\n  b: *a\n", "nested more than"),
    "a key that is no text": ("x.yaml", b"? [a, b]\n: 1\n", "a key that is no text"),
}


@pytest.mark.parametrize(("name", "content", "words"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_a_file_that_is_no_configuration_is_one_clear_error(look: Look, name: str, content: bytes, words: str) -> None:
    inspection = look(content, name)
    assert inspection.settings is None
    (problem,) = inspection.problems
    assert words in problem.problem
    assert name in problem.file


def test_an_empty_file_configures_nothing_and_is_fine(look: Look) -> None:
    for name in ("a.yaml", "a.toml", "a.conf"):
        inspection = look("# nothing\n", name)
        assert inspection.problems == ()
        assert inspection.settings.resources == ()


def test_a_file_that_was_named_and_is_not_there_is_an_error(tmp_path: Path) -> None:
    for path in (tmp_path / "none.toml", tmp_path, Path("a\0b")):
        inspection = inspect(path, {}, {})
        assert inspection.settings is None
        assert "cannot be read" in inspection.problems[0].problem


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x.yaml", "external-resources: gpu\nexternal-resource.gpu.amount: 1\nexternal-resource.gpu.amount: 2\n"),
        ("x.yaml", "external-resources: gpu\nexternal-resource: {gpu: {amount: 1}}\nexternal-resource.gpu.amount: 2\n"),
        (
            "x.toml",
            'external-resources = "gpu"\n"external-resource.gpu.amount" = 1\nexternal-resource.gpu.amount = 2\n',
        ),
    ],
)
def test_a_key_given_twice_in_one_file_is_an_error(look: Look, name: str, text: str) -> None:
    inspection = look(text, name)
    (error,) = inspection.errors
    assert error.key == "external-resource.gpu.amount"
    assert "given twice" in error.problem


def test_errors_name_the_line_of_their_key(look: Look) -> None:
    (error,) = look("\n# x\nexternal-resources: gpu\nexternal-resource:\n  gpu:\n    amount: abc\n").errors
    assert error.file.endswith("config.yaml line 6")


def test_a_working_directory_that_this_user_may_not_enter_has_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sources, "DEFAULT_FILES", (Path("outfitter.toml"),))
    user = os.geteuid()
    tmp_path.chmod(0)
    try:
        if user == 0:
            os.seteuid(65534)  # root may enter everything
        assert sources.find(None, {}) is None
    finally:
        os.seteuid(user)
        tmp_path.chmod(0o700)


def test_files_are_looked_for_in_a_fixed_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    system = tmp_path / "etc.toml"
    monkeypatch.setattr(sources, "DEFAULT_FILES", (Path("outfitter.toml"), system))
    files = {"named": tmp_path / "named.toml", "variable": tmp_path / "var.toml", "here": tmp_path / "outfitter.toml"}
    for name, path in [*files.items(), ("system", system)]:
        path.write_text(f'cluster = "{name}"\n')
    variable = {"OUTFITTER_CONFIG": str(files["variable"])}
    assert load(files["named"], {}, variable).cluster == "named"
    assert load(None, {}, variable).cluster == "variable"
    assert load(None, {}, {}).cluster == "here"
    files["here"].unlink()
    assert load(None, {}, {}).cluster == "system"
    system.unlink()
    with pytest.raises(ConfigurationError) as caught:
        load(None, {}, {})
    for tried in ("--config", "OUTFITTER_CONFIG", "./outfitter.toml", str(system)):
        assert tried in str(caught.value)
    assert load(None, {}, {}, required=False).cluster == "outfitter"
