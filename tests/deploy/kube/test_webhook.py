"""A real API server calls the webhook: for pods that ask by annotation, and for no others."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.kube import MANIFESTS, Cluster, RefusedError, objects, rendered, until
from support.webhook import Authority, Webhook

pytestmark = pytest.mark.kube

CONFIG = (MANIFESTS / "overlays/host/outfitter.toml").read_text()


def pod(annotations: dict[str, str] | None = None, *containers: Any, **spec: Any) -> Any:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"generateName": "tried-", "annotations": annotations},
        "spec": {"containers": list(containers) or [{"name": "worker", "image": "worker"}], **spec},
    }


GPU = {"outfitter.dev/resources": "gpu=2"}
TWO = {"outfitter.dev/gpu": "2"}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def webhook(cluster: Cluster, authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Webhook]:
    """The webhook with the overlay's own configuration."""
    running = Webhook(tmp_path_factory.mktemp("webhook"), authority, config=CONFIG)
    try:
        ask(cluster, authority, running.address()[1], TWO)
        yield running
    finally:
        running.stop()
        print(running.log[-4000:])


def ask(cluster: Cluster, authority: Authority, port: int, answer: dict[str, str]) -> None:
    """Have the API server ask a webhook as the overlay says. Only the address is another one, because this cluster has
    no network for Services. `answer`: how this webhook answers, and no other one."""
    (configuration,) = [each for each in objects(rendered("host")) if each["kind"] == "MutatingWebhookConfiguration"]
    trusted = base64.b64encode(authority.trusted.cert_pem.bytes()).decode()
    (asked,) = configuration["webhooks"]
    asked["clientConfig"] = {"url": f"https://127.0.0.1:{port}/mutate", "caBundle": trusted}
    cluster.kubectl("delete", "mutatingwebhookconfiguration", "outfitter", "--ignore-not-found")
    cluster.apply(json.dumps(configuration))
    until(lambda: limits(cluster.create(pod(GPU))) == answer)


def limits(made: Any, position: int = 0) -> Any:
    resources = made["spec"]["containers"][position]["resources"]
    assert resources.get("requests") == resources.get("limits")
    return resources.get("limits")


def test_a_pod_that_asks_by_annotation_gets_requests_and_limits(cluster: Cluster, webhook: Webhook) -> None:
    made = cluster.create(pod(GPU), "--dry-run=none")
    assert limits(made) == TWO
    assert limits(cluster.get("pod", made["metadata"]["name"])) == TWO


def test_the_worker_of_the_page_gets_the_configured_amount(cluster: Cluster, webhook: Webhook) -> None:
    (worker,) = objects((MANIFESTS / "worker.yaml").read_text())
    assert limits(cluster.create(worker)) == {"outfitter.dev/gpu": "1"}


def test_a_pod_without_the_annotation_gets_none(cluster: Cluster, webhook: Webhook) -> None:
    assert limits(cluster.create(pod({"outfitter.dev/other": "gpu"}))) is None
    assert limits(cluster.create(pod())) is None


def test_a_wrong_pod_is_denied_in_the_words_of_config_check(cluster: Cluster, webhook: Webhook) -> None:
    with pytest.raises(
        RefusedError,
        match=r"denied the request: error: annotation outfitter\.dev/resources: gpuu: is no configured resource",
    ):
        cluster.create(pod({"outfitter.dev/resources": "gpuu"}))
    two = [{"name": "a", "image": "a"}, {"name": "b", "image": "b"}]
    with pytest.raises(RefusedError, match=r"name the worker's with the annotation outfitter\.dev/container"):
        cluster.create(pod(GPU, *two))
    made = cluster.create(pod(GPU | {"outfitter.dev/container": "b"}, *two))
    assert (limits(made, 0), limits(made, 1)) == (None, TWO)
    own = {"name": "a", "image": "a", "resources": {"limits": {"outfitter.dev/gpu": "3"}}}
    with pytest.raises(RefusedError, match="differs from what the annotation"):
        cluster.create(pod(GPU, own))


@pytest.mark.parametrize(("amount", "own"), [("2", "2"), ("1000", "1k"), ("1000", "1000")])
def test_a_pod_that_says_the_same_itself_is_admitted(cluster: Cluster, webhook: Webhook, amount: str, own: str) -> None:
    container = {"name": "a", "image": "a", "resources": {"limits": {"outfitter.dev/gpu": own}}}
    made = cluster.create(pod({"outfitter.dev/resources": f"gpu={amount}"}, container))
    assert limits(made) == {"outfitter.dev/gpu": own.replace("1000", "1k")}


def test_the_annotation_of_a_pod_that_exists_changes_nothing(cluster: Cluster, webhook: Webhook) -> None:
    name = cluster.create(pod(), "--dry-run=none")["metadata"]["name"]
    cluster.kubectl("annotate", "pod", name, "outfitter.dev/resources=gpuu")
    assert limits(cluster.get("pod", name)) is None
    cluster.kubectl("delete", "pod", name, "--now", "--wait=false")


def test_a_renewed_certificate_is_trusted(cluster: Cluster, webhook: Webhook, authority: Authority) -> None:
    authority.renew()
    assert limits(cluster.create(pod(GPU))) == TWO


def test_while_the_webhook_is_down_only_pods_that_ask_are_stopped(
    cluster: Cluster, authority: Authority, tmp_path: Path
) -> None:
    away = Webhook(tmp_path, authority, config=CONFIG.replace("outfitter.dev/gpu", "outfitter.dev/away"))
    try:
        ask(cluster, authority, away.address()[1], {"outfitter.dev/away": "2"})
    finally:
        away.stop()
    with pytest.raises(RefusedError, match=r"failed calling webhook \"resources\.outfitter\.dev\""):
        cluster.create(pod(GPU))
    assert limits(cluster.create(pod(), "--dry-run=none")) is None
    assert limits(cluster.create(pod({"team": "a"}))) is None
