"""How to be let in by Kafka's brokers: the same settings from a file, the environment and a worker's context."""

from __future__ import annotations

from pathlib import Path

import pytest

from outfitter_proto.bus.kafka.connecting import login
from outfitter_service.config import ConfigurationError, Severity, connection, inspect, load, options

FILE = """
bus = "kafka://broker:9093"
[kafka]
security-protocol = "SASL_SSL"
sasl-username = "manager"
sasl-password-file = "password"
ca-file = "/etc/ca.pem"
"""


def write(folder: Path, text: str, name: str = "outfitter.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_the_table_has_the_adapters_settings_and_their_variables() -> None:
    table = {o.name.removeprefix("kafka."): o.variable for o in options.SETTINGS if o.name.startswith("kafka.")}
    assert table == {name: login.variable(name) for name in login.SETTINGS}


def test_a_table_in_the_file_says_how_to_log_in_and_paths_begin_at_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, FILE)
    wanted = {
        "security-protocol": "SASL_SSL", "sasl-username": "manager",
        "sasl-password-file": str(tmp_path / "password"), "ca-file": "/etc/ca.pem",
    }  # fmt: skip
    assert load(path, {}, {}).login == wanted
    assert connection(path, {}, {}).login == wanted


def test_a_file_of_flinks_says_it_with_the_prefix(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "outfitter.bus: kafka://b\noutfitter.kafka.security-protocol: SSL\noutfitter.kafka.ca-file: ca.pem\n",
        "config.yaml",
    )
    assert load(path, {}, {}).login == {"security-protocol": "SSL", "ca-file": str(tmp_path / "ca.pem")}
    assert connection(path, {}, {}).login == load(path, {}, {}).login


def test_the_environment_wins_over_the_file(tmp_path: Path) -> None:
    environment = {"OUTFITTER_KAFKA_SASL_USERNAME": "other", "OUTFITTER_KAFKA_SASL_PASSWORD_FILE": "here"}
    login = connection(write(tmp_path, FILE), {}, environment).login
    assert (login["sasl-username"], login["sasl-password-file"]) == ("other", "here")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[kafka]\nsecurity-protocol = 'TLS'", "kafka.security-protocol"),
        ("[kafka]\nca-file = 'x'", "kafka.ca-file (OUTFITTER_KAFKA_CA_FILE): has no effect"),
        ("[kafka]\nsecurity-protocol = 'SASL_SSL'", "kafka.sasl-username (OUTFITTER_KAFKA_SASL_USERNAME): is needed"),
        ("[kafka]\nsecurity-protocoll = 'SSL'", "did you mean kafka.security-protocol"),
    ],
)
def test_what_cannot_work_is_refused_before_anybody_connects(text: str, named: str, tmp_path: Path) -> None:
    inspection = inspect(write(tmp_path, f'bus = "kafka://b"\n{text}\n'), {}, {})
    assert inspection.settings is None
    assert named in str(ConfigurationError(inspection.errors))


def test_with_another_bus_the_settings_for_kafka_lie_idle(tmp_path: Path) -> None:
    text = 'bus = "sqlite:////x/y.db"\n[kafka]\nca-file = "x"\n'
    assert not [p for p in inspect(write(tmp_path, text), {}, {}).problems if p.severity is Severity.ERROR]


@pytest.mark.parametrize(
    "text",
    [
        '[kafka]\nsasl-password = "hunter2"',
        '[kafka]\npassword = "hunter2"',
        'kafka.sasl-token = "hunter2"',
        'bus = "kafka://me:hunter2@broker:9092"',
        'bus = "kafka://broker:9092?sasl.password=hunter2"',
        'bus = "kafak://me:hunter2@broker:9092"',
    ],
)
def test_a_secret_in_a_configuration_is_refused_and_not_repeated(text: str, tmp_path: Path) -> None:
    path = write(tmp_path, f"{text}\n")
    inspection = inspect(path, {}, {})
    assert inspection.errors
    assert "hunter2" not in str(inspection)
    for error in inspection.errors:
        assert "hunter2" not in str(error)
    with pytest.raises(ConfigurationError) as refused:
        load(path, {}, {})
    assert "hunter2" not in str(refused.value)
    if "bus" in text:
        with pytest.raises(ConfigurationError) as refused:
            connection(path, {}, {})
        assert "hunter2" not in str(refused.value)
