"""Finds configuration files, and reads TOML and both of Flink's syntaxes into a list of flat keys.

The keys have no meaning here. As in Flink, a file's name decides its format: `config.yaml` is YAML 1.2, flat or nested,
and `flink-conf.yaml` has lines of `key: value`. A file of another name is read as lines only if it is no YAML. Tables
become dotted keys. The key of a table in a list includes its position.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from outfitter_proto.support import file_ownership
from outfitter_proto.support.printable import printable
from outfitter_service.config.problems import ConfigProblem, ConfigurationError, Severity

if TYPE_CHECKING:
    from ruamel.yaml.nodes import MappingNode, Node, ScalarNode

log = logging.getLogger("outfitter.config")

DEFAULT_FILES = (Path("outfitter.toml"), Path("/etc/outfitter/outfitter.toml"))
VARIABLE = "OUTFITTER_CONFIG"
YAML_FILE, LINES_FILE = "config.yaml", "flink-conf.yaml"
"""Flink's names of its configuration, today's and the one before (`GlobalConfiguration`)."""
MAX_BYTES = 1024 * 1024
MAX_ENTRIES = 20_000
MAX_DEPTH = 32
MAX_KEY = 1_024
"""Most characters of a key: enough for the longest resource name, option and parameter."""

_TOML_LINE = r"""\s*(?:\[|(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')(?:\s*\.\s*[\w"'-]+)*\s*=)"""
_LINE = r"[^\s:#][^:]*: .*"
_KEY_PART = r"""(?:"[^"\n]*"|'[^'\n]*'|[A-Za-z0-9_-]++)[ \t]*+\.[ \t]*+"""
_DEEP_KEY = re.compile(rf"""(?<![\w"'.-])(?:{_KEY_PART}){{{MAX_DEPTH + 1}}}""")
_NULL = "tag:yaml.org,2002:null"

Value = str | list[str] | None
"""A scalar as text, a list of scalars, or None for a key without a value (YAML's null)."""


class ConfigEntry(NamedTuple):
    """One flat key of a file, with its `line` if known."""

    key: str
    value: Value
    line: int | None = None


class ConfigSource(NamedTuple):
    """The contents of a file. `toml` decides the spelling of the manager's own keys. `problems`: those of the syntax.
    `lines`: it is Flink's line format, in which a key may stand again, and its last line counts."""

    path: Path
    toml: bool
    entries: tuple[ConfigEntry, ...]
    problems: tuple[ConfigProblem, ...] = ()
    lines: bool = False


def find(path: str | Path | None, environment: Mapping[str, str]) -> Path | None:
    """The file to read: `path`, else the environment's, else the first default one that exists.

    A named file is returned even if it does not exist. A default file that other users can change is ignored with a
    log line, because nobody has named it. None if there is no file.
    """
    named = path or environment.get(VARIABLE)
    if named:
        return Path(named)
    for file in DEFAULT_FILES:
        if not _is_there(file):
            continue
        if (doubt := file_ownership.doubt(file)) is None:
            return file
        log.warning("%s", _passed_over(file, doubt))
    return None


def _is_there(file: Path) -> bool:
    """Whether a default file exists. In a working directory that this user may not enter there is none for it."""
    try:
        return file.exists()
    except PermissionError:
        return False


def _passed_over(file: Path, doubt: str) -> str:
    named = file if file.is_absolute() else f"./{file}"
    return printable(f"{named} is not read: {doubt}; --config {named} reads it all the same")


def none_found() -> ConfigurationError:
    """The error with the files that were tried."""
    tried = ", ".join(f"./{file}" if not file.is_absolute() else str(file) for file in DEFAULT_FILES)
    doubts = [_passed_over(file, doubt) for file in DEFAULT_FILES if (doubt := file_ownership.doubt(file))]
    why = "; ".join(doubts) or f"neither of {tried} exists"
    problem = ConfigProblem(
        file="", key="--config", problem=f"no configuration: --config and {VARIABLE} are not given, and {why}"
    )
    return ConfigurationError([problem])


