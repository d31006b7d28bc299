"""How the console is served: its files, what a browser may do with them, and where they are. `console/` tries it."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from time import monotonic

import pytest
from aiohttp import web

from outfitter_service.api import application
from outfitter_service.api.access import Guard
from outfitter_service.api.console import HEADERS, STATIC, TYPES
from outfitter_service.http import server
from outfitter_service.http.connections import Connections
from outfitter_service.metrics import Metrics
from support.api import OPEN, fleet_of, follower_of, host_record, serving_api
from support.documents import ROOT

MOST_BYTES = 100_000
SERVED = {file.relative_to(STATIC).as_posix() for file in STATIC.rglob("*") if file.suffix in TYPES}
OWN = sorted(file for file in STATIC.iterdir() if file.suffix in TYPES)
OWN_ONLY = ("script-src", "style-src", "connect-src", "img-src")
NOTHING = ("default-src", "base-uri", "form-action", "frame-ancestors")
POLICY = {**dict.fromkeys(OWN_ONLY, "'self'"), **dict.fromkeys(NOTHING, "'none'")}
SECURED = Guard(token=lambda: b"a-token-of-this-test", local=False)


class Service:
    """As much of a manager as its HTTP shows."""

    ready = True
    condition = "serving"
    metrics = Metrics()


async def test_each_file_is_served_with_headers_that_let_it_do_nothing_else() -> None:
    async with serving_api(follower_of(fleet_of(host_record("one")))) as client:
        for name in SERVED:
            async with client.get(f"/{name.replace('index.html', '')}") as response:
                assert response.status == 200
                assert HEADERS.items() <= dict(response.headers).items()
                assert response.content_type == TYPES[f".{name.rpartition('.')[2]}"]
                policy = dict(part.split(" ", 1) for part in response.headers["Content-Security-Policy"].split("; "))
                assert policy == POLICY
                assert response.headers["X-Content-Type-Options"] == "nosniff"


async def test_a_browser_asks_for_a_file_again_only_once_it_has_changed() -> None:
    async with serving_api(follower_of(None)) as client:
        async with client.get("/app.js") as response:
            tag, body = response.headers["ETag"], await response.read()
        for known in (tag, f'"other", W/{tag}', "*"):
            async with client.get("/app.js", headers={"If-None-Match": known}) as response:
                assert (response.status, await response.read()) == (304, b"")
                assert response.headers["ETag"] == tag
                assert HEADERS.items() <= dict(response.headers).items()
        async with client.get("/app.js", headers={"If-None-Match": '"other"'}) as response:
            assert (response.status, await response.read()) == (200, body)


async def test_the_files_need_no_token_because_they_hold_no_data() -> None:
    async with serving_api(follower_of(fleet_of(host_record("one"))), SECURED) as client:
        async with client.get("/") as response:
            assert response.status == 200
            assert "one" not in re.findall(r"\w+", await response.text())
        async with client.get("/api/v1/hosts") as response:
            assert response.status == 401


async def test_only_what_is_part_of_the_console_is_served() -> None:
    async with serving_api(follower_of(None)) as client:
        for path in (
            "/vendor/LICENSE",
            "/vendor/vendored.json",
            "/index.html",
            "/../api/routes.py",
            "/%2e%2e/access.py",
        ):
            async with client.get(path) as response:
                assert response.status == 404
        async with client.post("/") as response:
            assert response.status == 405


def paths_of(app: web.Application) -> set[str]:
    return {resource.canonical for resource in app.router.resources()}


def test_a_manager_with_the_api_has_it_beside_its_own_pages_and_links_it() -> None:
    follower, connections = follower_of(None), Connections(monotonic)
    alone = application.application(follower, connections, OPEN)
    assert {f"/{name}".replace("index.html", "") for name in SERVED} <= paths_of(alone)

    def add(app: web.Application) -> None:
        application.add_to(app, follower, OPEN)

    with_api = server.application(Service(), connections, add)  # type: ignore[arg-type]
    assert {f"/console/{name}".replace("index.html", "") for name in SERVED} <= paths_of(with_api)
    without = server.application(Service(), connections)  # type: ignore[arg-type]
    assert not any("console" in path for path in paths_of(without))


async def test_the_page_finds_the_api_from_where_it_is() -> None:
    follower = follower_of(fleet_of(host_record("one")))

    def add(app: web.Application) -> None:
        application.add_to(app, follower, OPEN)

    async with server.listening(Service(), "127.0.0.1:0", add=add) as address:  # type: ignore[arg-type]
        async with serving_api(follower) as client:
            for page in ("/", f"http://{address}/console/"):
                async with client.get(page) as response:
                    base = re.findall(r'data-api="([^"]*)"', await response.text())[0]
                    at = response.url.join(type(response.url)(f"{base}status"))
                async with client.get(at) as response:
                    assert response.status == 200
            async with client.get(f"http://{address}/") as response:
                assert '<a href="console/">' in await response.text()


@pytest.mark.parametrize("file", OWN, ids=lambda file: file.name)
def test_no_file_has_inline_code_or_another_origin(file: Path) -> None:
    text = file.read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=|javascript:|eval\(|innerHTML|unsafe", text)
    assert not re.search(r"(?:https?:)?//[\w.-]+\.\w", text.replace("http://www.w3.org/2000/svg", ""))


def test_each_file_that_a_file_names_is_served() -> None:
    for file in OWN:
        text = file.read_text()
        for name in re.findall(r'(?:from |href=|src=)"([\w./-]+\.(?:js|css|svg))"', text):
            assert name.removeprefix("./") in SERVED
    page = (STATIC / "index.html").read_text()
    assert {name for name in SERVED if name.endswith(".js")} - set(re.findall(r'"([\w./-]+\.js)"', page)) == {
        "vendor/directive.js", "vendor/directive-helpers.js"
    }  # fmt: skip


def test_all_of_it_is_below_100_kilobytes() -> None:
    assert sum(file.stat().st_size for file in STATIC.rglob("*") if file.suffix in TYPES) < MOST_BYTES


@pytest.mark.parametrize("file", OWN, ids=lambda file: file.name)
def test_its_code_is_as_narrow_and_its_files_are_as_short_as_ours_elsewhere(file: Path) -> None:
    lines = file.read_text().splitlines()
    assert len(lines) <= 400
    assert [line for line in lines if len(line) > 120] == []


def test_the_library_is_the_package_that_is_named_byte_for_byte() -> None:
    vendor = STATIC / "vendor"
    named = json.loads((vendor / "vendored.json").read_text())
    assert (named["name"], named["license"]) == ("lit-html", "BSD-3-Clause")
    found = {
        file.relative_to(vendor).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in vendor.rglob("*")
        if file.is_file() and file.name != "vendored.json"
    }
    assert found == named["sha256"]
    assert "LICENSE" in found


def test_the_wheel_has_all_of_it(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)],
        check=True, capture_output=True,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for file in (file for file in STATIC.rglob("*") if file.is_file()):
        assert file.relative_to(ROOT / "service").as_posix() in names
