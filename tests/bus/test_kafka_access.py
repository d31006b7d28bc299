"""Where the brokers are and how to log in: the URL and the environment."""

from __future__ import annotations

import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from outfitter_proto.bus import BusConfigurationError
from outfitter_proto.bus.kafka.access import Node, access


@pytest.mark.parametrize(
    ("url", "nodes"),
    [
        ("kafka://h", [Node("h", 9092)]),
        ("kafka://h:1", [Node("h", 1)]),
        ("kafka://a:1,b,c:3/", [Node("a", 1), Node("b", 9092), Node("c", 3)]),
        ("kafka://[::1]:9", [Node("::1", 9)]),
        ("kafka://[::1]", [Node("::1", 9092)]),
    ],
)
def test_a_url_names_brokers_and_9092_is_the_port_left_out(url: str, nodes: list[Node]) -> None:
    assert list(access(url, {}).nodes) == nodes
    assert access(url, {}).options == {}


@pytest.mark.parametrize("url", ["kafka://", "kafka:///", "http://h", "kafka://h:", "kafka://h:x", "kafka://h:70000"])
def test_a_url_without_a_usable_address_is_refused(url: str) -> None:
    with pytest.raises(BusConfigurationError):
        access(url, {})


def test_a_password_in_the_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(BusConfigurationError, match="SASL_PASSWORD_FILE") as refused:
        access("kafka://user:secret@h:9092", {})
    assert "secret" not in str(refused.value)


def test_log_in_and_tls_come_from_the_environment(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("pw\n")
    options = access(
        "kafka://h",
        {
            "OUTFITTER_KAFKA_SECURITY_PROTOCOL": "SASL_SSL",
            "OUTFITTER_KAFKA_SASL_USERNAME": "manager",
            "OUTFITTER_KAFKA_SASL_PASSWORD_FILE": str(tmp_path / "password"),
        },
    ).options
    assert isinstance(options["ssl_context"], ssl.SSLContext)
    assert options["ssl_context"].verify_mode is ssl.CERT_REQUIRED
    assert options["sasl_mechanism"] == "SCRAM-SHA-512"
    assert (options["sasl_plain_username"], options["sasl_plain_password"]) == ("manager", "pw")


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"SECURITY_PROTOCOL": "TLS"}, "SASL_SSL"),
        ({"SECURITY_PROTOCOL": "SASL_SSL", "SASL_MECHANISM": "OAUTHBEARER"}, "SCRAM-SHA-512"),
        ({"SECURITY_PROTOCOL": "SASL_SSL"}, "SASL_USERNAME"),
        ({"SECURITY_PROTOCOL": "SASL_PLAINTEXT", "SASL_USERNAME": "u", "SASL_PASSWORD_FILE": "/no/such"}, "/no/such"),
        ({"SECURITY_PROTOCOL": "SSL", "CA_FILE": "/no/such"}, "CA_FILE"),
        ({"SASL_USERNAME": "u"}, "SECURITY_PROTOCOL"),
        ({"SECURITY_PROTOCOL": "SSL", "SASL_PASSWORD": "p"}, "SASL_PASSWORD"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(environment: dict[str, str], named: str) -> None:
    with pytest.raises(BusConfigurationError, match=named):
        access("kafka://h", {f"OUTFITTER_KAFKA_{name}": value for name, value in environment.items()})


def test_no_writer_is_opened_where_python_leaves_out_assertions() -> None:
    program = (
        "import anyio\n"
        "from outfitter_proto.bus import connect\n"
        "async def main():\n"
        "    await connect('kafka://127.0.0.1:1').open_writer('w', 0)\n"
        "anyio.run(main)\n"
    )
    done = subprocess.run([sys.executable, "-O", "-c", program], capture_output=True, text=True, check=False)
    assert "BusConfigurationError" in done.stderr
    assert "without -O" in done.stderr
