"""Logging in: every way that there is works, everything that can be wrong is named, and no secret is ever told."""

from __future__ import annotations

import base64
import logging
import secrets
import traceback
from collections.abc import Callable, Mapping
from typing import NamedTuple

import anyio
import pytest

from outfitter_proto.bus import (
    BusAuthenticationError,
    BusConfigurationError,
    BusError,
    BusUnavailableError,
    Entry,
    TopicSpec,
    connect,
)
from outfitter_proto.bus.kafka import KafkaBus
from outfitter_proto.bus.kafka.connecting import connection, diagnosis
from support.bus.committed import committed
from support.kafka.secure_broker import SESSION_S, SecureBroker, right

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

Login = Mapping[str, str]
SECONDS = 40.0
"""Within which the cause must be told, on a busy machine."""


class Way(NamedTuple):
    """A listener, and how one logs in there as `user`."""

    listener: str
    login: Callable[[SecureBroker, str], Login]


WAYS = {
    "mutual TLS": Way("mutual", lambda broker, user: broker.mutual(user)),
    "SCRAM-SHA-512 over TLS": Way("sasl", lambda broker, user: broker.scram(user)),
    "SCRAM-SHA-256": Way("open", lambda broker, user: broker.scram(user, mechanism="SCRAM-SHA-256", listener="open")),
    "OAUTHBEARER over TLS": Way("sasl", lambda broker, user: broker.oauth(user)),
    "PLAIN": Way("open", lambda broker, _user: broker.administrator()),
}


@pytest.mark.parametrize("way", WAYS)
async def test_every_way_in_takes_a_writer_commits_publishes_and_reads(way: str, secure_broker: SecureBroker) -> None:
    listener, login = WAYS[way]
    user, topic = f"u-{secrets.token_hex(4)}", f"t-{secrets.token_hex(4)}"
    async with connect(secure_broker.at("open"), secure_broker.administrator()) as bus:
        await bus.create_topics([TopicSpec(topic, 1, {})])
    of_topic = [right(f"User:{user}", operation, "topic", topic) for operation in ("Read", "Write")]
    secure_broker.allow(*of_topic, right(f"User:{user}", "Write", "transactional-id", topic))
    async with connect(secure_broker.at(listener), login(secure_broker, user)) as bus:
        async with await bus.open_writer(topic, 0) as writer:
            await writer.commit([(topic, [Entry(b"k", b"committed")])])
        await bus.publish(topic, 0, Entry(b"k", b"published"))
        assert [message.value for message in await committed(bus, topic)] == [b"committed", b"published"]
        assert bus.refusals == 0


async def test_tls_without_a_log_in_is_anonymous_and_may_do_nothing(secure_broker: SecureBroker) -> None:
    async with connect(secure_broker.at("tls"), tls(secure_broker)) as bus:
        with pytest.raises(BusConfigurationError, match="not granted to User:ANONYMOUS"):
            await bus.topic("anything")


async def test_an_encrypted_key_is_opened_with_its_password_and_never_asked_for(secure_broker: SecureBroker) -> None:
    login = secure_broker.mutual("sealed", password="open sesame")
    with pytest.raises(BusConfigurationError, match="cert-file"):
        connect(secure_broker.at("mutual"), login)
    sealed = login | {"key-password-file": str(secure_broker.write("sealed.password", b"open sesame\n"))}
    async with connect(secure_broker.at("mutual"), sealed) as bus:
        assert bus.refusals == 0


# --- what can be wrong -----------------------------------------------------------------------------------


def tls(broker: SecureBroker) -> dict[str, str]:
    return {"security-protocol": "SSL", "ca-file": str(broker.ca)}


def wrong(broker: SecureBroker, login: Login) -> Login:
    """The same with another password."""
    return {**login, "sasl-password-file": str(broker.write("wrong", b"wrong horse"))}


