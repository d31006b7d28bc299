"""The manager's settings from command line, environment, file and defaults, in this order.

`inspect` returns all problems; `load` raises an error if the settings cannot be used.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from msgspec import structs

from outfitter_proto.bus.addresses import is_loopback
from outfitter_proto.bus.schemes import is_local
from outfitter_proto.support import file_ownership
from outfitter_proto.support.units import format_duration
from outfitter_service.config import options, resources, sources
from outfitter_service.config.names import resource_names
from outfitter_service.config.problems import ConfigProblem, ConfigurationError, Severity, nearest
from outfitter_service.config.resources import Given, ResourceConfig

_COMMAND_LINE = "command line"
_SETTINGS = {option.name: option for option in options.SETTINGS}
_OURS = (options.LIST_KEY, options.PREFIX, *options.OLD_PREFIXES, "outfitter.")
_QUOTED = re.compile(r"""(["']).*\1""")


class Settings(options.OwnSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings in effect."""

    resources: tuple[ResourceConfig, ...] = ()
    """All listed ones, in any state."""
    file: Path | None = None
    origins: dict[str, str]
    """The origin of each value, by setting name or full resource key."""
    problems: tuple[ConfigProblem, ...] = ()
    """Those that do not stop the manager."""

    @property
    def login(self) -> dict[str, str]:
        """The settings for logging in to Kafka's brokers, for `bus.connect`."""
        return options.login(structs.asdict(self))


class Inspection(NamedTuple):
    """The result of checking a configuration. `settings` None: a manager cannot start with it."""

    settings: Settings | None
    problems: tuple[ConfigProblem, ...]
    resources: tuple[ResourceConfig, ...] = ()
    """All listed resources, even if the manager's own settings are wrong."""
    origins: Mapping[str, str] = MappingProxyType({})

    @property
    def errors(self) -> tuple[ConfigProblem, ...]:
        return tuple(problem for problem in self.problems if problem.severity is Severity.ERROR)


def load(
    path: str | Path | None = None,
    overrides: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
    *,
    required: bool = True,
) -> Settings:
    """The settings from the file at `path` (default: see `sources.find`), the environment and `overrides`.

    `overrides`: the command line's setting names (`lease-grace`) or full keys (`external-resource.gpu.amount`), with
    their text. A misconfigured resource is in `Settings.resources` with its state and reason.

    Raises:
        ConfigurationError: no file (if `required`), an unusable one, a wrong setting of the manager, or with `strict`
            any error. It lists all problems.
    """
    inspection = inspect(path, overrides, environment, required=required)
    settings = inspection.settings
    wrong = [problem for problem in inspection.problems if problem.severity is not Severity.INFO]
    if settings is None:
        raise ConfigurationError(wrong)
    if settings.strict and inspection.errors:
        raise ConfigurationError(wrong, "strict: nothing is served while anything is misconfigured")
    return settings


def inspect(
    path: str | Path | None = None,
    overrides: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
    *,
    required: bool = True,
) -> Inspection:
    """As `load`, but returns all problems and raises nothing."""
    environment = os.environ if environment is None else environment
    file = sources.find(path, environment)
    if file is None and required:
        return Inspection(None, sources.none_found().problems)
    try:
        source = sources.read(file) if file is not None else None
    except ConfigurationError as error:
        return Inspection(None, error.problems)
    return _Reading(source, overrides or {}, environment).inspection()


class _Reading:
    """Reads all sources once, and collects values and problems."""

    def __init__(
        self, source: sources.ConfigSource | None, overrides: Mapping[str, str], environment: Mapping[str, str]
    ) -> None:
        self.source = source
        self.environment = environment
        self.problems: list[ConfigProblem] = list(source.problems) if source else []
        self.settings: dict[str, Given] = {}
        self.names: Given | None = None
        self.of_resources: list[Given] = []
        self.overriding: list[Given] = []
        self.elsewhere: set[str] = set()
        for entry in self._last_lines(source) if source else ():
            self._add_entry(entry)
        self._add_environment()
        for key, value in overrides.items():
            self._add_override(key, value)

    def _last_lines(self, source: sources.ConfigSource) -> Iterator[sources.ConfigEntry]:
        """The entries that count. Warns where Flink's line format means something else than YAML would."""
        last = {entry.key: entry for entry in source.entries} if source.lines else {}
        for entry in source.entries:
            counts = last.get(entry.key, entry)
            if counts is entry:
                yield entry
            if not source.lines or not entry.key.startswith(_OURS):
                continue
            item = Given(entry.value, f"{source.path} line {entry.line}", entry.key)
            if counts is not entry:
                problem, remedy = f"is given again in line {counts.line}, which counts, as in Flink", "keep one of them"
            elif _QUOTED.fullmatch(str(entry.value)):
                problem, remedy = "has quotes, which are part of the value here, as in Flink", "leave them out"
            else:
                continue
            self._add_problem(item, problem, remedy, Severity.WARNING)

    def _add_entry(self, entry: sources.ConfigEntry) -> None:
        assert self.source is not None  # noqa: S101 - entries come from a source
        line = f" line {entry.line}" if entry.line is not None else ""
        item = Given(entry.value, f"{self.source.path}{line}", entry.key)
        key = entry.key
        if key == options.LIST_KEY:
            if self.names is not None:
                self._add_problem(item, f"is given twice, in {self.names.place} too", "keep one of them")
            self.names = item
        elif key.startswith(options.PREFIX):
            self.of_resources.append(item)
        elif key.startswith(options.OLD_PREFIXES):
            self._add_old_key(item)
        elif key.startswith("outfitter."):
            self._add_setting(key.removeprefix("outfitter."), item)
        elif self.source.toml:
            self._add_setting(key, item)
        else:
            self._add_foreign_key(item)

    def _add_old_key(self, item: Given) -> None:
        """Add a key of the proposal's earlier forms. Flink has other keys with these prefixes, which are ignored."""
        prefix = next(prefix for prefix in options.OLD_PREFIXES if item.key.startswith(prefix))
        _, rest = resources.split_key(item.key.removeprefix(prefix), ())
        if resources.canonical(rest):
            self.of_resources.append(item)
        elif self.source is not None and self.source.toml:
            self._add_setting(item.key, item)

    def _add_setting(self, name: str, item: Given) -> None:
        if name not in _SETTINGS:
            self._add_problem(item, "is a key that nobody reads", self._suggestion(name))
        elif name in self.settings:
            self._add_problem(item, f"is given twice, in {self.settings[name].place} too", "keep one of them")
        else:
            option = _SETTINGS[name]
            if option.is_path and isinstance(item.value, str) and self.source is not None:
                item = item._replace(value=str(self.source.path.absolute().parent / item.value))
            self.settings[name] = item

    def _suggestion(self, name: str) -> str:
        toml = self.source is None or self.source.toml
        spelled = {option.name if toml else option.flat_key: option.name for option in options.SETTINGS}
        known = [*spelled, options.LIST_KEY]
        near = _near_prefix(name) or nearest(name if toml else f"outfitter.{name}", known)
        return f"did you mean {near}?" if near else f"known are {', '.join(known)} and {options.PREFIX}<name>.…"

    def _add_foreign_key(self, item: Given) -> None:
        """Ignore Flink's other keys, unless they look like misspelt keys of ours."""
        near = _near_prefix(item.key)
        if near is not None:
            _, dot, rest = near.partition(".")
            resource = resources.split_key(rest, ())[0] if dot else None
            self._add_problem(item, "is a key that nobody reads", f"did you mean {near}?", resource=resource)
        elif place := _below(item):
            if place not in self.elsewhere:
                self.elsewhere.add(place)
                self._add_problem(
                    item._replace(key=place, value=None),
                    "has keys of external resources, which are not read there",
                    "put what stands there into a file of its own",
                    Severity.WARNING,
                )
        elif item.key in _SETTINGS:
            self._add_problem(
                item,
                "is not read: in a file of Flink's, Outfitter's own keys have a prefix",
                f"did you mean outfitter.{item.key}?",
                Severity.WARNING,
            )

    def _add_environment(self) -> None:
        variable = "OUTFITTER_EXTERNAL_RESOURCES"
        if self.environment.get(variable):
            self.names = Given(self.environment[variable], f"environment {variable}", options.LIST_KEY)
        for option in options.SETTINGS:
            if self.environment.get(option.variable):
                value = self.environment[option.variable]
                self.settings[option.name] = Given(value, f"environment {option.variable}", option.variable)

    def _add_override(self, key: str, value: str) -> None:
        name = key.removeprefix("outfitter.")
        if name in _SETTINGS:
            self.settings[name] = Given(value, _COMMAND_LINE, f"--{name}" if name == key else key)
        elif key == options.LIST_KEY:
            self.names = Given(value, _COMMAND_LINE, key)
        elif key.startswith((options.PREFIX, *options.OLD_PREFIXES)):
            self.overriding.append(Given(value, _COMMAND_LINE, key))
        else:
            self._add_problem(Given(value, _COMMAND_LINE, key), "is a key that nobody reads", self._suggestion(name))

    def inspection(self) -> Inspection:
        names = self._resource_names()
        directory = self.source.path.absolute().parent if self.source else None
        built = resources.build(
            names, self.of_resources, directory=directory, environment=self.environment, overrides=self.overriding
        )
        self.problems += built.problems
        self._suggest_keys(built.configs)
        values = {option.field: self._setting(option) for option in options.SETTINGS}
        self._check_login(values)
        self._check_session(values)
        self._check_api(values)
        self._check_secrets(values)
        problems = tuple(self.problems)
        if any(problem.severity is Severity.ERROR and problem.resource is None for problem in problems):
            return Inspection(None, problems, built.configs, built.origins)
        origins = {name: self.settings[name].place if name in self.settings else "default" for name in _SETTINGS}
        origins[options.LIST_KEY] = self.names.place if self.names is not None else "default"
        return Inspection(
            Settings(
                **values,
                resources=built.configs,
                file=self.source.path if self.source else None,
                origins=origins | built.origins,
                problems=problems,
            ),
            problems,
            built.configs,
            built.origins,
        )

    def _check_login(self, values: Mapping[str, Any]) -> None:
        """Check that the settings for Kafka are consistent. Connecting checks the files."""
        if values["bus"] is None or is_local(values["bus"]):
            return
        from outfitter_proto.bus import BusConfigurationError
        from outfitter_proto.bus.kafka.connecting import login

        try:
            login.described(values["bus"], options.login(values), self.environment)
        except BusConfigurationError as error:
            self._add_problem(Given(None, "", options.KAFKA.rstrip(".")), str(error))

    def _check_session(self, values: Mapping[str, Any]) -> None:
        """Warn of a session time-out that Kafka's brokers refuse by default."""
        seconds, bus = values["session_timeout"], values["bus"]
        if seconds is None or bus is None or is_local(bus) or values["scope"] != "cluster":
            return
        least, most = options.USUAL_SESSION
        if not least <= seconds <= most and (item := self.settings.get("session-timeout")):
            self._add_problem(
                item,
                f"is refused by brokers with the default group.min.session.timeout.ms ({format_duration(least)}) and "
                f"group.max.session.timeout.ms ({format_duration(most)})",
                "set the brokers' bounds first, or stay within them",
                Severity.WARNING,
            )

    def _check_api(self, values: Mapping[str, Any]) -> None:
        """Refuse an API that others reach without a token."""
        http = values["http"]
        if values["api"] and http is not None and values["api_token_file"] is None and not is_loopback(http):
            self._add_problem(
                self.settings.get("api") or Given("true", "default", "api"),
                f"is not served at {http} without protection, because others reach it",
                "give a file with a token (api-token-file), or listen on 127.0.0.1",
            )

    def _check_secrets(self, values: Mapping[str, Any]) -> None:
        """Warn of each secret that all users of this machine may read."""
        for option in options.SETTINGS:
            value = values[option.field]
            if option.name in options.SECRET_FILES and value and file_ownership.is_read_by_others(Path(value)):
                item = self.settings.get(option.name) or Given(value, "default", option.name)
                why = "names a secret, and everybody may read it"
                self._add_problem(item, why, f"chmod o-r {value}", Severity.WARNING)

    def _resource_names(self) -> list[str]:
        if self.names is None:
            return []
        names, errors = resource_names(self.names.value)
        for error in errors:
            # the error concerns this item only: a manager serves the other resources
            self._add_problem(self.names, error.problem, error.suggestion, resource=error.item, found=error.item)
        return names

    def _setting(self, option: options.Option) -> Any:
        item = self.settings.get(option.name)
        text = item.value if item is not None else option.default_text
        if isinstance(text, list) and item is not None:
            self._add_problem(item, "must be one value, not a list")
            return None
        if text is None and item is not None:
            self._add_problem(item, "has no value; leave the key out or give it one")
            return None
        try:
            return None if text is None else option.parse(str(text))
        except ValueError as error:
            self._add_problem(item or Given(str(text), "default", option.name), str(error))
            return None

    def _suggest_keys(self, configs: Iterable[ResourceConfig]) -> None:
        """Report missing keys for Kubernetes and YARN. Do so only if the file is Flink's or a resource has one of these
        keys."""
        configs = list(configs)
        if (self.source is None or self.source.toml) and not any(
            config.kubernetes_key or config.yarn_key for config in configs
        ):
            return
        for config in configs:
            if config.name not in options.DEFAULT_KEYS or not config.in_effect:
                continue
            for option, has, key in zip(
                ("kubernetes.config-key", "yarn.config-key"),
                (config.kubernetes_key, config.yarn_key),
                options.DEFAULT_KEYS[config.name],
                strict=True,
            ):
                if has is None:
                    item = Given(None, "", config.key(option))
                    problem = "is not given: the resource is left out of such requests"
                    self._add_problem(
                        item, problem, f"for NVIDIA's devices it is {key}", Severity.INFO, resource=config.name
                    )

    def _add_problem(
        self,
        item: Given,
        problem: str,
        suggestion: str | None = None,
        severity: Severity = Severity.ERROR,
        **of: str | None,
    ) -> None:
        """`of`: see `Given.problem`."""
        self.problems.append(item.problem(problem, suggestion, severity, **of))


def _below(item: Given) -> str | None:
    """Where in a manifest of Kubernetes Flink's configuration is: mapping (`spec.flinkConfiguration`) or text of a key
    (`data.config.yaml`)."""
    place, dot, _ = item.key.partition("." + options.PREFIX.removesuffix("."))
    if dot:
        return place
    return item.key if options.PREFIX in str(item.value) and item.key.startswith(("data.", "spec.")) else None


def _near_prefix(key: str) -> str | None:
    """The key with its first word corrected, if that is similar to one of ours."""
    head, dot, rest = key.partition(".")
    prefix = "external-resource" if dot else options.LIST_KEY
    likeness = difflib.SequenceMatcher(None, head.replace("_", "-").lower(), prefix).ratio()
    return f"{prefix}{dot}{rest}" if head != prefix and likeness >= 0.85 else None