def _doubts(path: Path) -> Iterator[ConfigProblem]:
    """A warning if another user can change a named file."""
    if doubt := file_ownership.doubt(path):
        yield ConfigProblem(
            file=str(path),
            key="",
            problem=f"{doubt}, and so what runs as this user",
            suggestion=f"see that it and its directory are yours or root's, and `chmod o-w {path}`",
            severity=Severity.WARNING,
        )


def read(path: Path) -> ConfigSource:
    """Read one file.

    Raises:
        ConfigurationError: it cannot be read, is no text, or has none of the syntaxes.
    """
    text = _text(path)
    source = (
        ConfigSource(path, True, tuple(_bounded(path, _toml(path, text))))
        if _is_toml(path, text)
        else _flink(path, text)
    )
    return source._replace(problems=(*_doubts(path), *source.problems))


def _refuse(path: Path, problem: str, *, key: str = "", found: str | None = None) -> ConfigurationError:
    return ConfigurationError([ConfigProblem(file=str(path), key=key, problem=problem, found=found)])


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise _refuse(path, f"cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # a NUL in the path
        raise _refuse(path, f"cannot be read: {error}") from error
    if len(content) > MAX_BYTES:
        raise _refuse(path, f"is longer than {MAX_BYTES} bytes, which no configuration is")
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise _refuse(path, "is UTF-16; save it as UTF-8")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        wrong = content[error.start : error.start + 1].hex()
        raise _refuse(path, f"is not UTF-8: byte 0x{wrong} in line {line}") from error
    if "\0" in text:
        raise _refuse(path, f"is no text: a NUL in line {text.count(chr(10), 0, text.index(chr(0))) + 1}")
    return text.replace("\r\n", "\n")


def _is_toml(path: Path, text: str) -> bool:
    if path.suffix.lower() in {".yaml", ".yml"}:
        return False
    if path.suffix.lower() == ".toml":
        return True
    lines = (line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#"))
    return bool(re.match(_TOML_LINE, next(lines, "")))


# --- TOML ----------------------------------------------------------------------------------------------


def _toml(path: Path, text: str) -> Iterator[ConfigEntry]:
    import tomllib

    if deep := _DEEP_KEY.search(text):  # before the parser, whose time and memory grow with the square of such a key
        raise _too_deep(path, text.count("\n", 0, deep.start()) + 1)
    try:
        table = tomllib.loads(text, parse_float=_as_written)
    except RecursionError as error:
        raise _refuse(path, "is nested too deeply") from error
    except ValueError as error:  # a syntax error, or a number with more digits than Python reads
        raise _refuse(path, f"is no TOML: {error}") from error
    yield from _flat_toml(path, table, "", 0)


def _as_written(number: str) -> str:
    """A TOML float as it is written: 8.10 is a version, and not 8.1."""
    return number.replace("_", "")


def _too_deep(path: Path, line: int) -> ConfigurationError:
    return _refuse(path, f"is nested more than {MAX_DEPTH} deep in line {line}")


def _flat_toml(path: Path, value: Any, key: str, depth: int) -> Iterator[ConfigEntry]:
    if depth > MAX_DEPTH:
        raise _refuse(path, f"is nested more than {MAX_DEPTH} deep", key=key[:MAX_KEY])
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _flat_toml(path, inner, f"{key}.{name}" if key else name, depth + 1)
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        for position, inner in enumerate(value):
            yield from _flat_toml(path, inner, f"{key}.{position}", depth + 1)
    elif isinstance(value, list):
        yield ConfigEntry(key, [_toml_text(path, item, key) for item in value])
    else:
        yield ConfigEntry(key, _toml_text(path, value, key))


def _toml_text(path: Path, value: Any, key: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    try:
        return str(value)
    except ValueError as error:  # a hexadecimal number with more digits than Python writes
        raise _refuse(path, "is a number of more digits than any setting has", key=key[:MAX_KEY]) from error


# --- Flink ---------------------------------------------------------------------------------------------


def _flink(path: Path, text: str) -> ConfigSource:
    if path.name == LINES_FILE:
        return _line_format(path, text)
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError
    from ruamel.yaml.nodes import MappingNode

    yaml = YAML(typ="safe", pure=True)  # "rt" puts a BEL where a folded scalar has a line break
    yaml.composer.warn_double_anchors = False  # they are allowed, the later one counts
    try:
        root = yaml.compose(text)
        if root is None:
            return ConfigSource(path, False, ())
        if isinstance(root, MappingNode):
            return ConfigSource(path, False, tuple(_bounded(path, _flat_yaml(path, root, "", 0))))
        wrong = "is no YAML mapping of keys to values"
    except RecursionError as error:
        raise _refuse(path, "is nested too deeply") from error
    except MarkedYAMLError as error:
        mark = error.problem_mark
        place = f" in line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        wrong = f"is no YAML: {error.problem or error.context}{place}"
    except (YAMLError, ValueError, AssertionError) as error:  # an assertion fails at %YAML 1.11
        wrong = f"is no YAML: {' '.join(str(error).split())}"
    if path.name != YAML_FILE and _looks_like_lines(text):
        return _line_format(path, text)
    raise _refuse(path, wrong)


def _bounded(path: Path, entries: Iterable[ConfigEntry]) -> Iterator[ConfigEntry]:
    """Limit the number and the length of keys: a few YAML anchors can expand to billions of keys."""
    for count, entry in enumerate(entries):
        if count >= MAX_ENTRIES:
            raise _refuse(path, f"has more than {MAX_ENTRIES} keys")
        if len(entry.key) > MAX_KEY:
            line = f" in line {entry.line}" if entry.line is not None else ""
            raise _refuse(path, f"has a key of {len(entry.key)} characters{line}; at most {MAX_KEY} are read")
        yield entry


def _flat_yaml(path: Path, node: Node, key: str, depth: int) -> Iterator[ConfigEntry]:
    from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode

    line = node.start_mark.line + 1
    if depth > MAX_DEPTH:
        raise _refuse(path, f"is nested more than {MAX_DEPTH} deep in line {line}")
    if isinstance(node, MappingNode):
        yield from _flat_mapping(path, node, key, depth)
    elif isinstance(node, ScalarNode):
        yield ConfigEntry(key, _yaml_text(node), line)
    elif isinstance(node, SequenceNode) and all(isinstance(item, ScalarNode) for item in node.value):
        yield ConfigEntry(key, [_yaml_text(item) or "" for item in node.value], line)
    else:
        for position, item in enumerate(node.value):
            yield from _flat_yaml(path, item, f"{key}.{position}", depth + 1)


def _flat_mapping(path: Path, node: MappingNode, key: str, depth: int) -> Iterator[ConfigEntry]:
    for name, inner in node.value:
        if name.id != "scalar":
            raise _refuse(path, f"has a key that is no text in line {name.start_mark.line + 1}")
        inner_key = f"{key}.{name.value}" if key else str(name.value)
        for entry in _flat_yaml(path, inner, inner_key, depth + 1):
            # use the key's line, because the value may be below it, or far away at an anchor
            yield entry._replace(line=name.start_mark.line + 1) if entry.key == inner_key else entry


def _yaml_text(node: ScalarNode) -> str | None:
    """A scalar as written: the option parses it, and errors show it."""
    return None if str(node.tag) == _NULL else str(node.value)


def _looks_like_lines(text: str) -> bool:
    lines = [line for line in text.splitlines() if line.split("#", 1)[0].strip()]
    return bool(lines) and all(re.fullmatch(_LINE, line) for line in lines)


def _line_format(path: Path, text: str) -> ConfigSource:
    """Parse Flink's own line format: up to the first `#`, split on the first colon with a blank after it
    (`GlobalConfiguration.loadLegacyYAMLResource`)."""
    entries: list[ConfigEntry] = []
    problems: list[ConfigProblem] = []
    for number, whole in enumerate(text.split("\n"), 1):
        line = whole.split("#", 1)[0].strip()
        if not line:
            continue
        key, separator, value = line.partition(": ")
        if not separator or not key.strip() or not value.strip():
            problems.append(
                ConfigProblem(
                    file=f"{path} line {number}",
                    key=key.strip().rstrip(":"),
                    found=line,
                    problem=f"is not `key: value` and is not read, as in Flink; nested keys belong in a {YAML_FILE}",
                    severity=Severity.WARNING,
                )
            )
            continue
        entries.append(ConfigEntry(key.strip(), value.strip(), number))
    return ConfigSource(path, False, tuple(_bounded(path, entries)), tuple(problems), lines=True)
