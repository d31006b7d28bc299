"""Credentials that go bad while everything runs: noticed, counted, survived; all goes on when they are good again."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any

import anyio
import pytest
from structlog.testing import capture_logs

from outfitter.session.worker_session import WorkerSession
from outfitter_proto.bus import BusAuthenticationError, connect
from outfitter_proto.names import topics as names_of
from outfitter_proto.records import Register, ResourceRequest
from support.kafka.secure_broker import SecureBroker, right
from support.managers.secured import HOST, WITHIN, client, managing

pytestmark = [pytest.mark.kafka, pytest.mark.slow]


def allow_manager(broker: SecureBroker, user: str, cluster: str) -> None:
    of = names_of(cluster)
    broker.allow(
        *(right(f"User:{user}", "Write", "topic", topic) for topic in of if topic != of.registrations),
        *(right(f"User:{user}", "Read", "topic", topic) for topic in (of.registrations, of.allocations)),
        right(f"User:{user}", "Write", "transactional-id", f"{cluster}-host-{HOST}"),
    )


def allow_worker(broker: SecureBroker, user: str, cluster: str) -> None:
    of = names_of(cluster)
    broker.allow(
        right(f"User:{user}", "Write", "topic", of.registrations),
        right(f"User:{user}", "Read", "topic", of.allocations),
    )


def asking(worker: str, *, lease: float = 60.0) -> Register:
    asked = {"gpu": ResourceRequest(amount=1)}
    return Register(host=HOST, worker=worker, incarnation="1", resources=asked, lease_s=lease)


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(WITHIN):
        while not condition():  # noqa: ASYNC110 - what is waited for is another program's doing
            await anyio.sleep(0.05)


@pytest.fixture
def log() -> Iterator[list[MutableMapping[str, Any]]]:
    """What managers of this process log."""
    with capture_logs() as lines:
        yield lines


async def test_a_manager_whose_password_is_changed_answers_again_with_the_new_one(
    secure_broker: SecureBroker, cluster: str, tmp_path: Path, log: list[MutableMapping[str, Any]]
) -> None:
    """The broker ends the session and refuses the old password; what was asked meanwhile is answered once. The log has
    a line for the whole outage, not one for each connection that is refused."""
    manager_user, worker_user = f"m-{secrets.token_hex(4)}", f"w-{secrets.token_hex(4)}"
    allow_manager(secure_broker, manager_user, cluster)
    allow_worker(secure_broker, worker_user, cluster)
    login = secure_broker.scram(manager_user, listener="short")
    async with (
        managing(secure_broker.at("short"), login, cluster, tmp_path, host=HOST) as manager,
        client(secure_broker, secure_broker.oauth(worker_user)) as bus,
        WorkerSession(bus, asking("before"), cluster=cluster, manager_patience=None) as before,
    ):
        with anyio.fail_after(WITHIN):
            held = await before.wait()
        assert manager.count("outfitter_authentication_failures_total") == 0
        before_it = len(log)
        secure_broker.set_password(manager_user, "another one")
        await until(lambda: manager.count("outfitter_authentication_failures_total") >= 3)
        await until(lambda: not manager.service.ready)
        async with WorkerSession(bus, asking("meanwhile"), cluster=cluster, manager_patience=None) as meanwhile:
            refused = manager.count("outfitter_authentication_failures_total")
            await until(lambda: manager.count("outfitter_authentication_failures_total") >= refused + 2)
            assert meanwhile.record is None
            assert manager.failure is None
            secure_broker.scram(manager_user, listener="short")  # the file, which the manager reads anew
            with anyio.fail_after(WITHIN):
                answered = await meanwhile.wait()
            assert answered.token == (held.token or 0) + 1
            assert before.record == held
        await until(lambda: manager.service.ready)
    assert manager.failure is None
    said = [line for line in log[before_it:] if line["log_level"] in ("warning", "error", "critical")]
    assert {line["event"] for line in said} <= {
        "the bus refuses this manager, trying until it does not",
        "the bus is away, trying until it works",
        "the bus is away for longer",
    }
    assert 1 <= len(said) <= 2  # one a minute, should this machine be so slow
    assert "a wrong password" in said[0]["error"]


async def test_a_worker_whose_token_expires_is_warned_and_goes_on_with_a_fresh_one(
    secure_broker: SecureBroker, cluster: str, tmp_path: Path
) -> None:
    manager_user, worker_user = f"m-{secrets.token_hex(4)}", f"w-{secrets.token_hex(4)}"
    allow_manager(secure_broker, manager_user, cluster)
    allow_worker(secure_broker, worker_user, cluster)
    at_risk = anyio.Event()
    token = secure_broker.oauth(worker_user, listener="short")  # the listener ends sessions with their tokens
    async with (
        managing(secure_broker.at("sasl"), secure_broker.oauth(manager_user), cluster, tmp_path, host=HOST) as manager,
        connect(secure_broker.at("short"), token) as bus,
        WorkerSession(
            bus,
            asking("w", lease=9.0),
            cluster=cluster,
            manager_patience=None,
            on_lease_at_risk=lambda _error: at_risk.set(),
        ) as session,
    ):
        with anyio.fail_after(WITHIN):
            held = await session.wait()
        secure_broker.oauth(worker_user, listener="short", lifetime=-60)
        await until(lambda: bus.refusals >= 2)
        with anyio.fail_after(WITHIN):
            await at_risk.wait()
        secure_broker.oauth(worker_user, listener="short")
        lease = session.allocation_watch.lease
        await until(lambda: lease.until_risk is not None and lease.until_risk > 4)
        assert session.record == held
        assert manager.count("outfitter_lease_expiries_total") == 0


async def test_a_file_with_a_password_that_is_missing_for_a_moment_is_survived(
    secure_broker: SecureBroker, cluster: str, tmp_path: Path
) -> None:
    """Where secrets are mounted, files vanish and come back when they are exchanged."""
    manager_user, worker_user = f"m-{secrets.token_hex(4)}", f"w-{secrets.token_hex(4)}"
    allow_manager(secure_broker, manager_user, cluster)
    allow_worker(secure_broker, worker_user, cluster)
    login = secure_broker.scram(manager_user, listener="short")
    password = Path(login["sasl-password-file"])
    async with (
        managing(secure_broker.at("short"), login, cluster, tmp_path, host=HOST) as manager,
        client(secure_broker, secure_broker.oauth(worker_user)) as bus,
    ):
        away = password.rename(tmp_path / "away")
        await until(lambda: not manager.service.ready)
        away.rename(password)
        async with WorkerSession(bus, asking("w"), cluster=cluster, manager_patience=None) as session:
            with anyio.fail_after(WITHIN):
                assert (await session.wait()).state == "allocated"
        assert manager.failure is None


async def test_a_manager_that_starts_with_a_wrong_password_ends_and_says_so(
    secure_broker: SecureBroker, cluster: str, tmp_path: Path
) -> None:
    login = secure_broker.scram("late")
    login["sasl-password-file"] = str(secure_broker.write("late.wrong", b"wrong"))
    async with managing(secure_broker.at("sasl"), login, cluster, tmp_path, host=HOST) as manager:
        pass
    assert isinstance(manager.failure, BusAuthenticationError)
    assert "User:late in: a wrong password" in str(manager.failure)
