"""The documentation, tried as far as that is cheap: commands, links and snippets that a reader would copy."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

import outfitter
from outfitter_drivers import api
from outfitter_drivers.gpu_discovery import HELP
from outfitter_proto import codec
from outfitter_service.cli import outfitter as command_line
from outfitter_service.cli._lib.driver_check import driver_problems
from outfitter_service.cli.lease import lease
from outfitter_service.config import ConfigProblem, Severity, inspect
from support.documents import DOCUMENTS, ROOT, Snippet, blocks, here_documents, name_of, prose, shell_lines, snippets

documents = pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)

KAFKAS = {"--isolation-level", "--producer"}
"""Options of Kafka's own programs that are spoken of."""
CONTAINERS = {"--build-arg", "--network", "--pid"}
"""The same of programs that build and run containers."""


# --- links and names ---


@documents
def test_every_relative_link_leads_to_a_file_and_a_heading(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(document)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        assert file.is_relative_to(ROOT), target
        assert file.is_file(), f"{target} is no file: the site of `make docs` has no folders"
        if anchor:
            assert anchor in {_slug(line) for line in prose(file).splitlines() if line.startswith("#")}, target


def _slug(heading: str) -> str:
    words = re.sub(r"[^\w\s-]", "", heading.lstrip("#").strip().lower())
    return words.replace(" ", "-")


@documents
def test_every_environment_variable_that_is_named_is_read_somewhere(document: Path) -> None:
    sources = "".join(path.read_text() for folder in ("proto", "drivers", "service") for path in _python(folder))
    sources += "".join(path.read_text() for folder in ("tests/support", "tests/examples") for path in _python(folder))
    computed = (  # made of other words
        "OUTFITTER_EXTERNAL_RESOURCE",
        "OUTFITTER_LEASE_GRACE",
        "OUTFITTER_KAFKA_",
        "OUTFITTER_DEVICE_",
    )
    for variable in re.findall(r"\bOUTFITTER_[A-Z_]+", document.read_text()):
        assert variable.startswith(computed) or variable in sources, variable


def _python(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@documents
def test_every_error_that_is_named_exists(document: Path) -> None:
    for name in re.findall(r"`([A-Z]\w+Error)`", document.read_text()):
        assert any(hasattr(module, name) for module in (outfitter, api)), name


@documents
def test_every_make_target_that_is_named_exists(document: Path) -> None:
    """The changelog also names those of earlier versions."""
    makefile = (ROOT / "Makefile").read_text()
    (kinds,) = re.findall("^KINDS := (.*)", makefile, re.MULTILINE)
    targets = {*re.findall(r"^([\w-]+):", makefile, re.MULTILINE), *kinds.split()}
    for line in shell_lines(document):
        match = re.match(r"make ([\w-]+)", line.strip())
        assert match is None or match[1] in targets or document.name == "CHANGELOG.md", line


# --- commands ---


def test_the_makefiles_numbers_are_those_of_the_documents() -> None:
    makefile, contributing = (ROOT / "Makefile").read_text(), (ROOT / "CONTRIBUTING.md").read_text()
    processes = re.search(r"--numprocesses ([0-9]+)", makefile)
    assert processes is not None
    number = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight"][int(processes[1])]
    assert f"| `make test` | all tests except the slow ones, in {number} processes |" in contributing
    seeds = re.search(r'"--seeds", type=int, default=([0-9]+)', (ROOT / "tests/simulation/__main__.py").read_text())
    seconds = re.search(r'"--seconds", type=int, default=([0-9]+)', (ROOT / "tests/fuzz/__main__.py").read_text())
    assert seeds is not None
    assert seconds is not None
    tests = (ROOT / "tests/README.md").read_text()
    for page in (contributing, tests):
        assert f"{int(seeds[1]):,} new seeds" in page
    assert f"what others write {seconds[1]} s of inputs" in tests


@documents
def test_every_command_and_option_of_ours_that_is_named_exists(document: Path) -> None:
    for line in shell_lines(document):
        for words in _ours(line):
            _check(words, line)


def _ours(line: str) -> Iterator[list[str]]:
    """The words after `outfitter` wherever a command begins."""
    for part in re.split(r"&&|\|\||[;|&]|\$\(", line.partition(" #")[0]):
        match = re.match(r"\s*(?:[A-Z_]+=\S+ +)*(?:\S*/)?outfitter(?: (?P<words>.*))?$", part.rstrip())
        if match:
            yield shlex.split((match["words"] or "").rstrip(")"))


def _check(words: list[str], line: str) -> None:
    context = click.Context(command_line, info_name="outfitter")
    command: click.Command = command_line
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        found = command.get_command(context, words[0])
        assert found is not None, f"{words[0]!r} is no command: {line}"
        command, context, words = found, click.Context(found, parent=context), words[1:]
    known = _options(command)
    for word in words:
        if word == "--":
            break
        if word.startswith("-") and word != "-":
            assert word.partition("=")[0] in known, f"{command.name} has no {word}: {line}"


@documents
def test_every_option_that_is_named_alone_is_one_of_our_programs(document: Path) -> None:
    known = {"--help", *KAFKAS, *CONTAINERS, *(name for command in _all(command_line) for name in _options(command))}
    scripts = [*document.parent.glob("*.py"), ROOT / "deploy/kafka/local_kafka.py", ROOT / "tests/bench/__main__.py"]
    known |= {*_options(lease)}
    known |= set(re.findall(r"--[a-z-]+", HELP + "".join(path.read_text() for path in scripts)))
    assert set(re.findall(r"`(--[a-z-]+)", prose(document))) <= known


def _all(command: click.Command) -> Iterator[click.Command]:
    yield command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from _all(child)


def _options(command: click.Command) -> list[str]:
    return [name for parameter in command.get_params(click.Context(command)) for name in parameter.opts]


@pytest.mark.parametrize(
    ("line", "wrong"),
    [("outfitter sevre", "sevre"), ("x && outfitter topics check --host a", "--host"), ("A=1 outfitter run -x", "-x")],
)
def test_a_command_that_does_not_exist_would_be_found(line: str, wrong: str) -> None:
    (words,) = _ours(line)
    with pytest.raises(AssertionError, match=wrong):
        _check(words, line)


# --- configurations ---


CONFIGURATIONS = [found for found in snippets("toml", "yaml") if "dongles:" not in found.text]
"""Those of the driver that is written on their page are tried with it: test_driver_tutorial.py."""


@pytest.mark.parametrize("snippet", CONFIGURATIONS, ids=str)
def test_every_configuration_passes_config_check(snippet: Snippet, tmp_path: Path) -> None:
    if snippet.text.startswith("[project."):  # a package's own pyproject.toml
        tomllib.loads(snippet.text)
        return
    assert _problems(_listed(snippet), tmp_path / f"outfitter.{snippet.language}") == []


def _listed(snippet: Snippet) -> str:
    """A piece of a configuration, with the list that it leaves out."""
    if "external-resources" in snippet.text:
        return snippet.text
    names = list(tomllib.loads(snippet.text).get("external-resource", {}))
    return f"external-resources = {json.dumps(names)}\n{snippet.text}"


def _problems(text: str, file: Path) -> list[ConfigProblem]:
    file.write_text(text)
    inspection = inspect(file, {}, {})
    found = [*inspection.problems, *driver_problems(inspection.settings)]
    return [problem for problem in found if problem.severity is Severity.ERROR]


WRITTEN = [
    Snippet(document, "toml", text)
    for document in DOCUMENTS
    for command, text in here_documents(document)
    if command.endswith(".toml")
]


def test_the_first_steps_write_a_configuration() -> None:
    assert [written.document for written in WRITTEN].count(ROOT / "README.md") == 1


@pytest.mark.parametrize("written", WRITTEN, ids=str)
def test_every_configuration_that_a_command_writes_passes_config_check(written: Snippet, tmp_path: Path) -> None:
    assert _problems(written.text, tmp_path / "outfitter.toml") == []


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("lease = 3", ""),
        ('leese = "3s"', "leese"),
        ("external-resource.gpu.amuont = 1", "external-resource.gpu.amuont"),
    ],
)
def test_a_setting_that_does_not_exist_would_be_found(text: str, key: str, tmp_path: Path) -> None:
    found = _problems(_listed(Snippet(ROOT, "toml", text)), tmp_path / "outfitter.toml")
    assert [problem.key for problem in found][:1] == ([key] if key else [])


