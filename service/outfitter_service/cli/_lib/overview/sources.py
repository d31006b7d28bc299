"""Where a picture comes from: the topics of a bus, or the API of another machine. Both have the same pages."""

from __future__ import annotations

import os
import ssl
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from difflib import get_close_matches
from typing import Any, TypeVar

import aiohttp
import anyio
import msgspec
from msgspec import UNSET, UnsetType

from outfitter_proto.support.printable import printable
from outfitter_service.api import follower as followers
from outfitter_service.api import items, routes
from outfitter_service.api.access import AccessError
from outfitter_service.api.follower import Follower
from outfitter_service.api.paging import MOST, Page
from outfitter_service.api.typed import RefusedError
from outfitter_service.cli._lib.overview.picture import EVERYTHING, Only, Picture
from outfitter_service.config import BusConnection
from outfitter_service.query.device_lines import DeviceLine
from outfitter_service.query.errors import OutfitterCliError

TIMEOUT_S = 10.0
"""Seconds for one answer of an API."""
LARGEST = 64 * 1024 * 1024
"""Most bytes of one answer."""
MOST_TAKEN = 256 * 1024 * 1024
"""Most bytes of all answers for one picture."""
PICTURE_S = 60.0
"""Seconds for all pages of one picture."""
_LONGEST_ANSWER = 300

T = TypeVar("T")


class NoPictureError(OutfitterCliError):
    """There is no picture now, and the message says why. There may be one later."""


class NotReadyError(NoPictureError):
    """The source has not read the topics yet. There will be a picture soon."""


class PictureSource(ABC):
    """Where pictures come from. `host`: only what concerns this host; None: all. `only`: what they are narrowed to."""

    def __init__(self, host: str | None, only: Only) -> None:
        self.host = host
        self.only = only

    async def picture(self) -> Picture:
        """The picture of now.

        Raises:
            NoPictureError: there is none now. `host` may be one that is not there, or not yet.
            OutfitterCliError: there will be none either, unless somebody corrects what the message says.
        """
        with anyio.move_on_after(PICTURE_S):
            return self.only.of(await self._picture())
        raise NoPictureError(f"no picture: its pages do not end within {PICTURE_S:g} s")

    async def _picture(self) -> Picture:
        status = await self.status()
        only = {} if self.host is None else {"host": self.host}
        hosts = await self._all(items.HostItem, "hosts", {})
        if self.host is not None and self.host not in (known := [host.host for host in hosts]):
            raise NoPictureError(_no_host(self.host, known))
        return Picture(
            cluster=status.cluster,
            as_of=status.as_of,
            hosts=[host for host in hosts if self.host in {None, host.host}],
            devices=await self._all(DeviceLine, "devices", only),
            queue=await self._all(items.QueueItem, "queue", only),
            troubles=await self._all(items.Trouble, "troubles", only),
            left_out={
                (host.host, resource): summary.left_out
                for host in hosts
                for resource, summary in (host.resources or {}).items()
                if self.host in {None, host.host} and summary.left_out is not None
            },
        )

    async def _all(self, item: type[T], name: str, filters: Mapping[str, Any]) -> list[T]:
        found: list[T] = []
        cursor: str | UnsetType | None = UNSET
        while cursor is not None:
            page = await self.page(item, name, {**filters, "limit": MOST, "cursor": cursor})
            if page.next is not None and (not page.items or page.next == cursor):
                raise OutfitterCliError(f"the pages of {name} do not end: this is no API of Outfitter")
            found += page.items
            cursor = page.next
        return found

    @abstractmethod
    async def status(self) -> items.Status:
        """What the source itself is doing. Errors: see `picture`."""

    @abstractmethod
    async def page(self, item: type[T], name: str, query: Mapping[str, Any]) -> Page[T]:
        """A page of the API, by its name, with these parameters. Errors: see `picture`."""


class BusSource(PictureSource):
    """Follows the topics of a cluster itself."""

    _PAGES: Mapping[str, tuple[Callable[..., Any], type[Any]]] = {
        "hosts": (routes.hosts, items.HostQuery),
        "devices": (routes.devices, items.DeviceQuery),
        "queue": (routes.queue, items.QueueQuery),
        "troubles": (routes.troubles, items.TroubleQuery),
    }

    def __init__(self, follower: Follower, host: str | None, only: Only = EVERYTHING) -> None:
        super().__init__(host, only)
        self._follower = follower

    async def status(self) -> items.Status:
        status: items.Status = routes.status(self._follower, self._follower.fleet, None, {})  # type: ignore[arg-type]
        if not status.ready:
            raise NotReadyError(f"no picture yet: {status.condition}")
        return status

    async def page(self, item: type[T], name: str, query: Mapping[str, Any]) -> Page[T]:  # noqa: ARG002
        route, parameters = self._PAGES[name]
        if self._follower.fleet is None:
            raise NotReadyError(f"no picture yet: {self._follower.condition}")
        try:
            found: Page[T] = route(self._follower, self._follower.fleet, parameters(**query), {})
        except RefusedError as error:
            raise NotReadyError(f"no picture yet: {error}") from error
        return found


