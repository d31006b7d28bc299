"""The Kubernetes manifests, against the program and each other: a wrong option shows in a pod that restarts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from ruamel.yaml import YAML

from outfitter_proto import __version__
from outfitter_proto.bus.addresses import listener
from outfitter_service.cli import outfitter
from outfitter_service.cli._lib.driver_check import driver_problems
from outfitter_service.config import Severity, inspect, options
from outfitter_service.requests.annotation import ANNOTATION
from outfitter_service.webhook.application import PATH
from outfitter_service.webhook.bodies import READ_S
from support.documents import ROOT

FOLDER = ROOT / "deploy" / "kubernetes"
SETTINGS = {option.variable for option in options.SETTINGS}


def objects() -> Iterator[Any]:
    """The objects of all files, as they are before kustomize."""
    for file in sorted(FOLDER.rglob("*.yaml")):
        yield from filter(None, YAML(typ="safe", pure=True).load_all(file))


OBJECTS = [*objects()]


def pod_specs() -> Iterator[Any]:
    for each in OBJECTS:
        if each["kind"] == "Pod":
            yield each["spec"]
        elif "template" in each.get("spec", {}):
            yield each["spec"]["template"]["spec"]


OURS = [
    container
    for spec in pod_specs()
    for container in spec["containers"]
    if container.get("image", "").partition(":")[0] == "outfitter"
]
SERVING = [container for container in OURS if "ports" in container]


@pytest.mark.parametrize("container", OURS, ids=lambda container: container["args"][0])
def test_the_command_line_understands_each_containers_arguments(container: Any) -> None:
    name, *arguments = container["args"]
    command: Any = outfitter.get_command(click.Context(outfitter), name)
    while isinstance(command, click.Group):
        command = command.get_command(click.Context(command), arguments.pop(0))
    command.make_parser(click.Context(command)).parse_args(arguments)


@pytest.mark.parametrize("container", OURS, ids=lambda container: container["args"][0])
def test_each_variable_of_ours_is_read(container: Any) -> None:
    ours = {each["name"] for each in container.get("env", ()) if each["name"].startswith("OUTFITTER_")}
    assert ours <= SETTINGS | {"OUTFITTER_CONFIG", "OUTFITTER_WORKER"}


@pytest.mark.parametrize("container", SERVING, ids=lambda container: container["args"][0])
def test_probes_go_to_the_port_at_which_the_program_listens(container: Any) -> None:
    (port,) = container["ports"]
    text = " ".join([*container["args"], *(each.get("value", "") for each in container["env"])])
    (address,) = re.findall(r"0\.0\.0\.0:[0-9]+", text)
    assert listener(address).port == port["containerPort"]
    for probe, path in (("startupProbe", "/livez"), ("livenessProbe", "/livez"), ("readinessProbe", "/readyz")):
        asked = container[probe]["httpGet"]
        assert (asked["path"], asked["port"]) == (path, port["name"])
        assert asked.get("scheme", "HTTP").lower() == port["name"]


@pytest.mark.parametrize("file", sorted(FOLDER.rglob("outfitter.toml")), ids=lambda file: str(file.parent.name))
def test_each_configuration_passes_config_check_in_its_scope(file: Path) -> None:
    inspection = inspect(file, {}, {"OUTFITTER_SCOPE": "cluster" if file.parent.name == "cluster" else "host"})
    problems = [*inspection.problems, *driver_problems(inspection)]
    assert [str(problem) for problem in problems if problem.severity is Severity.ERROR] == []


def test_our_image_has_the_tag_of_this_version() -> None:
    tags = [image["newTag"] for each in OBJECTS if each["kind"] == "Kustomization" for image in each.get("images", ())]
    assert tags
    assert {*tags} == {__version__}
    assert {container["image"] for container in OURS} == {"outfitter", f"outfitter:{__version__}"}


def test_api_servers_ask_where_the_webhook_answers_and_about_pods_that_ask_alone() -> None:
    (configuration,) = [each for each in OBJECTS if each["kind"] == "MutatingWebhookConfiguration"]
    (webhook,) = configuration["webhooks"]
    (condition,) = webhook["matchConditions"]
    assert condition["expression"] == f"'{ANNOTATION}' in object.metadata.?annotations.orValue({{}})"
    assert webhook["clientConfig"]["service"]["path"] == PATH
    assert webhook["timeoutSeconds"] == READ_S
    assert webhook["rules"][0]["operations"] == ["CREATE"]


def test_only_managers_of_host_scope_see_their_node() -> None:
    privileged = [spec for spec in pod_specs() if {"hostPID", "hostNetwork", "hostIPC"} & spec.keys()]
    assert [spec["containers"][0]["args"] for spec in privileged] == [["serve"]]
    assert not any("hostPath" in volume for spec in pod_specs() for volume in spec.get("volumes", ()))


def test_workers_have_another_user_than_who_has_secrets() -> None:
    users = {"run": set[int](), "others": set[int]()}
    for spec in pod_specs():
        if "securityContext" not in spec:  # a patch of another object
            continue
        command = spec["containers"][0].get("args", [""])[0]
        users["run" if command == "run" else "others"].add(spec["securityContext"]["runAsUser"])
    assert users["run"] == {65533}
    assert users["run"].isdisjoint(users["others"])


def test_no_policy_is_a_way_out_to_any_address() -> None:
    policies = [each for each in objects() if each["kind"] == "NetworkPolicy"]
    assert len(policies) >= 5
    rules = [rule for policy in policies for rule in policy["spec"].get("egress", ())]
    assert len(rules) >= 6
    assert all(rule.get("to") for rule in rules)
    labels = {"outfitter.dev/kafka": "true"}
    assert [{"namespaceSelector": {"matchLabels": labels}}] in [rule["to"] for rule in rules]
    (trial,) = [
        each for each in objects() if each["kind"] == "Namespace" and each["metadata"]["name"] == "outfitter-trial"
    ]
    assert labels.items() <= trial["metadata"]["labels"].items()


def test_the_page_names_each_overlay_and_each_base() -> None:
    page = (FOLDER / "README.md").read_text()
    bases = [path.parent for path in FOLDER.rglob("kustomization.yaml") if path.parent.name != "namespace"]
    assert [path for path in bases if f"({path.relative_to(FOLDER)}/kustomization.yaml)" not in page] == []
