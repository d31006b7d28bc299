"""deploy/compose and deploy/image, without running them: `make image` does that."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest
from ruamel.yaml import YAML

from outfitter_service.cli import outfitter
from outfitter_service.config import load
from support.documents import ROOT

FOLDER = ROOT / "deploy" / "compose"
DOCKERFILE = ROOT / "deploy" / "image" / "Dockerfile"
FILE: dict[str, Any] = YAML(typ="safe").load(FOLDER / "compose.yaml")
SERVICES: dict[str, dict[str, Any]] = FILE["services"]
OURS = {name: service for name, service in SERVICES.items() if service["image"] == "outfitter:local"}
PINNED = re.compile(r"[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}")

every_service = pytest.mark.parametrize("name", SERVICES)


@every_service
def test_what_a_service_publishes_only_this_machine_reaches(name: str) -> None:
    assert all(port.startswith("127.0.0.1:") for port in SERVICES[name].get("ports", []))


@every_service
def test_no_service_has_a_capability_and_only_kafka_writes_to_its_root(name: str) -> None:
    service = SERVICES[name]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service.get("read_only", False) == (name != "kafka")


@every_service
def test_an_image_of_others_is_pinned_by_tag_and_digest(name: str) -> None:
    assert name in OURS or PINNED.fullmatch(SERVICES[name]["image"])


def test_both_stages_of_our_image_have_one_base_that_is_pinned() -> None:
    text = DOCKERFILE.read_text()
    (base,) = re.findall(r"^ARG PYTHON_IMAGE=(.*)$", text, re.MULTILINE)
    assert PINNED.fullmatch(base)
    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) == {"${PYTHON_IMAGE}"}


@pytest.mark.parametrize("name", [name for name, service in OURS.items() if "entrypoint" not in service])
def test_the_command_line_understands_the_command_of_each_service(name: str) -> None:
    command: click.Command = outfitter
    context, arguments = click.Context(outfitter), SERVICES[name]["command"]
    while isinstance(command, click.Group):
        first, *arguments = arguments
        command = command.get_command(context, first) or pytest.fail(f"there is no {first}")
        context = click.Context(command, parent=context)
    command.make_parser(context).parse_args(list(arguments))


@every_service
def test_each_file_that_a_service_sees_is_there(name: str) -> None:
    sources = [volume.split(":")[0] for volume in SERVICES[name].get("volumes", [])]
    for source in sources:
        assert (FOLDER / source).exists() if source.startswith(".") else source in FILE["volumes"], source


def test_a_manager_understands_its_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SERVICES["manager-1"]["environment"].items():
        monkeypatch.setenv(name, value)
    settings = load(str(FOLDER / "outfitter.toml"), {})
    assert settings.problems == ()
    assert settings.host == "gpu-1"


def test_prometheus_scrapes_each_manager_and_the_api_and_grafana_asks_it() -> None:
    read = YAML(typ="safe").load
    jobs = {job["job_name"]: job["static_configs"] for job in read(FOLDER / "prometheus.yml")["scrape_configs"]}
    managers = [name for name in SERVICES if name.startswith("manager-")]
    assert jobs == {
        "outfitter": [{"targets": [f"{name}:9477" for name in managers]}],
        "outfitter-api": [{"targets": ["api:9478"]}],
    }
    assert SERVICES["api"]["command"][:3] == ["api", "--listen", "0.0.0.0:9478"]
    (source,) = read(FOLDER / "grafana" / "datasources.yml")["datasources"]
    assert source["url"] == "http://prometheus:9090"


def test_the_token_is_new_each_time_and_stays_out_of_the_repository(tmp_path: Path) -> None:
    script = tmp_path / "new-token"
    script.write_bytes((FOLDER / "new-token").read_bytes())
    tokens = set()
    for _ in range(2):
        subprocess.run(["sh", script], check=True)
        tokens.add((tmp_path / "secrets" / "api-token").read_text())
    assert [len(token) for token in tokens] == [64, 64]
    assert (tmp_path / "secrets").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "secrets" / "api-token").stat().st_mode & 0o444 == 0o444
    file = FILE["secrets"]["api-token"]["file"]
    assert f"/deploy/compose/{Path(file).parent}/" in (ROOT / ".gitignore").read_text().splitlines()


def test_a_directory_in_place_of_the_token_is_refused_with_what_to_do(tmp_path: Path) -> None:
    script = tmp_path / "new-token"
    script.write_bytes((FOLDER / "new-token").read_bytes())
    (tmp_path / "secrets" / "api-token").mkdir(parents=True)
    done = subprocess.run(["sh", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"rmdir '{tmp_path}/secrets/api-token'" in done.stderr
