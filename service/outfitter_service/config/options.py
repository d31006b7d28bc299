"""The option table: every setting and every resource option, with type, default and purpose.

Both syntaxes, the environment, the command line, `config show` and the documentation use this table. A manager's
setting `lease-grace` is a top-level key in TOML, `outfitter.lease-grace` in a file of Flink's, and
`OUTFITTER_LEASE_GRACE` in the environment. A resource's option `sharing` is `external-resource.<name>.sharing`.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, NamedTuple

from msgspec import Struct

from outfitter_proto.bus import DEFAULT_BUS, addresses, schemes
from outfitter_proto.names import DEFAULT_CLUSTER, check_name, default_host
from outfitter_proto.records import MAX_AMOUNT
from outfitter_proto.support.units import LONGEST_S, format_duration, parse_duration
from outfitter_service.core.state.pools import MOST_REPLICAS

_LONGEST_SESSION = 24 * 86_400.0
"""Kafka counts a session's milliseconds in 32 bits."""
USUAL_SESSION = (6.0, 1_800.0)
"""The bounds that brokers have by default, in seconds: group.min.session.timeout.ms and
group.max.session.timeout.ms."""
_TRUE = frozenset({"true", "yes", "on", "1"})
_FALSE = frozenset({"false", "no", "off", "0"})
_AMOUNT = r"\+?[0-9]{1,40}"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_DOMAIN = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_KUBERNETES = rf"(?P<domain>{_DOMAIN}(?:\.{_DOMAIN})*)/{_LABEL}"
_ALNUM = r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_YARN = rf"(?:{_ALNUM}(?:\.{_ALNUM})*/)?[A-Za-z][A-Za-z0-9._-]*"

Parse = Callable[[str], Any]
"""Parses text to a value; raises ValueError with the valid values."""


class Option(NamedTuple):
    """The row of one setting of the manager. `default` is text as in a file, or makes it; None: no value. `flag`: the
    help of its flag of `outfitter serve`; None: it has none."""

    type: str
    parse: Parse
    default: str | Callable[[], str] | None
    about: str
    flag: str | None = None
    name: str = ""

    @property
    def default_text(self) -> str | None:
        return self.default() if callable(self.default) else self.default

    @property
    def field(self) -> str:
        return _word(self.name)

    @property
    def flat_key(self) -> str:
        return f"outfitter.{self.name}"

    @property
    def variable(self) -> str:
        return f"OUTFITTER_{_word(self.name).upper()}"

    @property
    def is_path(self) -> bool:
        """Whether it names a file. In a configuration file, the path is relative to that file's folder."""
        return self.name.endswith("-file")


def _word(name: str) -> str:
    return name.replace("-", "_").replace(".", "_")


class ResourceOption(NamedTuple):
    """One option of a resource, after `external-resource.<name>.`."""

    name: str
    type: str
    parse: Parse
    default: str | None
    about: str


def text(value: str) -> str:
    """Any text that is not blank."""
    if not value.strip():
        raise ValueError("is empty; leave the key out or give it a value")
    return value.strip()