class Case(NamedTuple):
    """A mistake, and what must be said of it."""

    listener: str
    login: Callable[[SecureBroker], Login]
    says: str
    kind: type[BusError] = BusAuthenticationError


CASES = {
    "no broker": Case("", lambda _: {}, "refuses connections; is it running", BusUnavailableError),
    "no such host": Case("?", lambda _: {}, "cannot be found: .*(not known|resolution)", BusUnavailableError),
    "an untrusted certificate": Case(
        "tls", lambda b: {**tls(b), "ca-file": str(b.other_ca)}, "a certificate that we do not trust.*ca-file"
    ),
    "a certificate for another host": Case("othername", tls, "a certificate for another name"),
    "an expired certificate": Case("expired", tls, "a certificate that has expired"),
    "no client certificate": Case("mutual", tls, "wants a client certificate.*cert-file"),
    "a client certificate of a stranger": Case(
        "mutual", lambda b: b.mutual("rogue", b.stranger), "does not accept the client certificate .*rogue.crt"
    ),
    "plaintext to TLS": Case("tls", lambda _: {}, "speaks TLS; set .*security-protocol.* to SSL"),
    "TLS to plaintext": Case("plain", tls, "speaks no TLS; set .*security-protocol.* to PLAINTEXT"),
    "plaintext to SASL": Case("open", lambda _: {}, r"wants a log-in \(.*SCRAM-SHA-512.*\); .* to SASL_PLAINTEXT"),
    "TLS to SASL": Case("sasl", tls, r"wants a log-in \(.*\); set .* to SASL_SSL"),
    "SASL to TLS with SASL": Case("sasl", lambda b: b.scram("u", listener="open"), "speaks TLS; .* to SASL_SSL"),
    "SASL to plaintext": Case("plain", lambda b: b.scram("u", listener="open"), "nobody logs in at this listener"),
    "SASL to TLS without": Case("tls", lambda b: b.scram("u"), "nobody logs in at this listener"),
    "a wrong password": Case("sasl", lambda b: wrong(b, b.scram("u")), "User:u .*wrong password for SCRAM-SHA-512"),
    "an unknown user": Case(
        "sasl", lambda b: {**wrong(b, b.scram("u")), "sasl-username": "eve"}, "User:eve .*unknown user for SCRAM"
    ),
    "a wrong password with PLAIN": Case("open", lambda b: b.plain("admin", "x"), "unknown user or a wrong password"),
    "a mechanism that is not enabled": Case(
        "sasl",
        lambda b: {**b.scram("u"), "sasl-mechanism": "SCRAM-SHA-256"},
        "SCRAM-SHA-256 is not enabled there but SCRAM-SHA-512, OAUTHBEARER",
    ),
    "a token for others": Case("sasl", lambda b: b.oauth("o1", aud="somebody"), "User:o1 .*token is refused"),
    "a token that has expired": Case("sasl", lambda b: b.oauth("o2", lifetime=-60), "User:o2 .*token is refused"),
    "a token that nobody signed": Case("sasl", lambda b: b.oauth("o3", signed=False), "User:o3 .*token is refused"),
    "no token at all": Case(
        "sasl",
        lambda b: {**b.oauth("o4"), "sasl-token-file": str(b.write("o4.token", b"rubbish"))},
        "the token's principal .*token is refused",
    ),
}


@pytest.mark.parametrize("mistake", CASES)
async def test_each_mistake_has_an_error_of_its_own_for_askers_and_for_writers(
    mistake: str, secure_broker: SecureBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnosis, "PROBE_WITHIN", 6.0)
    case = CASES[mistake]
    url = {"": "kafka://127.0.0.1:1", "?": "kafka://no-such-host.invalid:9092"}.get(case.listener)
    bus = connect(url or secure_broker.at(case.listener), case.login(secure_broker))
    address = bus.url.removeprefix("kafka://")
    try:
        with anyio.fail_after(SECONDS), pytest.raises(case.kind, match=f"{address} .*{case.says}") as told:
            await bus.start()
        with anyio.fail_after(SECONDS), pytest.raises(case.kind, match=case.says):
            await bus.open_writer("w", 0)
    finally:
        await bus.aclose()
    assert type(told.value) is case.kind
    assert bus.refusals == (2 if case.kind is BusAuthenticationError else 0)


