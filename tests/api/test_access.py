"""Who may read the API."""

from __future__ import annotations

import ssl
from pathlib import Path

import anyio
import pytest
import trustme
from aiohttp import ClientConnectionError, ClientOSError, ClientSession

from outfitter_service.api import stream
from outfitter_service.api.access import AccessError, guard, is_loopback, read_token
from outfitter_service.api.application import application
from outfitter_service.http.listener import Listening, serving
from outfitter_service.http.tls import Certificate
from support.api import Events, fleet_of, follower_of, serving_api

TOKEN = "0123456789abcdef-token"


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    return path


@pytest.mark.parametrize("address", ["127.0.0.1:9", "127.8.8.8:9", "[::1]:9", "localhost:9", "localhost", "LOCALHOST."])
def test_loopback_needs_no_token(address: str) -> None:
    assert is_loopback(address)
    assert not guard(address, None).secured


@pytest.mark.parametrize("address", ["0.0.0.0:9", "[::]:9", "10.0.0.1:9", "gpu-3:9", "localhost.evil.example:9"])
def test_an_address_that_others_reach_is_refused_without_a_token_or_a_certificate(
    address: str, token_file: Path
) -> None:
    with pytest.raises(AccessError, match="--token-file"):
        guard(address, None)
    assert guard(address, str(token_file)).secured
    assert not guard(address, None, mutual_tls=True).secured


@pytest.mark.parametrize("text", ["", "short", "two words that are long enough", "x" * 5000, "ümlaut-and-long-enough"])
def test_a_file_without_a_usable_token_is_refused_with_what_to_write(text: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(text)
    with pytest.raises(AccessError, match="openssl rand -hex 32"):
        read_token(tmp_path / "token")
    with pytest.raises(AccessError, match="No such file"):
        read_token(tmp_path / "none")


async def test_only_the_current_token_gets_in_on_every_path_of_the_api(token_file: Path) -> None:
    with_token = guard("127.0.0.1:0", str(token_file))
    paths = ("hosts", "status", "events", "openapi.json", "nope")
    async with serving_api(follower_of(fleet_of()), with_token) as client:
        for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {TOKEN}"},
                       {"Authorization": "Bearer"}, {"Authorization": f"Bearer {TOKEN}x"}):  # fmt: skip
            for path in paths:
                async with client.get(f"/api/v1/{path}", headers=header) as response:
                    assert (response.status, response.headers["WWW-Authenticate"]) == (401, "Bearer")
                    assert response.content_type == "application/problem+json"
        good = {"Authorization": f"Bearer {TOKEN}"}
        async with client.get("/api/v1/hosts", headers=good) as response:
            assert response.status == 200
        async with client.get("/livez") as response:
            assert response.status == 200
        token_file.write_text("another-token-of-today")
        async with client.get("/api/v1/hosts", headers=good) as response:
            assert response.status == 401
        token_file.unlink()
        async with client.get("/api/v1/hosts", headers={"Authorization": "Bearer "}) as response:
            assert response.status == 503


async def test_a_stream_that_was_opened_with_an_earlier_token_ends(
    token_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "BEAT_S", 0.05)
    with_token = guard("127.0.0.1:0", str(token_file))
    async with serving_api(follower_of(fleet_of()), with_token) as client:
        async with client.get("/api/v1/events", headers={"Authorization": f"Bearer {TOKEN}"}) as response:
            events = Events(response)
            await events.until_open()
            token_file.write_text("another-token-of-today")
            with anyio.fail_after(20):
                assert await events.next() == ("end", None)


@pytest.mark.parametrize(("host", "status"), [("evil.example", 403), ("evil.example:80", 403), ("localhost:1", 200)])
async def test_without_a_token_only_names_of_this_machine_are_answered(host: str, status: int) -> None:
    async with serving_api(follower_of(fleet_of())) as client:
        async with client.get("/api/v1/hosts", headers={"Host": host}) as response:
            assert response.status == status


async def test_with_mutual_tls_only_a_client_with_a_certificate_gets_in(tmp_path: Path) -> None:
    authority, other = trustme.CA(), trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    tls = Certificate(str(tmp_path / "server.pem"), None, str(tmp_path / "ca.pem"))
    listening = Listening(address="127.0.0.1:0", tls=tls)
    follower, open_to_certificates = follower_of(fleet_of()), guard("0.0.0.0:1", None, mutual_tls=True)

    def context(of: trustme.CA | None) -> ssl.SSLContext:
        made = ssl.create_default_context()
        authority.configure_trust(made)
        if of is not None:
            of.issue_cert("client@example.org").configure_cert(made)
        return made

    async with serving(lambda held: application(follower, held, open_to_certificates), listening) as address:
        async with ClientSession(f"https://{address}") as client:
            async with client.get("/api/v1/hosts", ssl=context(authority)) as response:
                assert response.status == 200
            for stranger in (None, other):
                with pytest.raises((ClientOSError, ClientConnectionError)):
                    async with client.get("/api/v1/hosts", ssl=context(stranger)):
                        pytest.fail("it answers")
