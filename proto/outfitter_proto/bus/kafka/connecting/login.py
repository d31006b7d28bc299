"""The brokers' addresses and the log-in: makes aiokafka's arguments from the bus URL, the settings and the environment.

The URL and the configuration have no secrets, because messages and status pages print them. Secrets come from one
variable or from files. We read the files for each connection, so that people can replace them at run time.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aiokafka.abc import AbstractTokenProvider

from outfitter_proto.bus.addresses import Node, brokers
from outfitter_proto.bus.port import BusConfigurationError

MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER")
PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
SETTINGS = (
    "security-protocol", "sasl-mechanism", "sasl-username", "sasl-password-file", "sasl-token-file",
    "ca-file", "cert-file", "key-file", "key-password-file",
)  # fmt: skip
"""Each is `kafka.<name>` in a configuration and `OUTFITTER_KAFKA_<NAME>` in the environment."""
UNKNOWN_OF_TOKEN = "the token's principal"  # noqa: S105 - no token
PASSWORD_VARIABLE = "OUTFITTER_KAFKA_SASL_PASSWORD"  # noqa: S105 - a name
"""The only secret that may be in the environment itself."""


class Login:
    """The brokers' addresses and the log-in there. Its printed form has no secrets."""

    def __init__(self, url: str, nodes: tuple[Node, ...], settings: Mapping[str, str], password: str | None) -> None:
        """`nodes`: the addresses in `url`. `settings`: by the names in `SETTINGS`. `password`: the environment's."""
        self.url = url
        self.nodes = nodes
        self.protocol = settings.get("security-protocol", "PLAINTEXT")
        self.mechanism = settings.get("sasl-mechanism", "SCRAM-SHA-512") if self.protocol.startswith("SASL") else None
        self._settings = settings
        self._password = password

    @property
    def encrypted(self) -> bool:
        return self.protocol.endswith("SSL")

    @property
    def certificate(self) -> str | None:
        """The file of the client certificate, if any."""
        return self._settings.get("cert-file")

    def __repr__(self) -> str:
        return f"Login({self.url!r}, {self.protocol}, {self.principal})"

    @property
    def principal(self) -> str:
        """Our principal in the broker's ACLs, as far as we know it."""
        if self.mechanism == "OAUTHBEARER":
            try:
                return _subject(self._secret("sasl-token-file"))
            except BusConfigurationError:  # the file is being replaced; connecting reports it
                return UNKNOWN_OF_TOKEN
        if self.mechanism is not None:
            return f"User:{self._settings['sasl-username']}"
        return "the client certificate's principal" if self.certificate else "User:ANONYMOUS"

    def options(self) -> dict[str, Any]:
        """aiokafka's arguments for a new connection; none for plaintext.

        Raises:
            BusConfigurationError: a file cannot be used; the message names the setting and the file.
        """
        options: dict[str, Any] = {} if self.protocol == "PLAINTEXT" else {"security_protocol": self.protocol}
        if self.encrypted:
            options["ssl_context"] = self._tls()
        if self.mechanism is not None:
            options["sasl_mechanism"] = self.mechanism
        if self.mechanism == "OAUTHBEARER":
            options["sasl_oauth_token_provider"] = _Token(self._secret("sasl-token-file"))
        elif self.mechanism is not None:
            options["sasl_plain_username"] = self._settings["sasl-username"]
            options["sasl_plain_password"] = self._password or self._secret("sasl-password-file")
        return options

    def _tls(self) -> ssl.SSLContext:
        ca, certificate, key = (self._settings.get(name) for name in ("ca-file", "cert-file", "key-file"))
        try:
            context = ssl.create_default_context(cafile=ca)
        except OSError as error:
            raise _wrong("ca-file", f"{ca}: {_reason(error)}") from error
        if certificate is None:
            return context
        # Without this password OpenSSL would ask for it on the terminal, and wait, if the key is encrypted.
        password = self._secret("key-password-file") if "key-password-file" in self._settings else ""
        try:
            context.load_cert_chain(certificate, key, lambda: password)
        except OSError as error:
            files = f"{certificate} and {key}" if key else certificate
            raise _wrong("cert-file", f"{files}: {_reason(error)}; a PEM certificate and its key are needed") from error
        return context

    def _secret(self, name: str) -> str:
        """A file's text without the line break."""
        try:
            text = Path(self._settings[name]).read_text().rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            raise _wrong(name, f"{self._settings[name]}: {_reason(error)}") from error
        if not text or not text.isprintable():
            raise _wrong(name, f"{self._settings[name]}: is {'no single line of text' if text else 'empty'}")
        return text