class ApiSource(PictureSource):
    """Asks an API. `token`: gives each request its bearer token; None: the API needs none."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, host: str | None, only: Only, token: Callable[[], bytes] | None
    ) -> None:
        super().__init__(host, only)
        self._session = session
        self._url = url.rstrip("/")
        self._token = token
        self._taken = 0
        """The bytes of this picture's answers."""

    async def status(self) -> items.Status:
        self._taken = 0  # each picture begins with it
        return await self._get(items.Status, "status", {})

    async def page(self, item: type[T], name: str, query: Mapping[str, Any]) -> Page[T]:
        told = {key: value for key, value in query.items() if value is not UNSET}
        return await self._get(Page[item], name, told)  # type: ignore[valid-type]

    async def _get(self, kind: type[T], name: str, query: Mapping[str, Any]) -> T:
        url = f"{self._url}{routes.BASE}/{name}"
        try:
            headers = {} if self._token is None else {"Authorization": f"Bearer {self._token().decode()}"}
            async with self._session.get(url, params=query, headers=headers, allow_redirects=False) as response:
                body = await _body(response, min(LARGEST, MOST_TAKEN - self._taken))
            self._taken += len(body)
        except AccessError as error:
            raise NoPictureError(str(error)) from error
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError, UnicodeError, ValueError) as error:
            raise OutfitterCliError(f"{url} is no address of an API, such as http://127.0.0.1:9478") from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise NoPictureError(f"{url} cannot be read: {_words(error)}") from error
        if response.status != 200:
            raise _refusal(url, response.status, body)
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise OutfitterCliError(
                f"{url} answers with something that is no page of Outfitter's API: {error}"
            ) from error


async def _body(response: aiohttp.ClientResponse, most: int) -> bytes:
    """The whole body.

    Raises:
        OutfitterCliError: it has more than `most` bytes.
    """
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > most:
            raise OutfitterCliError(f"{response.url} answers with more than {most:,} bytes: it is no API of Outfitter")
    return bytes(body)


def _words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {TIMEOUT_S:g} s"
    if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno:
        return os.strerror(error.os_error.errno)
    return str(error) or type(error).__name__


def _refusal(url: str, status: int, body: bytes) -> OutfitterCliError:
    try:
        words = msgspec.json.decode(body, type=dict[str, Any])["detail"]
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError):
        words = body.decode("utf-8", "replace").strip()
    words = printable(str(words))[:_LONGEST_ANSWER]
    if status == 503:
        return NotReadyError(f"no picture yet: {words}")
    if status >= 500:
        return NoPictureError(f"{url} answers {status}: {words}")
    advice = "; give its token by --token-file" if status == 401 else ""
    return OutfitterCliError(f"{url} answers {status}: {words}{advice}")


def _no_host(host: str, known: Sequence[str]) -> str:
    near = get_close_matches(host, known, n=1)
    hint = f"did you mean {near[0]}?" if near else "without --host there are all"
    return f"there is no host {host!r}: no manager of it ever wrote to the ledger; {hint}"


@asynccontextmanager
async def of_bus(where: BusConnection, host: str | None, only: Only = EVERYTHING) -> AsyncIterator[PictureSource]:
    """The source that follows the topics. Only a picture of `host` follows its partition alone.

    Raises:
        BusConfigurationError: the bus cannot be used as configured, or there is none.
    """
    async with followers.opened(where.bus, where.login, where.cluster, host=host) as follower:
        await follower.reach()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(follower.run)
            yield BusSource(follower, host, only)
            tasks.cancel_scope.cancel()


@asynccontextmanager
async def of_api(
    url: str,
    host: str | None,
    only: Only = EVERYTHING,
    *,
    token: Callable[[], bytes] | None,
    tls: ssl.SSLContext | None,
) -> AsyncIterator[PictureSource]:
    """The source that asks the API at `url`. `token`: reads the token, for each request again, because it may be
    renewed; it raises `AccessError` if there is none now."""
    connector = aiohttp.TCPConnector(ssl=tls if tls is not None else True)
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        yield ApiSource(session, url, host, only, token)
