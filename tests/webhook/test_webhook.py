"""`outfitter webhook` from outside, as an API server and as a stranger see it: over TLS, with bounds."""

from __future__ import annotations

import gzip
import json
import socket
import ssl
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
from aiohttp import ClientSession

from outfitter_service.http.connections import MOST
from outfitter_service.http.listener import Listening, serving
from outfitter_service.http.tls import Certificate
from outfitter_service.webhook.application import application
from outfitter_service.webhook.bodies import LARGEST_REVIEW, Bodies
from outfitter_service.webhook.metrics import WebhookMetrics
from outfitter_service.webhook.review import ReviewOutcome
from support.processes import command_line
from support.webhook import CONFIG, Authority, Webhook, patched, review

GPU = {"outfitter.dev/resources": "gpu=2"}
JSON = {"Content-Type": "application/json"}
TWO = {"nvidia.com/gpu": "2"}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@contextmanager
def running(folder: Path, authority: Authority) -> Iterator[Webhook]:
    started = Webhook(folder, authority)
    try:
        yield started
    finally:
        started.stop()
        print(started.log[-4000:])


@pytest.fixture(scope="module")
def webhook(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[Webhook]:
    """One webhook for the tests that leave it as it is."""
    with running(tmp_path_factory.mktemp("webhook"), authority) as started:
        yield started


def metric(webhook: Webhook, line: str) -> float:
    text = webhook.request("GET", "/metrics")[1].decode()
    (value,) = [found.rpartition(" ")[2] for found in text.splitlines() if found.startswith(line)]
    return float(value)


def test_a_pod_that_asks_is_changed_and_a_wrong_one_denied_and_both_are_counted(webhook: Webhook) -> None:
    before = [metric(webhook, f'outfitter_webhook_reviews_total{{outcome="{outcome}"}}') for outcome in ReviewOutcome]
    answers = metric(webhook, "outfitter_webhook_review_seconds_count")
    body = review(GPU)
    status, made = webhook.post(body)
    assert status == 200
    pod = patched(json.loads(body)["request"]["object"], made)
    assert pod["spec"]["containers"][0]["resources"]["limits"] == {"cpu": "2", "nvidia.com/gpu": "2"}
    status, made = webhook.post(review({"outfitter.dev/resources": "gpuu"}))
    assert (status, made["response"]["allowed"]) == (200, False)
    assert "did you mean gpu?" in made["response"]["status"]["message"]
    assert webhook.post(review(None))[1]["response"] == {"uid": json.loads(body)["request"]["uid"], "allowed": True}
    assert webhook.post(b"{}")[0] == 400
    after = [metric(webhook, f'outfitter_webhook_reviews_total{{outcome="{outcome}"}}') for outcome in ReviewOutcome]
    assert after == [count + 1 for count in before]
    assert metric(webhook, "outfitter_webhook_review_seconds_count") == answers + 4


def test_probes_and_metrics_are_served_and_it_ends_in_order(tmp_path: Path, authority: Authority) -> None:
    with running(tmp_path, authority) as webhook:
        for path in ("/livez", "/readyz"):
            assert webhook.request("GET", path) == (200, b"ok\n")
        assert webhook.request("GET", "/mutate")[0] == 405
        assert webhook.request("GET", "/")[0] == 404
        assert webhook.stop() == 0
    assert "webhook for gpu, fpga, dongle at https://127.0.0.1:" in webhook.log


def test_a_renewed_certificate_is_shown_to_the_next_client_and_open_connections_go_on(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    with running(tmp_path, authority) as webhook:
        with webhook.connected() as earlier:
            before = shown(earlier.sock)
            authority.renew()
            with webhook.connected() as later:
                assert shown(later.sock) != before
            earlier.request("GET", "/livez")
            assert earlier.getresponse().read() == b"ok\n"
        assert metric(webhook, "outfitter_webhook_certificate_renewals_total") == 1
        assert metric(webhook, "outfitter_webhook_certificate_failures_total") == 0
        assert metric(webhook, "outfitter_webhook_certificate_refused") == 0
        authority.key.write_text("garbage")
        assert webhook.post(review(GPU))[0] == 200
        assert metric(webhook, "outfitter_webhook_certificate_failures_total") == 1
        assert metric(webhook, "outfitter_webhook_certificate_refused") == 1
    assert "the renewed certificate cannot be read" in webhook.log


def shown(connection: Any) -> bytes:
    certificate = connection.getpeercert(binary_form=True)
    assert isinstance(certificate, bytes)
    return certificate


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({"Content-Type": "application/yaml"}, review(GPU), 415),
        ({}, review(GPU), 415),
        ({"Content-Type": "application/json"}, b" " * (LARGEST_REVIEW + 1), 413),
        ({"Content-Type": "application/json", "Content-Encoding": "gzip"}, gzip.compress(b" " * 2**20), 415),
        ({"Content-Type": "application/json"}, b"[" * 1_000_000, 400),
    ],
    ids=["yaml", "no type", "too long", "packed", "too deep"],
)
def test_what_is_no_review_is_refused_and_the_next_one_answered(
    webhook: Webhook, headers: dict[str, str], body: bytes, status: int
) -> None:
    assert webhook.request("POST", "/mutate", body, **headers)[0] == status
    assert webhook.post(review(GPU))[0] == 200
    assert "Traceback" not in webhook.log


