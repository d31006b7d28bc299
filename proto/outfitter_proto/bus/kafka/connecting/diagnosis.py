"""Why a broker cannot be used, in words that name the cause. Asked only after a connection has failed.

A broker that does not like how it is spoken to hangs up without a word: TLS to a plaintext listener, plaintext to a
TLS one, no log-in where one is wanted, no client certificate where one is required. So whoever was hung up on asks
again, once, in the ways in which such a listener would answer. What is learned there changes nothing but the message.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from typing import Any, Self

import anyio
from aiokafka import errors as kafka_errors
from aiokafka.conn import AIOKafkaConnection
from aiokafka.protocol.admin import SaslHandShakeRequest

from outfitter_proto.bus.addresses import Node
from outfitter_proto.bus.kafka.connecting.login import Login, called
from outfitter_proto.bus.port import BusAuthenticationError, BusConfigurationError, BusError, BusUnavailableError

PROBE_WITHIN = 2.0
"""Seconds for one question asked for the message's sake."""

UNSUPPORTED_MECHANISM, ILLEGAL_STATE = 33, 34
_OTHER_NAME, _OTHER_ADDRESS, _EXPIRED = 62, 64, 10  # OpenSSL's X509_V_ERR_…
_NO_MECHANISM = "?"


class LoginRefusedError(Exception):
    """The broker does not let us in. The message is what it says of it, or what that means."""

    @classmethod
    def of_mechanism(cls, mechanism: str, code: int, offered: Sequence[str]) -> Self:
        if code == ILLEGAL_STATE:
            return cls(f"nobody logs in at this listener; set {called('security-protocol')} to SSL or PLAINTEXT")
        if code == UNSUPPORTED_MECHANISM:
            return cls(f"{mechanism} is not enabled there but {', '.join(offered)}; set {called('sasl-mechanism')}")
        return cls(f"it answers {mechanism} with error {code}, {kafka_errors.for_code(code).__name__}")

    @classmethod
    def of_credentials(cls, mechanism: str, steps: int, said: str | None) -> Self:
        """`steps`: how many times we had spoken. SCRAM knows the name first and tries the password then."""
        if mechanism == "OAUTHBEARER":
            return cls(f"the token is refused ({said}); is it expired, or for another audience or issuer?")
        if mechanism == "PLAIN":
            return cls(f"an unknown user or a wrong password ({said})")
        what = "an unknown user" if steps == 1 else "a wrong password"
        return cls(f"{what} for {mechanism} ({said})")


UNKNOWN_THERE = NotImplementedError, kafka_errors.IncompatibleBrokerVersion
"""What aiokafka raises where a broker knows no version of a request that it knows: nothing was sent."""

FAILURES = (
    OSError,
    EOFError,
    TimeoutError,
    *UNKNOWN_THERE,
    kafka_errors.KafkaError,
    LoginRefusedError,
)
"""What may come of connecting and asking."""


def unavailable(access: Login, node: Node, error: BaseException, *, timeout: float) -> BusError:
    """What a failure on a connection that was good means."""
    where = _where(access, node)
    if isinstance(error, UNKNOWN_THERE):
        return BusConfigurationError(f"{where} is older than Kafka 2.8, which is needed")
    if isinstance(error, TimeoutError):
        return BusUnavailableError(f"{where} does not answer within {timeout:g} s")
    if isinstance(error, ConnectionRefusedError):
        return BusUnavailableError(f"{where} refuses connections; is it running?")
    return BusUnavailableError(f"{where} cannot be used: {str(error) or type(error).__name__}")


async def verdict(access: Login, node: Node, error: BaseException, *, timeout: float) -> BusError:
    """What a failure while connecting means. Takes some seconds at most where the broker hung up on us."""
    where = _where(access, node)
    if isinstance(error, LoginRefusedError):
        return BusAuthenticationError(f"{where} does not let {access.principal} in: {error}")
    reasons = list(_chain(error))
    for reason in reasons:
        if isinstance(reason, ssl.SSLCertVerificationError):
            return BusAuthenticationError(f"{where} {_certificate(reason)}")
        if isinstance(reason, ssl.SSLError) and "ALERT" in (reason.reason or ""):
            return BusAuthenticationError(f"{where} {_alert(access, reason)}")
    if any(isinstance(reason, _HUNG_UP) for reason in reasons) and not any(
        isinstance(reason, ConnectionRefusedError) for reason in reasons
    ):
        with anyio.move_on_after(2 * PROBE_WITHIN):
            answer = await _ask_otherwise(access, node)
            if answer is not None:
                return BusAuthenticationError(f"{where} {answer}")
    return unavailable(access, node, error, timeout=timeout)


