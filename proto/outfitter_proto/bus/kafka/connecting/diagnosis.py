"""Finds out why a connection to a broker has failed, for the error message only.

A broker hangs up silently on a client with the wrong protocol, without a log-in or without a client certificate. So we
probe it once with the other protocols.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from typing import Any, Self

import anyio
from aiokafka import errors as kafka_errors
from aiokafka.conn import AIOKafkaConnection
from aiokafka.protocol.admin import SaslHandShakeRequest

from outfitter_proto.bus.addresses import Node
from outfitter_proto.bus.kafka.connecting.answers import UnusableAnswerError
from outfitter_proto.bus.kafka.connecting.login import Login, called
from outfitter_proto.bus.port import BusAuthenticationError, BusConfigurationError, BusError, BusUnavailableError

PROBE_WITHIN = 2.0
"""Time limit of one probe in seconds."""

UNSUPPORTED_MECHANISM, ILLEGAL_STATE = 33, 34
_OTHER_NAME, _OTHER_ADDRESS, _EXPIRED = 62, 64, 10  # OpenSSL's X509_V_ERR_…
_NO_MECHANISM = "?"


class LoginRefusedError(Exception):
    """The broker refuses our log-in. The message is the broker's, or an explanation of it."""

    @classmethod
    def of_mechanism(cls, mechanism: str, code: int, offered: Sequence[str]) -> Self:
        if code == ILLEGAL_STATE:
            return cls(f"nobody logs in at this listener; set {called('security-protocol')} to SSL or PLAINTEXT")
        if code == UNSUPPORTED_MECHANISM:
            return cls(f"{mechanism} is not enabled there but {', '.join(offered)}; set {called('sasl-mechanism')}")
        return cls(f"it answers {mechanism} with error {code}, {kafka_errors.for_code(code).__name__}")

    @classmethod
    def of_credentials(cls, mechanism: str, steps: int, message: str | None) -> Self:
        """`steps`: the number of our messages. SCRAM checks the name in the first and the password in the second.
        `message`: the broker's."""
        if mechanism == "OAUTHBEARER":
            return cls(f"the token is refused ({message}); is it expired, or for another audience or issuer?")
        if mechanism == "PLAIN":
            return cls(f"an unknown user or a wrong password ({message})")
        what = "an unknown user" if steps == 1 else "a wrong password"
        return cls(f"{what} for {mechanism} ({message})")


class OldBrokerError(BusConfigurationError):
    """The broker does not know a request."""


UNKNOWN_THERE = NotImplementedError, kafka_errors.IncompatibleBrokerVersion
"""aiokafka's errors if it shares no version of a request with the broker. Nothing was sent."""

FAILURES = (OSError, EOFError, TimeoutError, *UNKNOWN_THERE, kafka_errors.KafkaError, LoginRefusedError)
"""The errors of connecting and sending requests."""


def unavailable(login: Login, node: Node, error: BaseException, *, timeout: float) -> BusError:
    """The error for a failure on an established connection."""
    at = where(login, node)
    doubt = "" if node in login.nodes else " And is that its address for this machine?"
    if isinstance(error, UNKNOWN_THERE):
        return OldBrokerError(f"{at} is older than Kafka 2.8, which is needed")
    if isinstance(error, UnusableAnswerError):
        return BusUnavailableError(f"{at} cannot be understood: {error}")
    if isinstance(error, TimeoutError):
        return BusUnavailableError(f"{at} does not answer within {timeout:g} s; is it running?{doubt}")
    if isinstance(error, ConnectionRefusedError):
        return BusUnavailableError(f"{at} refuses connections; is it running?{doubt}")
    if isinstance(error, socket.gaierror):
        if node in login.nodes:
            remedy = f"{error.strerror}; correct `bus`, or make the name known"
            return BusUnavailableError(f"{at} cannot be found: that name is not known here: {remedy}")
        what = f"the brokers advertise {node} (advertised.listeners), and that name is not known here"
        remedy = f"{error.strerror}; correct that setting of the brokers, or make the name known"
        return BusUnavailableError(f"{login.url}: {what}: {remedy}")
    return BusUnavailableError(f"{at} cannot be used: {str(error) or type(error).__name__}")


async def explained(login: Login, node: Node, error: BaseException, *, timeout: float) -> BusError:
    """The error for a failure while connecting. Takes a few seconds if the broker hung up."""
    at = where(login, node)
    if isinstance(error, LoginRefusedError):
        return BusAuthenticationError(f"{at} does not let {login.principal} in: {error}")
    reasons = list(_chain(error))
    for reason in reasons:
        if isinstance(reason, ssl.SSLCertVerificationError):
            return BusAuthenticationError(f"{at} {_certificate(reason)}")
        if isinstance(reason, ssl.SSLError) and "ALERT" in (reason.reason or ""):
            return BusAuthenticationError(f"{at} {_alert(login, reason)}")
    if any(isinstance(reason, _HUNG_UP) for reason in reasons) and not any(
        isinstance(reason, ConnectionRefusedError) for reason in reasons
    ):
        with anyio.move_on_after(2 * PROBE_WITHIN):
            expected = await _expected_protocol(login, node)
            if expected is not None:
                return BusAuthenticationError(f"{at} {expected}")
    return unavailable(login, node, error, timeout=timeout)