# --- code ---

TRIED = {"sh", "toml", "yaml", "json", "python"}
"""Languages whose blocks are tried in this file."""
PICTURES = {"text", "mermaid"}
"""Not code; test_reference.py compares the diagram."""


def test_every_block_of_code_is_in_a_language_that_is_tried() -> None:
    languages = {block.language for document in DOCUMENTS for block in blocks(document)}
    assert languages - PICTURES - {""} == TRIED


@documents
def test_every_block_of_shell_is_valid(document: Path) -> None:
    for block in blocks(document):
        if block.language in {"", "sh"}:
            assert shell_error(block.text) is None, block


def shell_error(text: str) -> str | None:
    judged = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    return judged.stderr if judged.returncode else None


@pytest.mark.parametrize("text", ["if true; then", "echo 'a", "for x in a; done", "cat <<(", "a | | b"])
def test_a_block_of_shell_that_is_not_valid_would_be_found(text: str) -> None:
    assert shell_error(text) is not None


# --- messages ---


@pytest.mark.parametrize("snippet", snippets("json"), ids=str)
def test_every_message_and_record_can_be_decoded(snippet: Snippet) -> None:
    for value in _values(snippet.text):
        body = json.dumps(value).encode()
        if value["type"] in {"register", "heartbeat", "deregister"}:
            codec.decode_registration(body)
        elif value["type"] == "cordon-order":
            codec.decode_order(body)
        else:
            codec.decode_ledger(body)


