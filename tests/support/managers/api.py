"""A real `outfitter api` in a process of its own."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.managers.process import OUTFITTER, environment
from support.polling import until

ADDRESS = re.compile(r"API at (https?://[^/]+)/")


class Api:
    """`outfitter api` that listens on a port which the kernel picks. `url`: without a path."""

    def __init__(self, folder: Path, bus: str, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        self._log = folder / "api.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*OUTFITTER, "api", "--bus", bus, "--listen", "127.0.0.1:0", *arguments],
                cwd=folder, env=environment(**(env or {})), stdout=subprocess.DEVNULL, stderr=log,
            )  # fmt: skip

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def url(self) -> str | None:
        """None: it does not listen yet."""
        found = ADDRESS.search(self.log)
        if found is None and self._process.poll() is not None:
            raise AssertionError(f"the API has ended with {self._process.returncode}:\n{self.log}")
        return found[1] if found else None

    def wait_for_url(self) -> str:
        """Wait until it listens."""
        return until(lambda: self.url, lambda: self.log)

    def get(self, path: str, **headers: str) -> tuple[int, Any]:
        """The status and the decoded body of a page."""
        request = urllib.request.Request(f"{self.url}{path}", headers=headers)  # noqa: S310 - an HTTP URL
        try:
            with urllib.request.urlopen(request, timeout=30) as response:  # noqa: S310 - the same
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def metrics(self) -> str:
        """What Prometheus would scrape."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as response:  # noqa: S310 - an HTTP URL
            return str(response.read().decode())

    @property
    def is_ready(self) -> bool:
        return self.url is not None and bool(self.get("/api/v1/status")[1].get("ready"))

    def stop(self) -> int:
        """End it in order; returns the exit code."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(timeout=30)
        finally:
            self._process.kill()
            self._process.wait()


@contextmanager
def running(folder: Path, bus: str, *arguments: str, env: Mapping[str, str] | None = None) -> Iterator[Api]:
    """An API, ended after the block."""
    api = Api(folder, bus, *arguments, env=env)
    try:
        yield api
    finally:
        api.stop()
        print(f"--- api\n{api.log[-4000:]}")
