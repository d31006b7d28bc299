"""A real API server takes every manifest with strict validation, and admits each pod at its namespace's level."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from support.documents import shell_lines
from support.kube import MANIFESTS, OVERLAYS, Cluster, RefusedError, objects, rendered
from tools import tool

pytestmark = pytest.mark.kube

overlays = pytest.mark.parametrize("overlay", OVERLAYS)


def pods(overlay: str) -> Iterator[Any]:
    """The pod of each workload of an overlay, in its namespace."""
    for each in objects(rendered(overlay)):
        if each["kind"] in {"DaemonSet", "Deployment", "Job"}:
            template = each["spec"]["template"]
            metadata = {
                **template.get("metadata", {}),
                "generateName": "tried-",
                "namespace": each["metadata"]["namespace"],
            }
            yield {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


@overlays
def test_the_api_server_takes_each_object_of_an_overlay(cluster: Cluster, overlay: str) -> None:
    text = rendered(overlay)
    if "kind: ServiceMonitor" in text:
        cluster.apply(rendered("host"))
    taken = cluster.apply(text).splitlines()
    assert len(taken) == len(objects(text))
    assert all(line.endswith(" serverside-applied") for line in taken)


@overlays
def test_kubectl_renders_what_kustomize_renders(overlay: str) -> None:
    done = subprocess.run(
        [tool("kubectl"), "kustomize", MANIFESTS / "overlays" / overlay],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == rendered(overlay)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("hostPID: true", "hostPid: true"), ("kind: NetworkPolicy", "kind: NetworkPolice"), ("jobLabel:", "joblabel:"),
     ("failurePolicy: Fail", "failurePolicy: Fails"), ("rotationPolicy: Always", "rotationPolicy: Alway"),
     ("object.metadata.?annotations", "object.metadata.annotation?s")],
)  # fmt: skip
def test_a_manifest_with_a_mistake_is_refused(cluster: Cluster, right: str, wrong: str) -> None:
    cluster.apply(rendered("host"))
    text = "---\n".join(rendered(overlay) for overlay in ("host", "monitoring"))
    cluster.apply(text, "--dry-run=server")
    assert right in text
    with pytest.raises(RefusedError):
        cluster.apply(text.replace(right, wrong), "--dry-run=server")


@pytest.mark.parametrize("overlay", [overlay for overlay in OVERLAYS if overlay != "monitoring"])
def test_each_pod_is_admitted_at_the_level_of_its_namespace(cluster: Cluster, overlay: str) -> None:
    cluster.apply(rendered(overlay))
    tried = [*pods(overlay)]
    for pod in tried:
        cluster.add_account(pod["metadata"]["namespace"])
        assert cluster.create(pod)["spec"]["containers"]
    assert len([pod for pod in tried if "hostPID" in pod["spec"]]) == (overlay != "cluster")


def test_a_pod_of_the_daemon_set_is_refused_in_the_other_namespace(cluster: Cluster) -> None:
    cluster.apply(rendered("host"))
    cluster.add_account("outfitter")
    (pod,) = [pod for pod in pods("host") if "hostPID" in pod["spec"]]
    pod["metadata"]["namespace"] = "outfitter"
    pod["spec"]["serviceAccountName"] = "default"
    with pytest.raises(RefusedError, match=r'violates PodSecurity "restricted.*host namespaces \(hostPID=true\)'):
        cluster.create(pod)


def test_the_commands_of_the_page_that_name_a_node_work(cluster: Cluster) -> None:
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "gpu-3"}, "status": {"capacity": {"cpu": "8"}}}
    cluster.create(node, "--dry-run=none")
    commands = [line.strip() for line in shell_lines(MANIFESTS / "README.md") if " node gpu-3 " in line]
    assert len(commands) == 2
    for command in commands:
        _run(cluster, command)
    changed = cluster.get("node", "gpu-3")
    assert changed["metadata"]["labels"]["outfitter.dev/host"] == "true"
    assert changed["status"]["capacity"] == {"cpu": "8", "outfitter.dev/gpu": "4"}


@pytest.mark.parametrize(("overlay", "kind", "namespace"), [
    ("host", "daemonset", "outfitter-host"), ("cluster", "deployment", "outfitter"),
])  # fmt: skip
def test_the_commands_of_the_page_that_adopt_a_ledger_work(
    cluster: Cluster, overlay: str, kind: str, namespace: str
) -> None:
    cluster.apply(rendered(overlay))
    words = re.compile(rf"kubectl -n {namespace} (patch|scale) {kind} ")
    commands = [line.strip() for line in shell_lines(MANIFESTS / "README.md") if words.match(line.strip())]
    for command in commands:
        _run(cluster, command)
    workload = cluster.get(kind, "outfitter", f"--namespace={namespace}")["spec"]
    assert workload["template"]["spec"]["containers"][0]["args"] == ["serve", "--adopt-ledger"]
    assert workload.get("replicas") == {"host": None, "cluster": 2}[overlay]
    cluster.kubectl("delete", kind, "outfitter", f"--namespace={namespace}")


def _run(cluster: Cluster, command: str) -> None:
    """Run a line of the page that begins with kubectl."""
    program, *arguments = shlex.split(command)
    assert program == "kubectl"
    cluster.kubectl(*arguments)
