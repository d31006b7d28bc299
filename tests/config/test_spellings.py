"""Each spelling of each setting, in each place, means what it always meant: `spellings.json` has them all.

The spellings stand here literally. They are what users have in their files, so no table of the product makes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct, structs, to_builtins

from outfitter_service.cli._lib import options, setting_flags
from outfitter_service.cli.commands.manager.serve import serve
from outfitter_service.config import ConfigurationError, connection, inspect
from outfitter_service.config.resources import MIN_HEALTHY_S

GOLDEN = Path(__file__).with_name("spellings.json")

SETTINGS = {
    "bus": "kafka://b:9092",
    "cluster": "prod",
    "host": "gpu-3",
    "scope": "cluster",
    "replica": "one",
    "session-timeout": "20s",
    "on-stop": "stay",
    "http": "127.0.0.1:9000",
    "api": "true",
    "api-token-file": "token",
    "lease": "none",
    "lease-grace": "3 s",
    "wait": "5 min",
    "ended-retention": "2h",
    "checkpoint-interval": "30m",
    "beat-interval": "10s",
    "shutdown-timeout": "20s",
    "log-format": "json",
    "log-level": "debug",
    "history": "no",
    "strict": "on",
    "kafka.security-protocol": "SASL_SSL",
    "kafka.sasl-mechanism": "PLAIN",
    "kafka.sasl-username": "me",
    "kafka.sasl-password-file": "password",
    "kafka.sasl-token-file": "token",
    "kafka.ca-file": "ca",
    "kafka.cert-file": "cert",
    "kafka.key-file": "key",
    "kafka.key-password-file": "pass",
}

OPTIONS = {
    "amount": "2",
    "driver-factory.class": "files",
    "driver": "files",
    "kubernetes.config-key": "x.com/gpu",
    "kubernetes.key": "x.com/gpu",
    "yarn.config-key": "yarn.io/gpu",
    "yarn.key": "yarn.io/gpu",
    "sharing": "shared",
    "replicas": "3",
    "replicas-same-device": "true",
    "on-failure": "wait",
    "driver-timeout": "3s",
    "min-healthy-time": "5m",
    "param.discovery-script.path": "/a",
    "discovery-script": "/a",
    "param.any.thing": "x",
    "param.": "x",
    "same": "a;b",
    "where.model": "A100",
    "where.memory.total_bytes.min": "40Gi",
    "where.": "x",
    "unknown": "x",
}
LISTED = ("external-resources", "gpu")
PREFIXES = ("external-resource.", "external.", "taskmanager.external-resource.", "taskmanager.resource.", "other.")

FLAGS: dict[str, tuple[str, ...]] = {
    "--bus": ("--bus", "kafka://b:9092"),
    "--cluster": ("--cluster", "prod"),
    "--host": ("--host", "gpu-3"),
    "--http": ("--http", "127.0.0.1:9000"),
    "--api": ("--api",),
    "--scope": ("--scope", "cluster"),
    "--replica": ("--replica", "one"),
    "--strict": ("--strict",),
    "--log-format": ("--log-format", "json"),
    "--log-level": ("--log-level", "debug"),
}


USUAL = {
    name: value
    for name, value in to_builtins(inspect(None, {}, {"OUTFITTER_HOST": "h"}, required=False).settings).items()
    if name not in {"resources", "origins", "problems", "file"}
}
CONNECTED = {name: USUAL.get(name, {}) for name in ("bus", "host", "cluster", "history", "login")}
NEW = [("replicas", 1), ("replicas_same_device", False), ("min_healthy", MIN_HEALTHY_S)]
UNSAID: tuple[Any, ...] = ("gpu", None, {}, "exclusive", "fail-worker")


class Spelling(Struct, frozen=True):
    """One way to say something: a file with a name and a text, variables, or words of the command line."""

    file: str = ""
    text: str = ""
    environment: dict[str, str] = {}
    overrides: dict[str, str] = {}

    @property
    def row(self) -> str:
        """Its key in the golden table."""
        return json.dumps(structs.astuple(self))


def in_files(key: str, value: str, *earlier: tuple[str, str]) -> Iterator[Spelling]:
    """The key in each syntax, after some others."""
    lines = [*earlier, (key, value)]
    yield Spelling("x.toml", "\n".join(f"{name} = '{text}'" for name, text in lines))
    for file in ("config.yaml", "flink-conf.yaml"):
        yield Spelling(file, "\n".join(f"{name}: {text}" for name, text in lines))


def of_setting(name: str) -> Iterator[Spelling]:
    value = SETTINGS[name]
    for key in (name, f"outfitter.{name}", name.replace("-", "_")):
        yield from in_files(key, value)
        yield Spelling(overrides={key: value})
    variable = f"OUTFITTER_{name.replace('-', '_').replace('.', '_').upper()}"
    yield Spelling(environment={variable: value})
    yield Spelling(environment={variable: ""})


def of_option(option: str) -> Iterator[Spelling]:
    value = OPTIONS[option]
    for prefix in PREFIXES:
        key = f"{prefix}gpu.{option}"
        yield from in_files(key, value, LISTED)
        yield Spelling(overrides={"external-resources": "gpu", key: value})
        both = ("external.gpu.driver", "files") if option == "amount" else (f"{prefix}gpu.amount", "1")
        yield from in_files(key, value, LISTED, both)
    variable = f"OUTFITTER_EXTERNAL_RESOURCE_GPU_{option.replace('-', '_').replace('.', '_').upper()}"
    yield Spelling(environment={"OUTFITTER_EXTERNAL_RESOURCES": "gpu", variable: value})


def of_two(option: str) -> Iterator[Spelling]:
    """The same said twice, in different spellings, in both orders."""
    value = OPTIONS[option]
    for first, second in (
        ("external-resource.", "external."),
        ("external.", "external-resource."),
        ("external.", "taskmanager.resource."),
        ("external.", "external."),
    ):
        yield from in_files(f"{second}gpu.{option}", value, LISTED, (f"{first}gpu.{option}", "7"))


def spellings() -> dict[str, Spelling]:
    every = [
        *(spelling for name in SETTINGS for spelling in of_setting(name)),
        *(spelling for option in OPTIONS for spelling in of_option(option)),
        *(spelling for option in ("amount", "kubernetes.key", "driver") for spelling in of_two(option)),
    ]
    return {spelling.row: spelling for spelling in every}


def meant(spelling: Spelling, folder: Path) -> dict[str, Any]:
    """What a spelling means: what differs from the defaults, its places of origin, and the problems."""
    file = folder / spelling.file if spelling.file else None
    if file is not None:
        file.write_text(spelling.text)
    found = inspect(file, spelling.overrides, {"OUTFITTER_HOST": "h", **spelling.environment}, required=False)
    said: dict[str, Any] = {
        "problems": [[each.key, each.severity[0], each.problem] for each in found.problems if each.severity != "info"]
    }
    if found.settings is not None:
        ours = to_builtins(found.settings, enc_hook=str)
        said["set"] = {name: ours[name] for name in USUAL if ours[name] != USUAL[name]}
        said["gpu"] = {
            name: value
            for resource in ours["resources"]
            for name, value in resource.items()
            if value not in UNSAID and (name, value) not in NEW and name not in {"directory", "reason"}
        }
        said["from"] = {key: place for key, place in ours["origins"].items() if place != "default" and key != "host"}
    try:
        used = to_builtins(connection(file, spelling.overrides, {"OUTFITTER_HOST": "h", **spelling.environment}))
        said["connection"] = {name: value for name, value in used.items() if value != CONNECTED[name]}
    except ConfigurationError as error:
        said["connection"] = {each.key: each.problem for each in error.problems}
    kept = {name: value for name, value in said.items() if value}
    return json.loads(json.dumps(kept).replace(f"{folder}/", ""))  # type: ignore[no-any-return]


def of_flag(flag: str) -> dict[str, str]:
    """What a flag of `outfitter serve` gives for the settings."""
    ctx = serve.make_context("serve", [*FLAGS[flag]])
    return options.given(ctx, *setting_flags.NAMES)


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(GOLDEN.read_text())
    return found


@pytest.mark.parametrize("kind", [*SETTINGS, *OPTIONS])
def test_each_spelling_means_what_it_always_meant(kind: str, golden: dict[str, Any], tmp_path: Path) -> None:
    made = [*of_setting(kind)] if kind in SETTINGS else [*of_option(kind)]
    for spelling in made:
        assert meant(spelling, tmp_path) == golden[spelling.row], spelling


@pytest.mark.parametrize("option", ["amount", "kubernetes.key", "driver"])
def test_of_two_spellings_the_same_counts_as_ever(option: str, golden: dict[str, Any], tmp_path: Path) -> None:
    for spelling in of_two(option):
        assert meant(spelling, tmp_path) == golden[spelling.row], spelling


@pytest.mark.parametrize("flag", FLAGS)
def test_each_flag_of_serve_is_its_setting(flag: str, golden: dict[str, Any]) -> None:
    assert of_flag(flag) == golden[flag]


def test_the_golden_table_has_each_spelling_and_no_other(golden: dict[str, Any]) -> None:
    assert golden.keys() == {*spellings(), *FLAGS}


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        rows = {key: meant(spelling, Path(name)) for key, spelling in spellings().items()}
    rows |= {flag: of_flag(flag) for flag in FLAGS}
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(row)}" for key, row in rows.items())
    GOLDEN.write_text(f"{{\n{lines}\n}}\n")