_HUNG_UP = (ConnectionError, EOFError, ssl.SSLError, kafka_errors.KafkaConnectionError)


def where(login: Login, node: Node) -> str:
    """The broker, and whose word its address is: the user's, or that of the brokers."""
    if node in login.nodes:
        return f"{login.url}: the broker at {node}"
    return f"{login.url}: the brokers advertise {node} (advertised.listeners), and the broker there"


def _chain(error: BaseException | None) -> Any:
    while error is not None:
        yield error
        error = error.__cause__


def _certificate(error: ssl.SSLCertVerificationError) -> str:
    problem = error.verify_message.rstrip(".")
    if error.verify_code in (_OTHER_NAME, _OTHER_ADDRESS):
        return f"shows a certificate for another name: {problem}; address it by a name that is in there"
    if error.verify_code == _EXPIRED:
        return "shows a certificate that has expired"
    authority = f"{called('ca-file')} must hold the authority that signed it"
    return f"shows a certificate that we do not trust: {problem}; {authority}"


def _alert(login: Login, error: ssl.SSLError) -> str:
    reason = (error.reason or "").lower().replace("_", " ")
    if "certificate" not in reason and " ca" not in reason:
        return f"refuses to speak TLS with us: {reason}"
    if login.certificate is None:
        return f"wants a client certificate ({reason}): set {called('cert-file')} and {called('key-file')}"
    return f"does not accept the client certificate {login.certificate} ({reason})"


async def _expected_protocol(login: Login, node: Node) -> str | None:
    """Probe a listener that hung up. Returns the protocol or log-in that it expects; None: unknown."""
    if not login.encrypted:
        if await _attempt(_speaks_tls(node)):
            return f"speaks TLS; set {called('security-protocol')} to {'SASL_SSL' if login.mechanism else 'SSL'}"
    else:
        alert = await _attempt(_listen_in_silence(login, node))
        if isinstance(alert, ssl.SSLError):
            return _alert(login, alert)
        if alert is None and await _attempt(_speaks_plainly(node)):
            plain = "SASL_PLAINTEXT" if login.mechanism else "PLAINTEXT"
            return f"speaks no TLS; set {called('security-protocol')} to {plain}, or use the port where it does"
    if login.mechanism is None:
        mechanisms = await _attempt(_offered_mechanisms(login, node))
        if mechanisms:
            return (
                f"wants a log-in ({', '.join(mechanisms)}); set {called('security-protocol')} to "
                f"{'SASL_SSL' if login.encrypted else 'SASL_PLAINTEXT'}"
            )
    return None


async def _attempt(probe: Awaitable[Any]) -> Any:
    """The result of the probe; None if it failed."""
    try:
        with anyio.fail_after(PROBE_WITHIN):
            return await probe
    except Exception:  # noqa: BLE001  (a probe of whatever listens there, for the error message only)
        return None


async def ended(connection: AIOKafkaConnection) -> None:
    """Close the connection and wait for that, with a short limit."""
    closed = connection.close()
    if connection._protocol is not None:  # else it was never open
        with anyio.CancelScope(shield=True):
            await asyncio.wait([closed], timeout=1)


async def _speaks_tls(node: Node) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # The probe sends nothing, so it trusts any certificate.
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        _, writer = await asyncio.open_connection(node.host, node.port, ssl=context)
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")
    await _abort(writer)
    return True


async def _abort(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()
    with suppress(OSError):
        await writer.wait_closed()


async def _listen_in_silence(login: Login, node: Node) -> ssl.SSLError | bool | None:
    """Wait for an alert after our part of the TLS handshake. With TLS 1.3 the broker checks our certificate only then,
    and its alert may get lost if we keep sending. True: no alert came, so TLS is not the cause. None: the broker hung
    up."""
    reader, writer = await asyncio.open_connection(node.host, node.port, ssl=login.options()["ssl_context"])
    try:
        with anyio.move_on_after(PROBE_WITHIN / 2):
            await reader.read(1)
            return None
        return True
    except ssl.SSLError as error:
        return error
    finally:
        await _abort(writer)


async def _speaks_plainly(node: Node) -> bool:
    connection = AIOKafkaConnection(node.host, node.port, request_timeout_ms=int(PROBE_WITHIN * 1000))
    try:
        await connection.connect()
    finally:
        await ended(connection)
    return True


async def _offered_mechanisms(login: Login, node: Node) -> list[str]:
    """The listener's log-in mechanisms; none if it has no log-in."""
    connection = AIOKafkaConnection(
        node.host, node.port, request_timeout_ms=int(PROBE_WITHIN * 1000), **login.options()
    )
    try:
        await connection.connect()
        answer = await connection.send(SaslHandShakeRequest(_NO_MECHANISM))
        return list(answer.enabled_mechanisms)
    finally:
        await ended(connection)