class _Token(AbstractTokenProvider):  # type: ignore[misc]  # aiokafka has no types
    """The token of one connection."""

    def __init__(self, token: str) -> None:
        self._token = token

    async def token(self) -> str:
        return self._token


def login_of(
    url: str, settings: Mapping[str, str] | None = None, environment: Mapping[str, str] | None = None
) -> Login:
    """Parse `kafka://host[:port][,host[:port]…]` and `settings` (by the names in `SETTINGS`). The environment's
    `OUTFITTER_KAFKA_…` variables fill in missing ones. Check that the files can be used.

    Raises:
        BusConfigurationError: the URL or a setting is invalid; the message names it and the valid values.
    """
    login = described(url, settings, environment)
    login.options()
    return login


def described(
    url: str, settings: Mapping[str, str] | None = None, environment: Mapping[str, str] | None = None
) -> Login:
    """As `login_of`, without reading any file."""
    environment = os.environ if environment is None else environment
    merged = {name: environment[variable(name)] for name in SETTINGS if environment.get(variable(name))}
    merged |= settings or {}
    login = Login(url, _nodes(url), merged, environment.get(PASSWORD_VARIABLE) or None)
    _check(login, merged, has_password=bool(environment.get(PASSWORD_VARIABLE)))
    return login


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return f"OUTFITTER_KAFKA_{name.replace('-', '_').upper()}"


def called(name: str) -> str:
    """A setting's name in messages."""
    return f"kafka.{name} ({variable(name)})"


def _wrong(name: str, why: str) -> BusConfigurationError:
    return BusConfigurationError(f"{called(name)}: {why}")


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _nodes(url: str) -> tuple[Node, ...]:
    try:
        return brokers(url)
    except ValueError as error:
        secretive = "@" in url or "?" in url
        shown = "the Kafka URL" if secretive else f"the Kafka URL {url[:200]!r}"
        raise BusConfigurationError(f"{shown} {error}") from None


def _check(login: Login, settings: Mapping[str, str], *, has_password: bool) -> None:
    """Refuse settings that cannot work or have no effect, such as a password for a plaintext listener."""
    if login.protocol not in PROTOCOLS:
        raise _wrong("security-protocol", f"{login.protocol!r} is none of {', '.join(PROTOCOLS)}")
    if login.mechanism is not None and login.mechanism not in MECHANISMS:
        raise _wrong("sasl-mechanism", f"{login.mechanism!r} is none of {', '.join(MECHANISMS)}")
    for name in settings:
        of_login = name.startswith("sasl")
        if name != "security-protocol" and not (login.mechanism if of_login else login.encrypted):
            raise _wrong(name, f"has no effect with {called('security-protocol')} = {login.protocol}")
    if has_password and login.mechanism is None:
        raise BusConfigurationError(
            f"{PASSWORD_VARIABLE} has no effect with {called('security-protocol')} = {login.protocol}"
        )
    for name in ("key-file", "key-password-file"):
        if name in settings and "cert-file" not in settings:
            raise _wrong(name, f"has no effect without {called('cert-file')}")
    token = login.mechanism == "OAUTHBEARER"
    if token:
        needed = ["sasl-token-file"]
    elif login.mechanism is not None:
        needed = ["sasl-username"] + ([] if has_password else ["sasl-password-file"])
    else:
        needed = []
    for name in needed:
        if name not in settings:
            raise _wrong(name, f"is needed to log in with {login.mechanism}")
    useless = ("sasl-username", "sasl-password-file") if token else ("sasl-token-file",)
    for name in useless:
        if name in settings:
            raise _wrong(name, f"has no effect with {called('sasl-mechanism')} = {login.mechanism}")


def _subject(token: str) -> str:
    """A token's principal by the brokers' default: the JSON Web Token's `sub`. Only the broker verifies the token."""
    try:
        claims = json.loads(base64.urlsafe_b64decode(token.split(".")[1] + "=="))
        return f"User:{claims['sub']}"
    except (IndexError, binascii.Error, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError):
        return UNKNOWN_OF_TOKEN