def test_no_two_mistakes_are_told_alike_but_those_that_brokers_do_not_tell_apart() -> None:
    told = [case.says for case in CASES.values()]
    alike = {says for says in told if told.count(says) > 1}
    assert alike <= {"nobody logs in at this listener"}


# --- sessions --------------------------------------------------------------------------------------------


async def test_a_connection_is_made_anew_before_its_session_ends_so_that_nothing_fails(
    secure_broker: SecureBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`publish` does not repeat itself: a connection that ended under it would be an error."""
    assert connection.SESSION_SHARE < 1
    monkeypatch.setattr(connection, "SESSION_SHARE", 0.15)  # the broker may answer late here
    topic = f"t-{secrets.token_hex(4)}"
    async with connect(secure_broker.at("open"), secure_broker.administrator()) as bus:
        await bus.create_topics([TopicSpec(topic, 1, {})])
    secure_broker.allow(
        right("User:short", "Write", "topic", topic),
        right("User:short", "Read", "topic", topic),
        right("User:short", "Write", "transactional-id", topic),
    )
    async with connect(secure_broker.at("short"), secure_broker.scram("short", listener="short")) as bus:
        assert isinstance(bus, KafkaBus)
        async with (
            await bus.open_writer(topic, 0) as writer,
            await bus.open_reader(topic, 0, start=None, committed=True) as reader,
        ):
            begun, published, seen = anyio.current_time(), 0, 0
            while anyio.current_time() < begun + 2 * SESSION_S:
                await bus.publish(topic, 0, Entry(b"k", b"v"))
                await writer.commit([(topic, [Entry(b"k", b"v")])])
                assert not writer.must_reopen
                published += 2
                seen += len(await reader.fetch(timeout=0.1))
            with anyio.fail_after(SECONDS):
                while seen < published:
                    seen += len(await reader.fetch())


# --- secrets ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("good", [True, False], ids=["let in", "refused"])
@pytest.mark.parametrize("way", ["PLAIN", "SCRAM", "OAUTHBEARER"])
async def test_no_log_line_and_no_error_has_a_secret_in_it_at_any_level(
    way: str, good: bool, secure_broker: SecureBroker, caplog: pytest.LogCaptureFixture
) -> None:
    secret = secrets.token_urlsafe(16)
    if way == "SCRAM":
        if good:
            secure_broker.set_password("quiet", secret)
        login = {**secure_broker.scram("quiet"), "sasl-password-file": str(secure_broker.write("q", secret.encode()))}
    elif way == "PLAIN":
        secret = secure_broker.passwords["admin"] if good else secret
        login = secure_broker.plain("admin", secret)
    else:
        login = secure_broker.oauth("quiet", lifetime=600 if good else -60)
        secret = (secure_broker.folder / "quiet.token").read_text()
    said = [repr(login.get("sasl-username"))]
    with caplog.at_level(logging.DEBUG):
        bus = connect(secure_broker.at("open" if way == "PLAIN" else "sasl"), login)
        said.append(repr(vars(bus)))
        try:
            await bus.start()
            await (await bus.open_writer("w", 0)).aclose()
        except BusError as error:
            said += traceback.format_exception(error)
        finally:
            await bus.aclose()
    said += [caplog.text, *(repr(record.args) for record in caplog.records)]
    assert "Closing connection at 127.0.0.1" in caplog.text  # aiokafka's debug lines are there
    everything = "".join(said)
    forms = {secret, *(base64.b64encode(part + secret.encode()).decode()[4:-4] for part in (b"", b"\0", b"\0\0"))}
    for form in forms:
        assert form not in everything
