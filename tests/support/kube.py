"""A real Kubernetes API server with its etcd, on loopback. No node, no controller: objects are taken, and nothing runs.

kube-apiserver, kubectl and kustomize are built from their Go modules; etcd is Debian's.
"""

from __future__ import annotations

import json
import secrets
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from ruamel.yaml import YAML

from support import polling
from support.documents import ROOT
from tools import tool

MANIFESTS = ROOT / "deploy/kubernetes"
OVERLAYS = sorted(path.parent.name for path in MANIFESTS.glob("overlays/*/kustomization.yaml"))


def rendered(overlay: str) -> str:
    """An overlay's objects as YAML, by kustomize itself."""
    done = subprocess.run(
        [tool("kustomize"), "build", MANIFESTS / "overlays" / overlay], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def objects(text: str) -> list[Any]:
    """The objects in a stream of YAML."""
    return [each for each in YAML(typ="safe", pure=True).load_all(text) if each]


class RefusedError(Exception):
    """kubectl failed. The message is what it said."""


class Cluster:
    """One API server, as kubectl sees it."""

    def __init__(self, url: str, folder: Path, token: str) -> None:
        """`folder`: has the server's certificate in `pki`."""
        self._login = [
            f"--server={url}", f"--certificate-authority={folder}/pki/apiserver.crt", f"--token={token}",
            f"--cache-dir={folder}/cache",
        ]  # fmt: skip

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """What kubectl prints.

        Raises:
            RefusedError: it failed.
        """
        done = subprocess.run(
            [tool("kubectl"), *self._login, *arguments],
            input=stdin, capture_output=True, text=True, timeout=60, cwd=ROOT, env={"HOME": "/nonexistent"},
        )  # fmt: skip
        if done.returncode != 0:
            raise RefusedError(done.stderr)
        return done.stdout

    def apply(self, objects: str, *more: str) -> str:
        """Have the API server take objects in YAML or JSON, with strict validation of each field."""
        return self.kubectl("apply", "--server-side", "--validate=strict", *more, "--filename=-", stdin=objects)

    def add_account(self, namespace: str) -> None:
        """Add the service account that a controller adds to each namespace."""
        account = {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": {"name": "default", "namespace": namespace},
        }
        self.apply(json.dumps(account))

    def get(self, *arguments: str) -> Any:
        return json.loads(self.kubectl("get", *arguments, "--output=json"))

    def create(self, wanted: Any, *more: str) -> Any:
        """A pod, or another object, as the API server makes it. It is only tried, unless `--dry-run=none` is given.

        Raises:
            RefusedError: it is refused.
        """
        arguments = more or ("--dry-run=server",)
        made = self.kubectl(
            "create", "--validate=strict", "--output=json", *arguments, "--filename=-", stdin=json.dumps(wanted)
        )
        return json.loads(made)


@contextmanager
def running(folder: Path) -> Iterator[Cluster]:
    """A cluster with the custom resources that the manifests use, ended after the block."""
    with ExitStack() as stack:
        etcd = f"http://127.0.0.1:{_free_port()}"
        peer = f"http://127.0.0.1:{_free_port()}"
        start_program(
            stack, folder / "etcd.log",
            [tool("etcd"), f"--data-dir={folder}/etcd", f"--listen-client-urls={etcd}",
             f"--advertise-client-urls={etcd}", f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}",
             f"--initial-cluster=default={peer}", "--unsafe-no-fsync"],
        )  # fmt: skip
        port, token = _free_port(), secrets.token_hex(16)
        (folder / "tokens.csv").write_text(f"{token},admin,admin,system:masters\n")
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        (folder / "accounts.key").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        server = start_program(
            stack, folder / "kube-apiserver.log",
            [tool("kube-apiserver"), f"--etcd-servers={etcd}", "--bind-address=127.0.0.1",
             "--advertise-address=127.0.0.1", f"--secure-port={port}", f"--cert-dir={folder}/pki",
             "--service-cluster-ip-range=10.0.0.0/24", "--service-account-issuer=https://kubernetes.default.svc",
             f"--service-account-key-file={folder}/accounts.key",
             f"--service-account-signing-key-file={folder}/accounts.key",
             "--authorization-mode=RBAC", f"--token-auth-file={folder}/tokens.csv"],
        )  # fmt: skip
        cluster = Cluster(f"https://127.0.0.1:{port}", folder, token)
        until(lambda: cluster.kubectl("get", "--raw=/readyz") == "ok", server)
        for file in sorted(tool("crds").glob("*.yaml")):
            cluster.kubectl("apply", "--server-side", f"--filename={file}")
        cluster.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
        cluster.add_account("default")
        cluster.apply('{"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "handler": "nvidia", '
                      '"metadata": {"name": "nvidia"}}')  # fmt: skip
        yield cluster


def until(holds: Any, process: subprocess.Popen[bytes] | None = None) -> None:
    """Wait until something holds; a refusal of kubectl counts as not yet."""
    refusal = "it does not hold"

    def look() -> Any:
        nonlocal refusal
        assert process is None or process.poll() is None, f"ended with {process.poll()}: {refusal}"
        try:
            return holds()
        except RefusedError as error:
            refusal = str(error)
            return None

    polling.until(look, lambda: refusal)


def start_program(
    stack: ExitStack, log: Path, command: Sequence[object], env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a program that ends with `stack`; then the end of its log is printed."""
    output = stack.enter_context(log.open("wb"))
    process = subprocess.Popen([str(part) for part in command], stdout=output, stderr=output, env=env)

    def end() -> None:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        print(f"--- {log.name}\n{log.read_text()[-3000:]}")

    stack.callback(end)
    return process


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])
