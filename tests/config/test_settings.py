"""The manager's own settings: defaults, precedence, where each value came from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from outfitter_proto import names
from outfitter_proto.names import default_host
from outfitter_service.config import (
    ConfigurationError,
    Inspection,
    Settings,
    Severity,
    connection,
    inspect,
    load,
    options,
)

Look = Callable[..., Inspection]
DEFAULTS = {
    "scope": "host",
    "replica": None,
    "session_timeout": 10.0,
    "on_stop": "leave",
    "bus": "sqlite:////var/lib/outfitter/bus.db",
    "cluster": "outfitter",
    "http": "127.0.0.1:9477",
    "api": False,
    "api_token_file": None,
    "lease": 30.0,
    "lease_grace": 2.0,
    "wait": None,
    "ended_retention": 3_600.0,
    "checkpoint_interval": 3_600.0,
    "beat_interval": 20.0,
    "shutdown_timeout": 10.0,
    "log_format": "auto",
    "log_level": "info",
    "strict": False,
    "history": True,
    **{
        f"kafka_{name}": None
        for name in (
            "security_protocol", "sasl_mechanism", "sasl_username", "sasl_password_file", "sasl_token_file",
            "ca_file", "cert_file", "key_file", "key_password_file",
        )
    },
}  # fmt: skip


def test_the_defaults_are_these() -> None:
    settings = load(None, {}, {}, required=False)
    assert {name: getattr(settings, name) for name in DEFAULTS} == DEFAULTS
    assert settings.host == default_host()
    assert set(settings.origins.values()) == {"default"}
    assert DEFAULTS.keys() | {"host"} == {option.field for option in options.SETTINGS}


@pytest.mark.parametrize(("http", "token", "is_refused"), [
    ("127.0.0.1:1", "", False), ("localhost:1", "", False), ("0.0.0.0:1", "", True), ("gpu-3:1", "", True),
    ("0.0.0.0:1", 'api-token-file = "t"', False),
])  # fmt: skip
def test_an_api_that_others_reach_needs_a_token(http: str, token: str, is_refused: bool, tmp_path: Path) -> None:
    (tmp_path / "outfitter.toml").write_text(f'api = true\nhttp = "{http}"\n{token}\n')
    found = inspect(tmp_path / "outfitter.toml", {}, {})
    assert ["api"] * is_refused == [problem.key for problem in found.errors]


def test_settings_are_frozen_and_strict() -> None:
    settings = load(None, {}, {}, required=False)
    with pytest.raises(AttributeError):
        settings.bus = "kafka://x:1"  # type: ignore[misc]  # that it cannot be set is what is tested
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"leese": 3}, Settings)


def test_every_option_says_what_it_is_for() -> None:
    for option in (*options.SETTINGS, *options.RESOURCE_OPTIONS):
        assert len(option.about) > 40
        assert option.type


@pytest.mark.parametrize(("text", "seconds"), [("", 30.0), ("0s", 0.0), ("5m", 300.0)])
def test_a_device_that_was_ill_must_be_well_for_the_stated_time(look: Look, text: str, seconds: float) -> None:
    line = f"external-resource.gpu.min-healthy-time: {text}\n" if text else ""
    found = look(f"external-resources: gpu\nexternal-resource.gpu.amount: 1\n{line}").settings
    assert [resource.min_healthy for resource in found.resources] == [seconds]


@pytest.mark.parametrize("text", ["none", "-1s", "367d", "soon"])
def test_a_wrong_time_for_which_a_device_must_be_well_is_an_error_of_its_resource(look: Look, text: str) -> None:
    lines = f"external-resource.gpu.amount: 1\nexternal-resource.gpu.min-healthy-time: {text}\n"
    (problem,) = [each for each in look(f"external-resources: gpu\n{lines}").problems if each.severity == "error"]
    assert problem.key == "external-resource.gpu.min-healthy-time"


def test_the_command_line_wins_over_the_environment_the_file_and_the_default(look: Look) -> None:
    environment = {"OUTFITTER_LEASE_GRACE": "3s"}
    text = "outfitter.lease-grace: 4s\noutfitter.lease: 5s\n"
    found = look(text, overrides={"lease-grace": "1s"}, environment=environment).settings
    assert (found.lease_grace, found.origins["lease-grace"]) == (1.0, "command line")
    found = look(text, environment=environment).settings
    assert (found.lease_grace, found.origins["lease-grace"]) == (3.0, "environment OUTFITTER_LEASE_GRACE")
    found = look(text).settings
    assert found.lease_grace == 4.0
    assert found.origins["lease-grace"].endswith("config.yaml line 1")
    assert found.origins["wait"] == "default"


def test_precedence_holds_for_resources_too(look: Look) -> None:
    text = "external-resources: gpu\nexternal-resource.gpu.amount: 1\n"
    environment = {"OUTFITTER_EXTERNAL_RESOURCE_GPU_AMOUNT": "2"}
    overrides = {"external-resource.gpu.amount": "3"}
    key = "external-resource.gpu.amount"
    for amount, origin, more in (
        (1, "config.yaml line 2", {}),
        (2, "environment OUTFITTER_EXTERNAL_RESOURCE_GPU_AMOUNT", {"environment": environment}),
        (3, "command line", {"environment": environment, "overrides": overrides}),
    ):
        settings = look(text, **more).settings
        assert settings.resources[0].amount == amount
        assert settings.origins[key].endswith(origin)


def test_the_list_itself_can_be_overridden(look: Look) -> None:
    text = "external-resources: gpu\nexternal-resource.gpu.amount: 1\n"
    settings = look(text, environment={"OUTFITTER_EXTERNAL_RESOURCES": "none"}).settings
    assert settings.resources == ()
    settings = look(text, overrides={"external-resources": "none"}).settings
    assert settings.resources == ()


def test_an_empty_environment_variable_counts_as_absent(look: Look) -> None:
    assert look("", environment={"OUTFITTER_BUS": ""}).settings.bus == DEFAULTS["bus"]


WRONG = {
    "bus": ["", "redis://x", "kafka:/x", "sqlite://x", "http://x"],
    "cluster": ["", "a/b", "a b", ".", "..", "__consumer", "é", "c" * 236],
    "replica": ["", "a/b", "a b", "..", "r" * 250],
    "session-timeout": ["", "none", "0", "999ms", "300d", "24d1ms"],
    "ended-retention": ["none", "-1s", "367d"],
    "checkpoint-interval": ["none", "0", "99ms", "367d"],
    "beat-interval": ["none", "4s", "61s"],
    "shutdown-timeout": ["none", "0", "99ms", "367d"],
    "host": ["", "a/b", "@x"],
    "http": [
        "", "9477", ":9477", "host:", "host:99999", "host:x", "a b:80", "a\tb:80", "host: 80", "host :80", "*:80",
        "http://host:80", "host:80/", "a,b:80", "a..b:80", "me@host:80", "::1:80", "[::1]", "[::1:80", "[h]:80",
        "[::1 ]:80", "300.0.0.1:80", "host:-1", "host:+80", "a" * 64 + ":80", "ü" * 63 + ":80",
    ],
    "api": ["", "maybe"],
    "lease": ["", "0", "-1s", "soon", "400d", "null"],
    "lease-grace": ["none", "-1s", "367d"],
    "wait": ["", "-1", "367d"],
    "log-format": ["", "xml", "JSON"],
    "log-level": ["trace"],
    "strict": ["", "maybe"],
}  # fmt: skip


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in WRONG.items() for text in texts])
def test_a_wrong_setting_stops_the_manager_with_its_key_and_what_is_allowed(look: Look, name: str, text: str) -> None:
    inspection = look(f"outfitter.{name}: '{text}'")
    assert inspection.settings is None
    (problem,) = inspection.problems
    assert (problem.key, problem.found) == (f"outfitter.{name}", text)
    assert len(problem.problem) > 10


ADDRESSES = [
    "127.0.0.1:0",
    "host:80",
    "host_1.example.com.:65535",
    "bücher.example:80",
    "[::1]:9477",
    "[fe80::1%eth0]:80",
]


@pytest.mark.parametrize("text", ADDRESSES)
def test_an_address_to_listen_on_is_host_and_port(look: Look, text: str) -> None:
    assert look(f"outfitter.http: '{text}'").settings.http == text


@pytest.mark.parametrize("text", ["a b:80", "::1:80", "host:99999"])
def test_an_address_to_listen_on_is_checked_alike_wherever_it_is_given(look: Look, text: str) -> None:
    for given in ({"overrides": {"http": text}}, {"environment": {"OUTFITTER_HTTP": text}}):
        inspection = look("", **given)
        assert inspection.settings is None
        assert "write HOST:PORT, such as 127.0.0.1:9477 or [::1]:9477" in inspection.problems[0].problem


def test_a_user_name_with_half_a_character_is_refused(look: Look) -> None:
    (problem,) = look("", environment={"OUTFITTER_KAFKA_SASL_USERNAME": "x\udcff"}).problems
    assert (problem.key, problem.problem) == ("OUTFITTER_KAFKA_SASL_USERNAME", "is not UTF-8")


def test_a_cluster_whose_topics_would_be_too_long_is_refused_with_its_length_and_the_limit(look: Look) -> None:
    longest = "c" * 235
    assert len(names.topics(look(f"outfitter.cluster: {longest}").settings.cluster).registrations) == 249
    (problem,) = look(f"outfitter.cluster: {longest}c").problems
    assert problem.key == "outfitter.cluster"
    assert "236 characters" in problem.problem
    assert "1 to 235" in problem.problem
    assert "at most 249" in problem.problem
    for given in ({"overrides": {"cluster": f"{longest}c"}}, {"environment": {"OUTFITTER_CLUSTER": f"{longest}c"}}):
        assert look("", **given).settings is None
        with pytest.raises(ConfigurationError, match="236 characters"):
            connection(None, **({"environment": {}} | given))
    assert look(f"outfitter.replica: {'r' * 249}").settings.replica == "r" * 249
    (problem,) = look(f"outfitter.replica: {'r' * 250}").problems
    assert "250 characters" in problem.problem


@pytest.mark.parametrize(
    ("text", "warned"), [("1s", True), ("5999ms", True), ("6s", False), ("30m", False), ("31m", True), ("24d", True)]
)
def test_a_session_that_brokers_refuse_by_default_is_warned_of(look: Look, text: str, warned: bool) -> None:
    session = f"outfitter.session-timeout: {text}\n"
    inspection = look(session + "outfitter.scope: cluster\noutfitter.bus: kafka://one\n")
    assert inspection.settings is not None
    assert [(problem.key, problem.severity) for problem in inspection.problems] == (
        [("outfitter.session-timeout", Severity.WARNING)] if warned else []
    )
    for others in ("outfitter.scope: host\noutfitter.bus: kafka://one\n", "outfitter.scope: cluster\n"):
        assert look(session + others).problems == ()


def test_the_default_session_is_one_that_brokers_accept_by_default() -> None:
    least, most = options.USUAL_SESSION
    assert least <= load(None, {}, {}, required=False).session_timeout <= most


def test_top_level_keys_and_an_outfitter_table_mean_the_same_in_toml(look: Look) -> None:
    for text in ('lease = "7s"', '[outfitter]\nlease = "7s"', "lease = 7", '"outfitter.lease" = "7"'):
        assert look(text, "x.toml").settings.lease == 7.0
    assert "given twice" in look("lease = 7\n[outfitter]\nlease = 7", "x.toml").errors[0].problem


def test_a_lease_and_a_wait_may_be_none(look: Look) -> None:
    settings = look('lease = "none"\nwait = "none"', "x.toml").settings
    assert (settings.lease, settings.wait) == (None, None)


def test_one_wrong_resource_is_served_around_unless_strict(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text(
        'external-resources = ["a", "b"]\nexternal-resource.a.amount = 1\nexternal-resource.b.amount = "x"\n'
    )
    settings = load(path, {}, {})
    assert [item.in_effect for item in settings.resources] == [True, False]
    assert [problem.key for problem in settings.problems] == ["external-resource.b.amount"]
    for overrides, environment in (({"strict": "true"}, {}), ({}, {"OUTFITTER_STRICT": "true"})):
        with pytest.raises(ConfigurationError, match=r"external-resource\.b\.amount"):
            load(path, overrides, environment)


def test_warnings_are_no_reason_to_refuse_even_if_strict(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("external-resources: gpu\nexternal.gpu.amount: 1\noutfitter.strict: true\n")
    assert load(path, {}, {}).resources[0].amount == 1


def test_what_is_no_fault_is_no_part_of_a_refusal(tmp_path: Path) -> None:
    path = tmp_path / "outfitter.toml"
    path.write_text('external-resources = "off"\nexternal-resource.off.amount = 0\nhttp = "nonsense"\n')
    with pytest.raises(ConfigurationError) as caught:
        load(path, {}, {})
    assert [problem.key for problem in caught.value.problems] == ["http"]


def test_an_unknown_override_is_an_error(look: Look) -> None:
    (problem,) = look("", overrides={"leese": "3s"}).problems
    assert (problem.file, problem.suggestion) == ("command line", "did you mean outfitter.lease?")


def test_a_connection_has_the_same_sources_in_the_same_order(tmp_path: Path) -> None:
    for name, text in (
        ("x.toml", 'bus = "kafka://file:1"\ncluster = "file"\nhost = "file"\nexternal-resources = "a,b"\n'),
        ("x.yaml", "outfitter.bus: kafka://file:1\noutfitter: {cluster: file, host: file}\n"),
    ):
        path = tmp_path / name
        path.write_text(text)
        found = connection(path, {"bus": "kafka://line:1"}, {"OUTFITTER_CLUSTER": "variable"})
        assert (found.bus, found.cluster, found.host) == ("kafka://line:1", "variable", "file")


def test_a_connection_needs_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = connection(None, {}, {})
    assert (found.bus, found.cluster, found.host) == (DEFAULTS["bus"], "outfitter", default_host())


def test_a_wrong_connection_names_every_wrong_value(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        connection(None, {"bus": "redis://x"}, {"OUTFITTER_CLUSTER": "a/b"})
    assert [problem.key for problem in caught.value.problems] == ["--bus", "OUTFITTER_CLUSTER"]
