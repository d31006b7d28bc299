"""The certificate of a listener. A renewed one counts from the next connection on, without a restart."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path

import structlog

log = structlog.get_logger("outfitter.http")

_Version = tuple[tuple[int, int, int], ...]
"""Inode, time of modification and size of each file: what changes when somebody replaces one."""


class TlsError(RuntimeError):
    """TLS cannot be set up. The message says what is missing or not usable."""


class Certificate:
    """A certificate with its key, and the authorities of clients.

    `renewals`: how often a changed one was taken. `failures`: how often a changed one could not be taken.
    """

    def __init__(self, cert_file: str, key_file: str | None = None, client_ca_file: str | None = None) -> None:
        """`client_ca_file`: a client needs a certificate of one of its authorities; None: it needs none.

        Raises:
            TlsError: a file is missing or not usable.
        """
        self._cert, self._key, self._client_ca = cert_file, key_file, client_ca_file
        self.renewals = self.failures = 0
        self.is_refused = False
        """Whether the files were not usable at the last look, so that an earlier certificate counts."""
        self._refused: _Version | None = None
        try:
            self._taken = self._version()
            self._context = self._loaded()
        except (OSError, ssl.SSLError) as error:
            raise TlsError(f"TLS cannot be set up: {error.strerror or error}") from error

    def context(self) -> ssl.SSLContext:
        """The context for the next connection. While the files are not usable, it is the last one that was."""
        version: _Version | None = None
        try:
            version = self._version()  # before it is read, so that a change meanwhile is seen the next time
            if version != self._taken:
                self._context = self._loaded()
                self._taken, self._refused = version, None
                self.renewals += 1
                log.info("the certificate was renewed", cert_file=self._cert)
            self.is_refused = False
        except (OSError, ssl.SSLError) as error:
            self.is_refused = True
            if version is None or version != self._refused:
                self._refused = version
                self.failures += 1
                log.warning(
                    "the renewed certificate cannot be read: the earlier one stays",
                    cert_file=self._cert,
                    error=error.strerror or str(error),
                )
        return self._context

    def _files(self) -> Iterator[str]:
        yield from filter(None, (self._cert, self._key, self._client_ca))

    def _version(self) -> _Version:
        found = [Path(file).stat() for file in self._files()]
        return tuple((status.st_ino, status.st_mtime_ns, status.st_size) for status in found)

    def _loaded(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self._cert, self._key, password="")  # an encrypted key must not prompt for it
        if self._client_ca is not None:
            context.load_verify_locations(self._client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def certificate(cert_file: str | None, key_file: str | None, client_ca_file: str | None) -> Certificate | None:
    """The certificate of a listener; None without a file for it.

    Raises:
        TlsError: a file is missing or not usable.
    """
    if cert_file is not None:
        return Certificate(cert_file, key_file, client_ca_file)
    if key_file is not None or client_ca_file is not None:
        raise TlsError("TLS needs the server's certificate: --cert-file")
    return None