def utf8_text(value: str) -> str:
    """As `text`, and valid UTF-8. A variable or a path may have other bytes."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("is not UTF-8") from None
    return text(value)


def name_of(what: str) -> Parse:
    def parse(value: str) -> str:
        return check_name(value.strip(), what)

    return parse


def bus_url(value: str) -> str:
    url = value.strip()
    scheme = schemes.find(url)
    if scheme is None:
        raise ValueError(f"is no bus; write {schemes.SYNTAX}")
    scheme.check(url)
    return url


def http_address(value: str) -> str:
    return str(addresses.listener(value))


def duration(*, least: float = 0.0, most: float = LONGEST_S, none: bool = False) -> Parse:
    def parse(value: str) -> float | None:
        if none and value.strip() == "none":
            return None
        seconds = parse_duration(value)
        if not least <= seconds <= most:
            bounds = f"{format_duration(least)} and {format_duration(most)}"
            raise ValueError(f"must be between {bounds}" + (", or none" if none else ""))
        return seconds

    return parse


class Choice(Struct, frozen=True):
    """Parses one of these words."""

    allowed: tuple[str, ...]

    def __call__(self, value: str) -> str:
        if value.strip() not in self.allowed:
            raise ValueError(f"must be one of {', '.join(self.allowed)}")
        return value.strip()


def one_of(*allowed: str) -> tuple[str, Choice]:
    """The type of such an option in words, and what parses it."""
    return f"{', '.join(allowed[:-1])} or {allowed[-1]}", Choice(allowed)


def flag(value: str) -> bool:
    word = value.strip().lower()
    if word not in _TRUE | _FALSE:
        raise ValueError("must be true or false")
    return word in _TRUE


def amount(value: str) -> int:
    """A whole number of devices; 0 switches the resource off on this host."""
    number = value.strip(" \t\r\n")
    allowed = f"must be a whole number from 1 to {MAX_AMOUNT}, or 0 to switch the resource off"
    if not number:
        raise ValueError(f"is empty; it {allowed}")
    if not re.fullmatch(_AMOUNT, number) or int(number) > MAX_AMOUNT:
        raise ValueError(allowed)
    return int(number)


def replicas(value: str) -> int:
    """A whole number of workers that have a device at once."""
    number = value.strip()
    if not re.fullmatch(_AMOUNT, number) or not 1 <= int(number) <= MOST_REPLICAS:
        raise ValueError(f"must be a whole number from 1 to {MOST_REPLICAS}")
    return int(number)


def kubernetes_key(value: str) -> str | None:
    """An extended resource's name; blank means none, as in Flink."""
    key = value.strip()
    if not key:
        return None
    match = re.fullmatch(_KUBERNETES, key)
    domain = match["domain"] if match else ""
    is_native = domain.endswith("kubernetes.io")
    # quotas put `requests.` before the name, and a domain has at most 253 characters
    if not match or len(domain) > 244 or domain.startswith("requests.") or is_native:
        raise ValueError(
            "is no name of a Kubernetes extended resource; write DOMAIN/NAME, such as nvidia.com/gpu "
            "(no domain that ends in kubernetes.io or begins with `requests.`)"
        )
    return key


def yarn_key(value: str) -> str | None:
    """A YARN resource type's name; blank means none, as in Flink."""
    key = value.strip()
    if not key:
        return None
    if not re.fullmatch(_YARN, key):
        raise ValueError("is no name of a YARN resource type; write NAME or DOMAIN/NAME, such as yarn.io/gpu")
    return key


def property_names(value: str | list[str]) -> tuple[str, ...]:
    """Names of properties: a list, or text with semicolons or commas between them."""
    given = value if isinstance(value, list) else re.split("[;,]", value)
    names = tuple(dict.fromkeys([name.strip() for name in given if name.strip()]))
    if not names:
        raise ValueError("is empty; write a property's name such as nvlink.group, or leave the key out")
    return names


KAFKA = "kafka."
"""The prefix of the settings for logging in to Kafka's brokers: `outfitter_proto.bus.kafka.connecting.login`."""


