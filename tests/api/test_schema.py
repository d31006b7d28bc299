"""The document and the API say the same: schemathesis tries what the document allows, and what it does not."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.kafka.broker import KafkaBroker
from support.managers.api import running
from support.managers.process import Manager, files_config

pytestmark = pytest.mark.slow

TOKEN = "a-token-of-this-test"
EXAMPLES = 12
"""Of each operation in each phase. `make test-slow` has no time for more."""


@contextmanager
def crowd(folder: Path, *, bus: str | None, cluster: str) -> Iterator[Manager]:
    """A manager. One worker holds its GPU, two wait, and one message was refused."""
    folder.mkdir()
    manager = Manager(folder, files_config(folder / "gpus", gpus=1), bus=bus, cluster=cluster, host="gpu-3")
    if bus is not None:
        created = manager.outfitter("topics", "create", "--partitions", "3", "--replication", "1")
        assert created.returncode == 0, created.stderr
    try:
        manager.start("--api")
        for worker, amount in (("holder", 1), ("late", 1), ("later", 1), ("refused", 7)):
            asked = ("--worker", worker, "--lease", "none", "--resource", f"gpu={amount}")
            manager.outfitter("register", *asked)
        manager.wait_for_state("later", "pending")
        yield manager
    finally:
        manager.kill9()


def schemathesis(folder: Path, manager: Manager, url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Try every operation with every check. Names in paths are those that exist; test_routes.py has others."""
    record = manager.record("late")
    assert record is not None
    names = {"path.host": "gpu-3", "path.worker": "late", "path.incarnation": record["incarnation"]}
    lines = [f"{json.dumps(name)} = {json.dumps(value)}" for name, value in names.items()]
    (folder / "schemathesis.toml").write_text("\n".join(["[parameters]", *lines, ""]))
    return subprocess.run(
        [Path(sys.executable).with_name("schemathesis"), "run", f"{url}/api/v1/openapi.json", "--url", url,
         "--checks", "all", "--exclude-path", "/api/v1/events", "--max-examples", str(EXAMPLES), "--seed", "1",
         "--no-color", *arguments],
        cwd=folder, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip


@pytest.mark.kafka
@pytest.mark.timeout(500)
def test_nothing_is_found_in_the_api_of_a_cluster(kafka_broker: KafkaBroker, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    with (
        crowd(tmp_path / "manager", bus=kafka_broker.url, cluster="schema") as manager,
        running(tmp_path, manager.bus_url, "--cluster", manager.cluster, "--token-file", "token") as api,
    ):
        token = {"Authorization": f"Bearer {TOKEN}"}
        manager.wait_for(lambda: api.url is not None and api.get("/api/v1/hosts", **token)[1].get("items"))
        done = schemathesis(tmp_path, manager, str(api.url), "--header", f"Authorization: Bearer {TOKEN}")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.timeout(500)
def test_nothing_is_found_in_the_api_of_a_manager(tmp_path: Path) -> None:
    with crowd(tmp_path / "manager", bus=None, cluster="schema") as manager:
        done = schemathesis(tmp_path, manager, manager.url)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
