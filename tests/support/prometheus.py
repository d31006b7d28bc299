"""A real Prometheus in a process of its own, and the program that checks its rules."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.documents import ROOT
from support.polling import until
from tools import tool

RULES = ROOT / "deploy" / "prometheus" / "rules.yml"
STOPPED_WITHIN = 60.0


def promtool(*arguments: str) -> str:
    """Run promtool; returns what it prints. Its complaint fails the test."""
    done = subprocess.run([tool("promtool"), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Prometheus:
    """A server that listens on a port of loopback."""

    def __init__(self, url: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.url = url
        self._process = process
        self._log = log

    def get(self, path: str, **parameters: str) -> Any:
        """The `data` of an answer of its API."""
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=30) as response:  # noqa: S310 - HTTP
            return json.load(response)["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The newest values of an expression."""
        return list(self.get("query", query=expression)["result"])

    def firing(self) -> set[str]:
        """The names of the alerts that fire."""
        return {alert["labels"]["alertname"] for alert in self.get("alerts")["alerts"] if alert["state"] == "firing"}

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        """Look again and again until `condition` holds."""

        def look() -> object:
            assert self._process.poll() is None, f"Prometheus has ended:\n{self._log.read_text()}"
            return condition()

        until(look, lambda: f"{what}\n{self._log.read_text()[-4000:]}")


def rules_without_delay(folder: Path) -> Path:
    """A copy of our rules whose alerts wait for a second in place of minutes: nothing else is changed."""
    copy = folder / "rules.yml"
    copy.write_text(re.sub(r"(?m)^( +for: )\d+m$", r"\g<1>1s", RULES.read_text()))
    return copy


@contextmanager
def running(folder: Path, rules: Path, jobs: Mapping[str, str]) -> Iterator[Prometheus]:
    """A Prometheus that scrapes and evaluates each second, ended after the block. `jobs`: an address by job."""
    folder.mkdir(parents=True, exist_ok=True)
    config, log = folder / "prometheus.yml", folder / "prometheus.log"
    scrapes = [
        {"job_name": job, "static_configs": [{"targets": [address.removeprefix("http://")]}]}
        for job, address in jobs.items()
    ]
    config.write_text(
        json.dumps(
            {
                "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
                "rule_files": [str(rules)],
                "scrape_configs": scrapes,
            }
        )
    )
    promtool("check", "config", str(config))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with log.open("wb") as written:
        process = subprocess.Popen(
            [
                tool("prometheus"), f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn",
            ],
            stdin=subprocess.DEVNULL, stdout=written, stderr=written,
        )  # fmt: skip
    server = Prometheus(f"http://127.0.0.1:{port}", process, log)
    try:
        server.wait_for(lambda: _is_ready(server.url), "readiness")
        yield server
    finally:
        process.terminate()
        process.wait(STOPPED_WITHIN)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/-/ready", timeout=10) as response:  # noqa: S310 - HTTP
            return bool(response.status == 200)
    except OSError:
        return False
