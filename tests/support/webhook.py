"""A real `outfitter webhook` in a process of its own, and reviews in the form that API servers send."""

from __future__ import annotations

import base64
import http.client
import json
import re
import signal
import ssl
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import trustme

from support.documents import ROOT
from support.managers.process import OUTFITTER, environment
from support.polling import until

CONFIG = """\
external-resources = ["gpu", "fpga", "dongle", "off"]
[external-resource.gpu]
amount = 1
kubernetes.config-key = "nvidia.com/gpu"
[external-resource.fpga]
amount = 3
kubernetes.config-key = "intel.com/fpga"
[external-resource.dongle]
amount = 1
[external-resource.off]
amount = 0
kubernetes.config-key = "example.org/off"
"""
_ADDRESS = re.compile(r"at (https://[^/]+)/mutate")
_CREATE = json.loads((ROOT / "tests/webhook/reviews/create-pod.json").read_text())
"""What kube-apiserver 1.34.4 sent for `kubectl create --dry-run=server`."""


def review(annotations: Mapping[str, str] | None, *containers: Mapping[str, Any], **request: Any) -> bytes:
    """A review of the creation of a pod, with these annotations, containers and fields of the request."""
    body: dict[str, Any] = json.loads(json.dumps(_CREATE))
    pod = body["request"]["object"]
    pod["metadata"]["annotations"] = annotations
    if containers:
        pod["spec"]["containers"] = list(containers)
    body["request"] |= request
    return json.dumps(body).encode()


def patched(pod: Any, answer: Mapping[str, Any]) -> Any:
    """The pod after the patch of an answer: a JSON patch whose operations add or replace members of objects."""
    response = answer["response"]
    if "patch" not in response:
        return pod
    pod = json.loads(json.dumps(pod))
    assert response["patchType"] == "JSONPatch"
    for operation in json.loads(base64.b64decode(response["patch"])):
        assert operation["op"] == "add"
        *path, last = (part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:])
        target = pod
        for part in path:
            target = target[int(part) if isinstance(target, list) else part]
        target[last] = operation["value"]
    return pod


class Authority:
    """A certificate authority, and a server's certificate of it in files that a renewal replaces."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.trusted = trustme.CA()
        self.cert, self.key = folder / "tls.crt", folder / "tls.key"
        self.renew()

    def renew(self) -> None:
        """Replace both files, as cert-manager and kubelet do: by renaming."""
        issued = self.trusted.issue_cert("127.0.0.1", "localhost")
        chain = b"".join(part.bytes() for part in issued.cert_chain_pems)
        for file, content in ((self.cert, chain), (self.key, issued.private_key_pem.bytes())):
            new = file.with_suffix(".new")
            new.write_bytes(content)
            new.replace(file)

    def context(self) -> ssl.SSLContext:
        """The context of a client that trusts this authority alone."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self.trusted.configure_trust(context)
        return context


class Webhook:
    """`outfitter webhook` that listens on a port which the kernel picks."""

    def __init__(self, folder: Path, authority: Authority, *arguments: str, config: str = CONFIG) -> None:
        (folder / "webhook.toml").write_text(config)
        self._log = folder / "webhook.log"
        self._context = authority.context()
        files = ("--cert-file", str(authority.cert), "--key-file", str(authority.key))
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*OUTFITTER, "webhook", "--config", "webhook.toml", "--listen", "127.0.0.1:0", *files, *arguments],
                cwd=folder, env=environment(), stdout=subprocess.DEVNULL, stderr=log,
            )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log(self) -> str:
        return self._log.read_text()

    def address(self) -> tuple[str, int]:
        """Wait until it listens."""

        def look() -> re.Match[str] | None:
            assert self._process.poll() is None, self.log
            return _ADDRESS.search(self.log)

        found = until(look, lambda: self.log)
        host, port = found[1].removeprefix("https://").split(":")
        return host, int(port)

    @contextmanager
    def connected(self) -> Iterator[http.client.HTTPSConnection]:
        """A connection over TLS, whose certificate is checked."""
        connection = http.client.HTTPSConnection(*self.address(), context=self._context, timeout=30)
        try:
            connection.connect()
            yield connection
        finally:
            connection.close()

    def request(self, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, bytes]:
        """The status and the body of an answer."""
        with self.connected() as connection:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.status, response.read()

    def post(self, body: bytes) -> tuple[int, Any]:
        """The status and the decoded answer to a review; the text of any other answer."""
        status, answered = self.request("POST", "/mutate?timeout=5s", body, **{"Content-Type": "application/json"})
        return status, json.loads(answered) if status == 200 else answered.decode()

    def stop(self) -> int:
        """End it in order; returns the exit code."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(timeout=30)
        finally:
            self._process.kill()
            self._process.wait()
