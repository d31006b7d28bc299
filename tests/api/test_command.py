"""`outfitter api`, and `api = true` of a manager, from outside."""

from __future__ import annotations

import json
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.kafka.broker import Broker, KafkaBroker
from support.managers.api import Api, running
from support.managers.process import Manager, ManagerError, StartManager, files_config, serving_on
from support.processes import command_line

pytestmark = pytest.mark.slow


def names(found: tuple[int, Any], field: str = "worker") -> list[str]:
    status, body = found
    assert status == 200, body
    return [item[field] for item in body["items"]]


@contextmanager
def open_events(url: str) -> Iterator[Any]:
    with urllib.request.urlopen(f"{url}/api/v1/events", timeout=30) as response:  # noqa: S310 - HTTP
        yield response


def next_event(response: Any) -> Any:
    """The data of the next event."""
    while not (line := response.readline()).startswith(b"data: "):
        assert line, "the stream has ended"
    return json.loads(line.removeprefix(b"data: "))


def register(manager: Manager, worker: str, state: str = "allocated") -> None:
    manager.outfitter("register", "--worker", worker, "--lease", "none")
    manager.wait_for_state(worker, state)


def shows(manager: Manager, api: Api) -> None:
    """Try what a reader does: pages, then events from there on, and on after the manager has gone."""
    register(manager, "first")
    manager.wait_for(lambda: api.is_ready)
    manager.wait_for(lambda: names(api.get("/api/v1/workers")) == ["first"])
    with open_events(str(api.url)) as response:
        register(manager, "second", "pending")
        while not next_event(response)["key"].startswith(f"{manager.host}/second/"):
            pass
    assert names(api.get("/api/v1/queue")) == ["second"]
    status = manager.outfitter("status", "--json").stdout
    assert api.get("/api/v1/allocations")[1]["items"] == json.loads(status)
    devices = manager.outfitter("devices", "--json").stdout
    assert api.get("/api/v1/devices")[1]["items"] == json.loads(devices)
    explained = manager.outfitter("explain", "second", "--json").stdout
    assert api.get("/api/v1/workers/second/explanations")[1]["items"] == json.loads(explained)
    steps = [json.loads(line) for line in manager.outfitter("history", "--json").stdout.splitlines()]
    manager.wait_for(lambda: len(api.get("/api/v1/history")[1]["items"]) == len(steps))
    assert sorted(api.get("/api/v1/history")[1]["items"], key=lambda item: item["offset"]) == steps


def test_it_shows_what_the_commands_show_and_needs_no_manager(start_manager: StartManager, tmp_path: Path) -> None:
    manager = start_manager(gpus=1)
    with running(tmp_path, manager.bus_url) as api:
        shows(manager, api)
        manager.stop()
        manager.wait_for(lambda: not api.get("/api/v1/hosts")[1]["items"][0]["managed"])
        assert api.stop() == 0
    with running(tmp_path, manager.bus_url) as api:  # from the topics alone
        manager.wait_for(lambda: api.is_ready)
        assert names(api.get("/api/v1/workers")) == ["first", "second"]


@pytest.mark.kafka
def test_it_shows_all_hosts_of_a_broker_and_a_manager_shows_its_own(kafka_broker: KafkaBroker, tmp_path: Path) -> None:
    cluster = "api-hosts"
    with ExitStack() as stack:
        manager = stack.enter_context(
            serving_on(kafka_broker, tmp_path / "one", cluster=cluster, host="one", arguments=("--api",))
        )
        other = Manager(
            tmp_path / "two", files_config(tmp_path / "two/gpus"), bus=kafka_broker.url, cluster=cluster, host="two"
        )
        stack.callback(other.kill9)
        other.start()
        api = stack.enter_context(running(tmp_path, kafka_broker.url, "--cluster", cluster))
        shows(manager, api)
        register(other, "elsewhere")
        manager.wait_for(lambda: "elsewhere" in names(api.get("/api/v1/workers")))
        assert names(api.get("/api/v1/hosts"), "host") == ["one", "two"]
        assert api.get("/api/v1/status")[1]["behind"] is not None
        own = json.loads(manager._get("/api/v1/workers")[1])
        assert [item["worker"] for item in own["items"]] == ["first", "second"]