# fmt: off
class OwnSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The manager's own settings, each with its row of the option table. Durations are seconds."""

    bus: Annotated[str, Option(
        "URL", bus_url, DEFAULT_BUS,
        "The bus of registrations and allocations: kafka://host:9092[,host:9092], or sqlite:///PATH for one machine "
        "without a broker. The default is one file for the whole system, which all its users' workers share.",
    )]
    cluster: Annotated[str, Option(
        "name", name_of("cluster"), DEFAULT_CLUSTER,
        "The prefix of topics, transactional ids and groups. `prod` and `staging` can share one broker.",
    )]
    host: Annotated[str, Option(
        "name", name_of("host"), default_host,
        "The name under which this machine's workers register. Default: the machine's hostname in lower case.",
    )]
    scope: Annotated[str, Option(
        *one_of("host", "cluster"), "host",
        "host: this manager serves the workers of its own machine. cluster: several managers share all hosts by "
        "partitions, and drivers must be able to look from afar.",
        flag="Serve this machine, or a share of all hosts [host].",
    )]
    replica: Annotated[str | None, Option(
        "name", name_of("replica"), None,
        "Cluster scope: this manager's stable name in the group. With it, a restart within `session-timeout` moves no "
        "partition. No two managers may have the same name. Without it, each start is a new member.",
        flag="Cluster scope: this manager's stable name in the group.",
    )]
    session_timeout: Annotated[float, Option(
        "duration", duration(least=1.0, most=_LONGEST_SESSION), "10s",
        "Cluster scope: how long a manager may be silent until the group gives its partitions to others. The brokers' "
        "group.min.session.timeout.ms (6 s by default) and group.max.session.timeout.ms (30 min) bound it.",
    )]
    on_stop: Annotated[str, Option(
        *one_of("leave", "stay"), "leave",
        "Cluster scope, in an orderly shutdown: leave the group and serve until others have taken over, or stay a "
        "member for a restart within `session-timeout` (needs `replica`).",
    )]
    http: Annotated[str, Option(
        "HOST:PORT", http_address, "127.0.0.1:9477",
        "The address of /metrics, /livez and /readyz. Loopback by default, because there is no log-in.",
        flag="Address of /metrics, /livez and /readyz [127.0.0.1:9477].",
    )]
    api: Annotated[bool, Option(
        "true or false", flag, "false",
        "Serve the read API of this host (in cluster scope, of all hosts) at the address of `http`, too. Others can "
        "reach it there only with `api-token-file`.",
        flag="Serve the read API at the address of --http, too.",
    )]
    api_token_file: Annotated[str | None, Option(
        "path", text, None,
        "The file with the token that each request of the API must have. It is read for each request.",
    )]
    lease: Annotated[float | None, Option(
        "duration or none", duration(least=0.1, none=True), "30s",
        "How long a worker may be silent before the manager takes its devices back, if its registration does not say. "
        "none: until it deregisters or its owner process dies.",
    )]
    lease_grace: Annotated[float, Option(
        "duration", duration(), "2s",
        "How long the devices stay held after a lease's end, for clocks and networks that lag behind.",
    )]
    wait: Annotated[float | None, Option(
        "duration or none", duration(none=True), "none",
        "How long a registration waits for devices before it fails, if it does not say. none: for ever.",
    )]
    ended_retention: Annotated[float, Option(
        "duration", duration(), "1h",
        "How long ended and failed allocations stay in the ledger for readers, before the manager deletes them.",
    )]
    checkpoint_interval: Annotated[float, Option(
        "duration", duration(least=0.1), "1h",
        "How often the manager writes its input position if it writes nothing else. A restart reads the rest again.",
    )]
    beat_interval: Annotated[float, Option(
        "duration", duration(least=5.0, most=60.0), "20s",
        "How often the manager says on the bus that it lives. Others take it for dead after three intervals of "
        "silence.",
    )]
    shutdown_timeout: Annotated[float, Option(
        "duration", duration(least=0.1), "10s",
        "How long an orderly shutdown may take before the process ends at once. Nothing decided is lost then.",
    )]
    log_format: Annotated[str, Option(
        *one_of("auto", "text", "json"), "auto",
        "Log lines for people (text) or for programs (json). auto: text in a terminal, JSON otherwise.",
        flag="Log lines for people or programs.",
    )]
    log_level: Annotated[str, Option(
        *one_of("debug", "info", "warning", "error"), "info",
        "The least important log line that is written.",
        flag="The lowest logged level.",
    )]
    history: Annotated[bool, Option(
        "true or false", flag, "true",
        "Write every change and its reason into the topic `history`, for `outfitter history` and `outfitter replay`. "
        "false: write nothing there, and that topic need not exist.",
    )]
    strict: Annotated[bool, Option(
        "true or false", flag, "false",
        "Refuse to start if any resource is misconfigured, instead of serving the others.",
        flag="Refuse to start if any resource is misconfigured.",
    )]
    kafka_security_protocol: Annotated[str | None, Option(
        *one_of("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"), None,
        "The protocol of the brokers' listener. PLAINTEXT by default, which trusts everybody.",
    )]
    kafka_sasl_mechanism: Annotated[str | None, Option(
        *one_of("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"), None,
        "The mechanism for logging in with a SASL protocol. SCRAM-SHA-512 by default.",
    )]
    kafka_sasl_username: Annotated[str | None, Option(
        "text", utf8_text, None,
        "The user that logs in. Not with OAUTHBEARER, where the token names the user.",
    )]
    kafka_sasl_password_file: Annotated[str | None, Option(
        "path", text, None,
        "The file with the password, which is read for each connection. Or the variable OUTFITTER_KAFKA_SASL_PASSWORD.",
    )]
    kafka_sasl_token_file: Annotated[str | None, Option(
        "path", text, None,
        "The file with the OAUTHBEARER token, which is read for each connection. Replace the whole file to renew it.",
    )]
    kafka_ca_file: Annotated[str | None, Option(
        "path", text, None,
        "The certificate authorities that may sign the brokers' certificates (PEM). The system's by default.",
    )]
    kafka_cert_file: Annotated[str | None, Option(
        "path", text, None,
        "The client certificate for mutual TLS, with its chain (PEM).",
    )]
    kafka_key_file: Annotated[str | None, Option(
        "path", text, None,
        "The client certificate's key, if it is in a file of its own (PEM).",
    )]
    kafka_key_password_file: Annotated[str | None, Option(
        "path", text, None,
        "The file with that key's password, if it has one.",
    )]


