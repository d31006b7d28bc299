"""A pod template comes back with the amounts in it, and otherwise as it was."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from outfitter_service.requests import RequestError, request_in_pod_template
from support.processes.command_line import outfitter

TWO = {"nvidia.com/gpu": "2"}
TEMPLATE = """\
# the team's template
apiVersion: v1
kind: Pod
metadata: {name: worker, labels: {enabled: "yes", on: off, build: "0123"}}
spec:
  securityContext: {fsGroup: 0644}
  tolerations: []
  volumes:
  - name: long
    hostPath: {path: "/a long path that nobody should fold just because it is longer than eighty characters/x"}
  containers:
  - name: sidecar
    resources: &shared
      limits: &same {cpu: 1.50, memory: 1Gi, nvidia.com/gpu: 7}
      requests: *same
    args: ["--x=1", '~', 1e3, 0x1F, 2001-12-14, 1_000, .5]
    command:
    - sh
    - |
      echo   hi
      exit
  - name: flink-main-container
    resources: *shared
    env:
    - {name: EMPTY, value: ""}
"""


def parsed(text: str) -> Any:
    yaml = YAML(typ="safe", pure=True)
    yaml.composer.warn_double_anchors = False
    return yaml.load(text)


def containers(text: str) -> dict[str, Any]:
    return {item["name"]: item for item in parsed(text)["spec"]["containers"]}


def test_the_main_container_requests_and_is_limited_to_the_amounts() -> None:
    main = containers(request_in_pod_template(TEMPLATE, TWO))["flink-main-container"]
    for field in ("requests", "limits"):
        assert main["resources"][field] == {"cpu": 1.5, "memory": "1Gi", "nvidia.com/gpu": "2"}


def test_quantities_are_text_so_that_no_reader_takes_them_for_numbers() -> None:
    assert 'nvidia.com/gpu: "2"' in request_in_pod_template(TEMPLATE, TWO)


def test_every_other_field_is_as_it_was() -> None:
    before, after = parsed(TEMPLATE), parsed(request_in_pod_template(TEMPLATE, TWO))
    assert after["spec"]["containers"][0] == before["spec"]["containers"][0]
    for document in (before, after):
        del document["spec"]["containers"][1]["resources"]
    assert after == before


def test_untouched_lines_are_written_as_they_stood() -> None:
    after = request_in_pod_template(TEMPLATE, TWO).splitlines()
    changed = {"    resources: &shared", "    resources: *shared"}
    for line in TEMPLATE.splitlines():
        assert line in after or line in changed or "same" in line


def test_nothing_to_request_changes_nothing() -> None:
    assert parsed(request_in_pod_template(TEMPLATE, {})) == parsed(TEMPLATE)


def test_requesting_twice_is_requesting_once() -> None:
    once = request_in_pod_template(TEMPLATE, TWO)
    assert request_in_pod_template(once, TWO) == once


def pod(*names: str, **resources: Any) -> str:
    items = "".join(f"\n  - name: {name}" for name in names)
    return f"kind: Pod\nspec:\n  containers:{items or ' []'}\n"


def test_the_only_container_is_the_main_one_whatever_its_name() -> None:
    assert "resources" in containers(request_in_pod_template(pod("worker"), TWO))["worker"]


def test_flinks_name_wins_among_several() -> None:
    found = containers(request_in_pod_template(pod("a", "flink-main-container", "b"), TWO))
    assert [name for name, item in found.items() if "resources" in item] == ["flink-main-container"]


def test_the_container_can_be_named() -> None:
    found = containers(request_in_pod_template(pod("a", "flink-main-container"), TWO, container="a"))
    assert [name for name, item in found.items() if "resources" in item] == ["a"]


@pytest.mark.parametrize("text", [pod(), "spec: {}\n", "spec:\n  containers:\n"])
def test_a_template_without_containers_gets_flinks_main_container(text: str) -> None:
    assert set(containers(request_in_pod_template(text, TWO))) == {"flink-main-container"}


def test_a_workload_has_its_pod_template_within() -> None:
    text = "kind: Deployment\nspec:\n  replicas: 2\n  template:\n    spec:\n      containers: [{name: a}]\n"
    document = parsed(request_in_pod_template(text, TWO))
    assert document["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"] == TWO
    assert document["spec"]["replicas"] == 2


POD = "{containers: [{name: sidecar}, {name: flink-main-container}]}"
FLINK = "{podTemplate: {spec: POD}, taskManager: {podTemplate: {spec: POD}}}"
KINDS = {
    "CronJob": ("{jobTemplate: {spec: {template: {spec: POD}}}}", "spec.jobTemplate.spec.template.spec"),
    "DaemonSet": ("{template: {spec: POD}}", "spec.template.spec"),
    "FlinkDeployment": (FLINK, "spec.taskManager.podTemplate.spec"),
    "FlinkBlueGreenDeployment": (
        "{template: {spec: {podTemplate: {spec: POD}}}}",
        "spec.template.spec.podTemplate.spec",
    ),
    "JobSet": (
        "{replicatedJobs: [{template: {spec: {template: {spec: POD}}}}]}",
        "spec.replicatedJobs.0.template.spec.template.spec",
    ),
    "Job\napiVersion: batch.volcano.sh/v1alpha1": (
        "{tasks: [{template: {spec: POD}}]}",
        "spec.tasks.0.template.spec",
    ),
    "RayCluster": (
        "{workerGroupSpecs: [{groupName: a, template: {spec: POD}}]}",
        "spec.workerGroupSpecs.0.template.spec",
    ),
}


def workload(kind: str, pod_spec: str = POD) -> str:
    return f"kind: {kind}\nspec: {KINDS[kind][0].replace('POD', pod_spec)}\n"


def at(document: Any, path: str) -> Any:
    for key in path.split("."):
        document = document[int(key) if isinstance(document, list) else key]
    return document


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_has_its_pod_where_kubernetes_looks_for_it(kind: str) -> None:
    text = workload(kind)
    document = parsed(request_in_pod_template(text, TWO))
    assert at(document, KINDS[kind][1])["containers"][1].pop("resources") == {"requests": TWO, "limits": TWO}
    assert document == parsed(text)


def test_a_pod_template_has_no_spec_of_its_own() -> None:
    document = parsed(request_in_pod_template(f"kind: PodTemplate\ntemplate: {{spec: {POD}}}\n", TWO))
    assert document["template"]["spec"]["containers"][1]["resources"]["limits"] == TWO
    assert "spec" not in document


@pytest.mark.parametrize("kind", ["CronJob", "DaemonSet", "FlinkDeployment"])
def test_a_pod_without_containers_gets_its_container_in_the_pod_and_nowhere_else(kind: str) -> None:
    document = parsed(request_in_pod_template(workload(kind, "{nodeName: n}"), TWO))
    assert [item["name"] for item in at(document, KINDS[kind][1])["containers"]] == ["flink-main-container"]
    assert "containers" not in document["spec"]


def test_that_job_managers_request_the_amounts_as_well_is_said() -> None:
    told: list[str] = []
    text = f"kind: FlinkDeployment\nspec: {{podTemplate: {{spec: {POD}}}, taskManager: {{resource: {{cpu: 1}}}}}}\n"
    document = parsed(request_in_pod_template(text, TWO, warn=told.append))
    assert document["spec"]["podTemplate"]["spec"]["containers"][1]["resources"]["limits"] == TWO
    [said] = told
    assert "job managers" in said
    request_in_pod_template(workload("FlinkDeployment"), TWO, warn=told.append)
    assert told == [said]


def test_json_stays_json() -> None:
    text = '{"kind": "Pod", "spec": {"containers": [{"name": "a", "args": ["é", "1"]}], "n": 1.5}}'
    document = json.loads(request_in_pod_template(text, TWO))
    assert document["spec"]["containers"][0].pop("resources") == {"requests": TWO, "limits": TWO}
    assert document == json.loads(text)


@pytest.mark.parametrize("resources", ["null", "{}", "{limits: null}", "{requests: {}, claims: [{name: x}]}"])
def test_half_empty_resources_are_filled(resources: str) -> None:
    text = f"spec: {{containers: [{{name: a, resources: {resources}}}]}}\n"
    found = containers(request_in_pod_template(text, TWO))["a"]["resources"]
    assert (found["requests"], found["limits"]) == (TWO, TWO)
    assert ("claims" in found) == ("claims" in resources)


WRONG = {
    "": "has no spec",
    "- a": "has no spec",
    "kind: Pod": "has no spec",
    "spec: 3": "spec must be a mapping",
    "spec: {template: {}}": "no spec.template.spec",
    "spec: {containers: 3}": "containers must be a list",
    "spec: {containers: [3]}": "must be a mapping",
    "spec: {containers: [{name: a, resources: 3}]}": "resources must be a mapping",
    "spec: {containers: [{name: a, resources: {limits: [1]}}]}": "resources.limits must be a mapping",
    "spec: [": "is no YAML",
    "a: 1\na: 2": "is no YAML",
    '{"spec": {}, "spec": {}}': "is no YAML",
    "kind: ConfigMap\ndata: {a: b}": "this ConfigMap has no pod template",
    "kind: CronJob\nspec: {schedule: x}": "no spec.jobTemplate.spec.template.spec",
    "kind: FlinkDeployment\nspec: {}": "no spec.taskManager.podTemplate.spec or spec.podTemplate.spec",
    f"kind: List\nitems: [{{kind: Pod, spec: {POD}}}, {{kind: Pod, spec: {POD}}}]": "several pod templates",
    f"kind: RayCluster\nspec: {{head: {{spec: {POD}}}, worker: {{spec: {POD}}}}}": "templates .spec.head, spec.worker",
    "spec: {schedule: x, jobTemplate: {spec: {}}}": "without a kind has no pod template",
    "kind: X\nspec: &a {b: *a}": "this X has no pod template",
    "kind: X\na: &a [1]\nb: &b [*a, *a]\nspec: {c: [*b, *b]}": "this X has no pod template",
    "spec: !!int": "is no YAML",
    "spec: !!omap x": "is no YAML",
    "spec: " + "[" * 1_000: "nested too deeply",
    "a: {b: 1}\n---\nb: 1": "no YAML of one document",
    '{"kind": "Pod", "spec": {"containers": [{"name": "a"}], "n": 1e400}}': "a number that JSON cannot have",
    f"kind: FlinkDeployment\nspec: {{podTemplate: &p {{spec: {POD}}}, taskManager: {{podTemplate: *p}}}}": (
        "spec.taskManager.podTemplate.spec stands in another place"
    ),
    f"kind: Deployment\nspec: {{x: &s {POD}, template: {{spec: {{<<: *s}}}}}}": "stands in another place",
    "kind: Pod\nspec: {initContainers: [&c {name: a}], containers: [*c]}": "stands in another place",
    pod("a", "b"): "no container named flink-main-container; its containers are a, b",
    pod("a", "flink-main-container", "flink-main-container"): "more than one container named",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_is_no_clear_pod_template_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match=WRONG[text]):
        request_in_pod_template(text, TWO)


def test_a_named_container_must_be_there() -> None:
    with pytest.raises(RequestError, match="no container named x; its containers are a"):
        request_in_pod_template(pod("a"), TWO, container="x")


def test_an_anchor_may_be_used_again() -> None:
    text = "spec: {a: &x 1, b: &x 2, c: *x, containers: [{name: a}]}\n"
    assert parsed(request_in_pod_template(text, TWO))["spec"]["c"] == 2


def test_the_amounts_given_are_left_alone() -> None:
    amounts = copy.deepcopy(TWO)
    request_in_pod_template(TEMPLATE, amounts)
    assert amounts == TWO


CONFIG = """
external-resources = ["gpu"]
[external-resource.gpu]
amount = 2
kubernetes.config-key = "nvidia.com/gpu"
yarn.config-key = "yarn.io/gpu"
"""


def test_the_commands_print_what_is_configured(tmp_path: Path) -> None:
    (tmp_path / "outfitter.toml").write_text(CONFIG)
    (tmp_path / "pod.yaml").write_text(TEMPLATE)
    from_file = outfitter("kubernetes", "pod-template", "pod.yaml", cwd=tmp_path)
    assert (from_file.returncode, from_file.stdout) == (0, request_in_pod_template(TEMPLATE, TWO))
    assert outfitter("kubernetes", "pod-template", "-", cwd=tmp_path, stdin=TEMPLATE).stdout == from_file.stdout
    yarn = outfitter("yarn", "resources", "--json", cwd=tmp_path)
    assert (yarn.returncode, yarn.stdout) == (0, '{"yarn.io/gpu":2}\n')
    over = outfitter("yarn", "resources", "--maximum", "yarn.io/gpu=1", cwd=tmp_path)
    assert (over.returncode, over.stdout) == (1, "")
    assert "2 of yarn.io/gpu requested, the cluster allows at most 1" in over.stderr


def test_a_wrong_configuration_requests_nothing(tmp_path: Path) -> None:
    (tmp_path / "outfitter.toml").write_text(CONFIG.replace("amount = 2", "amount = 0.5"))
    (tmp_path / "pod.yaml").write_text(TEMPLATE)
    for command in (("kubernetes", "pod-template", "pod.yaml"), ("yarn", "resources")):
        done = outfitter(*command, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (1, "")
        assert "external-resource.gpu.amount" in done.stderr