def test_a_manager_with_the_api_shows_its_workers_beside_its_metrics(start_manager: StartManager) -> None:
    manager = start_manager(gpus=1, extra="api = true")
    register(manager, "first")
    manager.wait_for(lambda: '"first"' in manager._get("/api/v1/workers")[1])
    assert manager._get("/readyz")[0] == 200
    assert manager.metric("outfitter_ready") == 1
    assert manager.stop() == 0


def test_a_manager_has_no_api_unless_it_is_asked_for(start_manager: StartManager) -> None:
    assert start_manager()._get("/api/v1/status")[0] == 404


def test_with_the_api_a_thousand_held_connections_keep_no_probe_from_its_answer(start_manager: StartManager) -> None:
    manager = start_manager(arguments=("--api",), descriptors=(512, 512))
    host, port = manager.url.removeprefix("http://").split(":")
    with ExitStack() as held:
        for number in range(1000):
            connection = held.enter_context(socket.create_connection((host, int(port)), timeout=30))
            connection.sendall(b"GET /api/v1/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" if number % 2 else b"GET /l")
        for path in ("/livez", "/readyz", "/metrics", "/api/v1/status"):
            assert manager._get(path)[0] == 200


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0"])
def test_at_an_address_that_others_reach_nothing_is_served_without_a_token(
    address: str, start_manager: StartManager, tmp_path: Path
) -> None:
    done = command_line.outfitter("api", "--bus", f"sqlite://{tmp_path}/bus.db", "--listen", address, cwd=tmp_path)
    assert done.returncode == 1
    assert f"the API is not served at {address} without protection" in done.stderr
    with pytest.raises(ManagerError, match="is not served at 0"):
        start_manager(arguments=("--api", "--http", "0.0.0.0:0"))


def test_a_token_from_a_file_lets_in_and_nothing_else_does(start_manager: StartManager, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a-token-of-this-test\n")
    (tmp_path / "token").chmod(0o600)
    manager = start_manager(gpus=1, extra=f'api = true\napi-token-file = "{tmp_path}/token"')
    with running(tmp_path, manager.bus_url, env={"OUTFITTER_API_TOKEN_FILE": str(tmp_path / "token")}) as api:
        manager.wait_for(lambda: api.url is not None)
        assert api.get("/api/v1/hosts")[0] == manager._get("/api/v1/hosts")[0] == 401
        assert manager._get("/livez")[0] == 200
        token = {"Authorization": "Bearer a-token-of-this-test"}
        manager.wait_for(lambda: api.get("/api/v1/status", **token)[1]["ready"])
        assert names(api.get("/api/v1/hosts", **token), "host") == [manager.host]
        assert "a-token" not in api.log + manager.log_tail()


def test_without_a_broker_it_serves_the_reason(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with running(tmp_path, f"kafka://127.0.0.1:{port}") as api:
        api.wait_for_url()
        status, problem = api.get("/api/v1/hosts")
        assert (status, problem["title"]) == (503, "Service Unavailable")
        assert f"127.0.0.1:{port}" in problem["detail"] or problem["detail"] == "starting"


@pytest.mark.kafka
def test_while_the_broker_is_away_pages_stay_and_afterwards_nothing_is_missing(
    own_broker: Broker, tmp_path: Path
) -> None:
    with (
        serving_on(own_broker, tmp_path / "one", gpus=2) as manager,
        running(tmp_path, own_broker.url) as api,
    ):
        register(manager, "first")
        manager.wait_for(lambda: api.is_ready and names(api.get("/api/v1/workers")) == ["first"])
        with open_events(str(api.url)) as events:
            own_broker.stop()
            manager.wait_for(lambda: api.get("/api/v1/status")[1]["outage"])
            assert names(api.get("/api/v1/workers")) == ["first"]
            own_broker.start()
            register(manager, "second")
            while not next_event(events)["key"].startswith(f"{manager.host}/second/"):
                pass
        manager.wait_for(lambda: api.get("/api/v1/status")[1]["outage"] is None)
        assert names(api.get("/api/v1/workers")) == ["first", "second"]


def test_a_manager_of_cluster_scope_shows_all_hosts(start_manager: StartManager) -> None:
    config = (
        'scope = "cluster"\napi = true\nexternal-resources = ["gpu"]\n[external-resource.gpu]\namount = 1\n'
        'driver = "static"\nparam.devices = "g0"\n'
    )
    manager = start_manager(config)
    for host in ("one", "two"):
        manager.outfitter("register", "--host", host, "--worker", "w", "--lease", "none")
    manager.wait_for(lambda: manager._get("/api/v1/workers")[1].count('"worker":"w"') == 2)