_HUNG_UP = (ConnectionError, EOFError, ssl.SSLError, kafka_errors.KafkaConnectionError)


def _where(access: Login, node: Node) -> str:
    return f"{access.url}: the broker at {node}"


def _chain(error: BaseException | None) -> Any:
    while error is not None:
        yield error
        error = error.__cause__


def _certificate(error: ssl.SSLCertVerificationError) -> str:
    said = error.verify_message.rstrip(".")
    if error.verify_code in (_OTHER_NAME, _OTHER_ADDRESS):
        return f"shows a certificate for another name: {said}; address it by a name that is in there"
    if error.verify_code == _EXPIRED:
        return "shows a certificate that has expired"
    return (
        f"shows a certificate that we do not trust: {said}; {called('ca-file')} must hold the authority that signed it"
    )


def _alert(access: Login, error: ssl.SSLError) -> str:
    reason = (error.reason or "").lower().replace("_", " ")
    if "certificate" not in reason and " ca" not in reason:
        return f"refuses to speak TLS with us: {reason}"
    if access.certificate is None:
        return f"wants a client certificate ({reason}): set {called('cert-file')} and {called('key-file')}"
    return f"does not accept the client certificate {access.certificate} ({reason})"


async def _ask_otherwise(access: Login, node: Node) -> str | None:
    """What a listener tells that hung up on us, if anything."""
    if not access.encrypted:
        if await _attempt(_speaks_tls(node)):
            return f"speaks TLS; set {called('security-protocol')} to {'SASL_SSL' if access.mechanism else 'SSL'}"
    else:
        alert = await _attempt(_listen_in_silence(access, node))
        if isinstance(alert, ssl.SSLError):
            return _alert(access, alert)
        if alert is None and await _attempt(_speaks_plainly(node)):
            plain = "SASL_PLAINTEXT" if access.mechanism else "PLAINTEXT"
            return f"speaks no TLS; set {called('security-protocol')} to {plain}, or use the port where it does"
    if access.mechanism is None:
        mechanisms = await _attempt(_offered_mechanisms(access, node))
        if mechanisms:
            return (
                f"wants a log-in ({', '.join(mechanisms)}); set {called('security-protocol')} to "
                f"{'SASL_SSL' if access.encrypted else 'SASL_PLAINTEXT'}"
            )
    return None


async def _attempt(question: Awaitable[Any]) -> Any:
    """The answer, or None."""
    try:
        with anyio.fail_after(PROBE_WITHIN):
            return await question
    except FAILURES:
        return None


async def ended(connection: AIOKafkaConnection) -> None:
    """Close it, and wait until it is closed; not for long."""
    closed = connection.close()
    if connection._protocol is not None:  # else it never was open
        with anyio.CancelScope(shield=True):
            await asyncio.wait([closed], timeout=1)


async def _speaks_tls(node: Node) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is sent there: only whether it answers
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


async def _listen_in_silence(access: Login, node: Node) -> ssl.SSLError | bool | None:
    """What is said to us after our part of the TLS handshake. With TLS 1.3 a certificate is judged only then, and to
    somebody who is still talking the verdict may get lost. True: nothing, so TLS is not the trouble."""
    reader, writer = await asyncio.open_connection(node.host, node.port, ssl=access.options()["ssl_context"])
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


async def _offered_mechanisms(access: Login, node: Node) -> list[str]:
    """How one may log in; a listener without log-in answers with another error and none."""
    connection = AIOKafkaConnection(
        node.host, node.port, request_timeout_ms=int(PROBE_WITHIN * 1000), **access.options()
    )
    try:
        await connection.connect()
        answer = await connection.send(SaslHandShakeRequest(_NO_MECHANISM))
        return list(answer.enabled_mechanisms)
    finally:
        await ended(connection)