def test_held_connections_keep_no_review_from_its_answer(webhook: Webhook, authority: Authority) -> None:
    half = b"POST /mutate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
    with ExitStack() as held:
        for number in range(4 * MOST):
            connection = held.enter_context(socket.create_connection(webhook.address(), timeout=30))
            if number % 2:
                connection = held.enter_context(
                    authority.context().wrap_socket(connection, server_hostname="localhost")
                )
                connection.sendall(half)
        assert webhook.post(review(GPU))[0] == 200


async def test_a_review_that_does_not_end_is_refused_in_time(authority: Authority) -> None:
    certificate = Certificate(str(authority.cert), str(authority.key))
    metrics, listening = WebhookMetrics(certificate), Listening(address="127.0.0.1:0", tls=certificate)
    ended = anyio.Event()

    async def endless() -> Any:
        yield b"{"
        await ended.wait()

    bodies = Bodies(read_s=0.05)
    async with (
        serving(lambda held: application(held, lambda _: {}, metrics, bodies=bodies), listening) as address,
        ClientSession(f"https://{address}") as client,
        client.post("/mutate", data=endless(), ssl=authority.context(), headers=JSON) as response,
    ):  # fmt: skip
        assert (response.status, await response.text()) == (408, "the review did not end within 0.05 s\n")
        ended.set()


HELD = 64
MIB = 1024 * 1024


def large_review(size: int) -> bytes:
    """A review of a pod with one very long string in its container's resources."""
    return review(GPU, {"name": "a", "resources": {"x": "A" * size}})


async def test_reviews_that_do_not_end_hold_a_bounded_sum_of_bytes_and_keep_no_other_from_its_answer(
    authority: Authority,
) -> None:
    certificate = Certificate(str(authority.cert), str(authority.key))
    metrics, listening = WebhookMetrics(certificate), Listening(address="127.0.0.1:0", tls=certificate)
    bodies, most_held = Bodies(most=8 * MIB, read_s=600.0), 0
    half = b"POST /mutate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 4000000\r\n\r\n"
    half += b" " * 2 * MIB
    async with (
        serving(lambda held: application(held, lambda _: TWO, metrics, bodies=bodies), listening) as address,
        ClientSession(f"https://{address}") as client,
        AsyncExitStack() as held,
    ):
        host, _, port = address.rpartition(":")
        for _ in range(HELD // 2):
            stream = await anyio.connect_tcp(
                host, int(port), ssl_context=authority.context(), tls_standard_compatible=False
            )
            held.push_async_callback(anyio.aclose_forcefully, stream)
            with suppress(anyio.BrokenResourceError):
                await stream.send(half)
            most_held = max(most_held, bodies.held)
        assert 4 * MIB < most_held <= 8 * MIB
        async with client.post("/mutate", data=review(GPU), ssl=authority.context(), headers=JSON) as response:
            assert (response.status, (await response.json())["response"]["allowed"]) == (200, True)
        assert bodies.held <= 8 * MIB


def test_the_answer_to_a_large_pod_is_no_larger_than_another(webhook: Webhook) -> None:
    with webhook.connected() as connection:
        for size in (10, 3 * MIB):
            connection.request("POST", "/mutate", large_review(size), JSON)
            assert len(connection.getresponse().read()) < 1000


def test_readers_that_take_no_answer_keep_no_review_from_its_own(webhook: Webhook, authority: Authority) -> None:
    body = large_review(MIB)
    head = b"POST /mutate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(
        body
    )
    with ExitStack() as held:
        for _ in range(8):
            connection = held.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.settimeout(60)
            connection.connect(webhook.address())
            connection = held.enter_context(authority.context().wrap_socket(connection, server_hostname="localhost"))
            connection.sendall(head + body)
        assert webhook.post(review(GPU))[0] == 200


def test_it_serves_nobody_without_tls(webhook: Webhook) -> None:
    with socket.create_connection(webhook.address(), timeout=30) as plain:
        plain.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        with suppress(ConnectionResetError):
            assert b"200" not in plain.recv(4096)
    stranger = ssl.create_default_context()
    with (
        socket.create_connection(webhook.address(), timeout=30) as plain,
        pytest.raises(ssl.SSLCertVerificationError),
    ):
        stranger.wrap_socket(plain, server_hostname="localhost")


@pytest.mark.parametrize(
    ("config", "arguments", "words"),
    [
        (CONFIG.replace("amount = 3", "amount = -3"), (), "external-resource.fpga.amount: must be a whole number"),
        (CONFIG, ("--cert-file", "missing"), "TLS cannot be set up: No such file or directory"),
        (CONFIG, ("--listen", "nowhere"), "write HOST:PORT"),
    ],
)
def test_with_a_wrong_configuration_it_does_not_start(
    tmp_path: Path, authority: Authority, config: str, arguments: tuple[str, ...], words: str
) -> None:
    (tmp_path / "outfitter.toml").write_text(config)
    files = ("--cert-file", str(authority.cert), "--key-file", str(authority.key))
    done = command_line.outfitter(
        "webhook", "--config", "outfitter.toml", "--listen", "127.0.0.1:0", *files, *arguments, cwd=tmp_path
    )
    assert done.returncode == 1
    assert words in done.stderr


def test_it_needs_a_certificate(tmp_path: Path) -> None:
    done = command_line.outfitter("webhook", cwd=tmp_path)
    assert done.returncode == 2
    assert "--cert-file" in done.stderr
