"""Where the brokers are and how to log in: the URL and the environment."""

from __future__ import annotations

import ssl
from pathlib import Path

import anyio
import pytest

from outfitter_proto.bus import BusConfigurationError
from outfitter_proto.bus.kafka.connecting.login import login_of
from outfitter_verify import UnreadableError, verify


@pytest.mark.parametrize(
    "url",
    [
        "kafka://user:secret@h:9092",
        "kafka://user:sec@ret/secret@h",
        "kafka://h:9092?password=secret",
        "kafka://secret@",
    ],
)
def test_a_password_in_the_url_is_refused_and_not_repeated(url: str) -> None:
    for read in (lambda: login_of(url, {}, {}), lambda: verify(url)):
        with pytest.raises((BusConfigurationError, UnreadableError)) as refused:
            read()
        assert "secret" not in str(refused.value)


def test_without_a_log_in_there_is_nothing_to_say_of_one() -> None:
    assert login_of("kafka://h", {}, {}).options() == {}


def variables(**settings: str) -> dict[str, str]:
    return {f"OUTFITTER_KAFKA_{name}": value for name, value in settings.items()}


def test_log_in_and_tls_come_from_the_environment(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("pw\n")
    found = login_of(
        "kafka://h",
        None,
        variables(SECURITY_PROTOCOL="SASL_SSL", SASL_USERNAME="manager", SASL_PASSWORD_FILE=str(tmp_path / "password")),
    )
    options = found.options()
    assert isinstance(options["ssl_context"], ssl.SSLContext)
    assert options["ssl_context"].verify_mode is ssl.CERT_REQUIRED
    assert options["ssl_context"].check_hostname
    assert options["sasl_mechanism"] == "SCRAM-SHA-512"
    assert (options["sasl_plain_username"], options["sasl_plain_password"]) == ("manager", "pw")
    assert found.principal == "User:manager"
    assert "pw" not in repr(found)


def test_what_is_configured_wins_over_the_environment(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("pw")
    password = {"sasl-username": "a", "sasl-password-file": str(tmp_path / "password")}
    found = login_of(
        "kafka://h",
        {"security-protocol": "SASL_PLAINTEXT", **password},
        variables(SECURITY_PROTOCOL="SASL_SSL", SASL_USERNAME="b", SASL_MECHANISM="PLAIN"),
    )
    assert (found.protocol, found.principal, found.mechanism) == ("SASL_PLAINTEXT", "User:a", "PLAIN")


def test_a_password_and_a_token_are_read_anew_for_each_connection(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("old")
    by_password = login_of(
        "kafka://h",
        {},
        variables(SECURITY_PROTOCOL="SASL_PLAINTEXT", SASL_USERNAME="u", SASL_PASSWORD_FILE=str(secret)),
    )
    by_token = login_of(
        "kafka://h",
        {},
        variables(SECURITY_PROTOCOL="SASL_PLAINTEXT", SASL_MECHANISM="OAUTHBEARER", SASL_TOKEN_FILE=str(secret)),
    )
    secret.write_text("new\n")
    assert by_password.options()["sasl_plain_password"] == "new"
    assert anyio.run(by_token.options()["sasl_oauth_token_provider"].token) == "new"


@pytest.mark.parametrize(
    ("token", "principal"),
    [
        ("e30.eyJzdWIiOiAibWFuYWdlciJ9.c2ln", "User:manager"),  # {"sub": "manager"}
        ("e30.W10.c2ln", "the token's principal"),
        ("opaque", "the token's principal"),
        ("a.%%%.c", "the token's principal"),
    ],
)
def test_whom_a_token_speaks_for_is_read_from_it_where_it_says_so(token: str, principal: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(token)
    settings = {
        "security-protocol": "SASL_SSL", "sasl-mechanism": "OAUTHBEARER", "sasl-token-file": str(tmp_path / "token"),
    }  # fmt: skip
    assert login_of("kafka://h", settings, {}).principal == principal


TOKEN = {"SECURITY_PROTOCOL": "SASL_SSL", "SASL_MECHANISM": "OAUTHBEARER", "SASL_TOKEN_FILE": "x"}


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"SECURITY_PROTOCOL": "TLS"}, "SASL_SSL"),
        ({"SECURITY_PROTOCOL": "SASL_SSL", "SASL_MECHANISM": "GSSAPI"}, "SCRAM-SHA-512"),
        ({"SECURITY_PROTOCOL": "SASL_SSL"}, "SASL_USERNAME"),
        ({"SECURITY_PROTOCOL": "SASL_SSL", "SASL_USERNAME": "u"}, "SASL_PASSWORD_FILE"),
        ({"SECURITY_PROTOCOL": "SASL_SSL", "SASL_MECHANISM": "OAUTHBEARER"}, "SASL_TOKEN_FILE"),
        (TOKEN | {"SASL_USERNAME": "u"}, "SASL_USERNAME"),
        ({"SECURITY_PROTOCOL": "SASL_PLAINTEXT", "SASL_USERNAME": "u", "SASL_PASSWORD_FILE": "/no/such"}, "/no/such"),
        ({"SECURITY_PROTOCOL": "SASL_PLAINTEXT", "SASL_USERNAME": "u", "SASL_PASSWORD_FILE": "/dev/null"}, "empty"),
        ({"SECURITY_PROTOCOL": "SSL", "CA_FILE": "/no/such"}, "CA_FILE"),
        ({"SECURITY_PROTOCOL": "SSL", "CERT_FILE": "/no/such"}, "CERT_FILE"),
        ({"SECURITY_PROTOCOL": "SSL", "KEY_FILE": "/no/such"}, "KEY_FILE"),
        ({"SASL_USERNAME": "u"}, "SECURITY_PROTOCOL"),
        ({"CA_FILE": "x"}, "SECURITY_PROTOCOL"),
        ({"SECURITY_PROTOCOL": "SSL", "SASL_PASSWORD": "p"}, "SASL_PASSWORD"),
    ],
)  # fmt: skip
def test_a_setting_that_cannot_work_is_refused_by_name(environment: dict[str, str], named: str) -> None:
    with pytest.raises(BusConfigurationError, match=named):
        login_of("kafka://h", None, variables(**environment))