def _values(text: str) -> Iterator[dict[str, Any]]:
    decoder, position = json.JSONDecoder(), 0
    while position < len(text.rstrip()):
        value, position = decoder.raw_decode(text, position)
        yield value
        position += len(text[position:]) - len(text[position:].lstrip())


def test_the_message_of_the_first_steps_is_keyed_by_its_host_and_can_be_decoded() -> None:
    (line,) = [line for line in shell_lines(ROOT / "README.md") if "echo 'gpu-3|" in line]
    key, _, body = line.partition("'")[2].rpartition("'")[0].partition("|")
    codec.decode_registration(body.encode(), key=key.encode())


# --- Python ---


@pytest.mark.parametrize("snippet", snippets("python"), ids=str)
def test_every_piece_of_python_compiles_and_imports_what_there_is(snippet: Snippet) -> None:
    compile(snippet.text, str(snippet), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    _import(snippet.text)


def test_the_program_of_the_first_steps_compiles_and_imports_what_there_is() -> None:
    programs = [text for command, text in here_documents(ROOT / "README.md") if command.startswith("python")]
    assert len(programs) == 1
    compile(programs[0], "README.md", "exec")
    _import(programs[0])


def _import(text: str) -> None:
    for imports in re.findall(r"^from outfitter[\w.]* import (?:\([^)]*\)|[^\n(]*)", text, re.MULTILINE):
        exec(imports, {})  # noqa: S102 - our own documentation's import lines


# --- where Outfitter comes from ---


def by_name(text: str) -> list[str]:
    """Commands that install Outfitter by its name, which is not on the package index."""
    commands = re.compile(r"\b(?:pip3?|pipx|uv|uvx|poetry)\b[^\n`]*\b(?:install|add|run|tool)\b([^\n`]*)")
    name = re.compile(r"(?<![\w./-])outfitter(?:\[[\w,]*\])?(?![\w./-])")
    return [found[0] for found in commands.finditer(text) if name.search(found[1].partition(" #")[0])]


def test_nobody_is_told_to_install_a_package_by_a_name_that_anybody_may_take() -> None:
    folders = ("proto", "drivers", "service", "deploy", "examples", "docs", "tests")
    kinds = {".md", ".py", ".toml", ".txt", ".sh", ".java", ".go", ".mjs", ".yaml", ".yml", ".service", ""}
    files = [
        path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in kinds and path.is_file()
    ]
    files += [*ROOT.glob("*.md"), ROOT / "Makefile"]
    files = [
        path for path in files if path != Path(__file__) and path.name != "CHANGELOG.md" and "target" not in path.parts
    ]
    told = {
        str(path.relative_to(ROOT)): found for path in files if (found := by_name(path.read_text(errors="replace")))
    }
    assert len(files) > 500
    assert told == {}


@pytest.mark.parametrize(
    "text",
    [
        "pip install outfitter", "pip install 'outfitter[service]'", "`pipx install \"outfitter[service]\"`",
        "/opt/x/bin/pip install --upgrade outfitter==1.0", "uv pip install outfitter", "uv tool install outfitter",
        "pip install -r requirements.txt outfitter\n", "python -m pip install outfitter>=0.2", "poetry add outfitter",
    ],
)  # fmt: skip
def test_a_command_that_installs_by_name_would_be_found(text: str) -> None:
    assert by_name(text)


@pytest.mark.parametrize(
    "text",
    ["pip install '.[service]'", "pip install dist/outfitter-1.0.whl", "pip install --no-deps outfitter-*.whl",
     "pip install ../.. # outfitter", "outfitter run -- pip install x"],
)  # fmt: skip
def test_a_command_that_installs_by_a_path_is_none(text: str) -> None:
    assert not by_name(text)