# fmt: on


def _rows() -> Iterator[Option]:
    for field, annotated in OwnSettings.__annotations__.items():
        row: Option = annotated.__metadata__[0]
        yield row._replace(name=field.replace("kafka_", KAFKA, 1).replace("_", "-"))


SETTINGS = tuple(_rows())
"""The rows, each with its setting's name."""

SECRET_FILES = frozenset(
    {"api-token-file"} | {f"{KAFKA}{name}-file" for name in ("sasl-password", "sasl-token", "key", "key-password")}
)
"""Settings that name files which other users must not read."""

_LOGIN = [option for option in SETTINGS if option.name.startswith(KAFKA)]


def login(values: Mapping[str, Any]) -> dict[str, str]:
    """The settings for logging in to Kafka's brokers, from the values of all settings by field, for `bus.connect`."""
    given = {option.name.removeprefix(KAFKA): values[option.field] for option in _LOGIN}
    return {name: value for name, value in given.items() if value is not None}


RESOURCE_OPTIONS: tuple[ResourceOption, ...] = (
    ResourceOption(
        "amount", "whole number", amount, None,
        "How many devices a worker gets that names no amount. Kubernetes and YARN are asked for as many. 0: the "
        "resource is listed, but switched off on this host.",
    ),
    ResourceOption(
        "driver-factory.class", "driver", text, None,
        "The driver that finds the devices: the name of an installed one, a Python path (package.module:Factory), or "
        "Flink's class name of its GPU driver. Without it, the amount is still requested from Kubernetes or YARN.",
    ),
    ResourceOption(
        "kubernetes.config-key", "extended resource", kubernetes_key, None,
        "The resource's name in pod specifications, such as nvidia.com/gpu. Blank: it is not requested.",
    ),
    ResourceOption(
        "yarn.config-key", "YARN resource type", yarn_key, None,
        "The resource's name in YARN requests, such as yarn.io/gpu. Blank: it is not requested.",
    ),
    ResourceOption(
        "sharing", "exclusive or shared", Choice(("exclusive", "shared")), "exclusive",
        "exclusive: one worker at a time has a device. shared: every worker gets all devices that the driver names.",
    ),
    ResourceOption(
        "replicas", "whole number", replicas, "1",
        "To how many workers each device is lent at once. Nothing keeps these workers apart from each other.",
    ),
    ResourceOption(
        "replicas-same-device", "true or false", flag, "false",
        "Whether one worker may get several replicas of the same device. Else it gets replicas of different devices.",
    ),
    ResourceOption(
        "on-failure", "fail-worker, no-info or wait", Choice(("fail-worker", "no-info", "wait")), "fail-worker",
        "What a worker gets if the driver fails for good: a failed allocation, its other resources without infos of "
        "this one (as in Flink), or a place in the queue until the driver recovers.",
    ),
    ResourceOption(
        "driver-timeout", "duration", duration(least=0.001), None,
        "How long one call of the driver may take. The driver's own limit by default.",
    ),
    ResourceOption(
        "min-healthy-time", "duration", duration(), "30s",
        "How long a device that was ill must be healthy before a worker gets it. The default is three looks of the gpu "
        "driver: one good look lends no device that is ill and well in turns. 0s: at once.",
    ),
    ResourceOption(
        "same", "property names", property_names, None,
        "Which properties all devices of a worker have in common that does not say it itself.",
    ),
)  # fmt: skip

PARAM = "param."
WHERE = "where."
"""The prefix of clauses: `where.<property>`, or `where.<property>.min` and the other words of a clause."""
WORDS = ("is", "not", "min", "max", "exists")
LIST_KEY = "external-resources"
PREFIX = "external-resource."
OLD_PREFIXES = ("external.", "taskmanager.external-resource.", "taskmanager.resource.")
"""Prefixes of `<name>.amount` in the proposal's earlier forms. The first is an error in Flink's documentation."""
ALIASES = {"driver": "driver-factory.class"}
"""Other spellings of a resource's options."""
OLD_SPELLINGS = {
    "kubernetes.key": "kubernetes.config-key",
    "yarn.key": "yarn.config-key",
    "discovery-script": "param.discovery-script.path",
}
"""Those of the proposal's earlier forms, which are read with a warning."""
DEFAULT_KEYS = {"gpu": ("nvidia.com/gpu", "yarn.io/gpu")}
"""The default keys in an early form of FLIP-108: only suggested, never applied."""
