"""Builds each resource's configuration from flat keys.

It collects all problems. An error of one resource does not affect the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct

from outfitter_proto import clauses
from outfitter_proto.clauses import Clauses
from outfitter_proto.records import Condition
from outfitter_service.config import options
from outfitter_service.config.problems import ConfigProblem, Severity, nearest
from outfitter_service.config.sources import Value
from outfitter_service.core.model import NO_CLAUSES, OnFailure, SpecState

MIN_HEALTHY_S = 30.0
"""The default of `min-healthy-time`, in seconds."""


class ResourceConfig(Struct, frozen=True, kw_only=True):
    """The configuration of one resource in `external-resources`."""

    name: str
    amount: int | None = None
    """Per worker; None if the setting is wrong."""
    state: SpecState = SpecState.OK
    reason: str | None = None
    """Explains any state but OK."""
    driver: str | None = None
    """A name for `outfitter_drivers.registry.load_factory`, None without a driver."""
    params: dict[str, str] = {}
    kubernetes_key: str | None = None
    yarn_key: str | None = None
    sharing: str = "exclusive"
    replicas: int = 1
    replicas_same_device: bool = False
    on_failure: OnFailure = OnFailure.FAIL_WORKER
    timeout: float | None = None
    """Time limit of one driver call in seconds, None for the driver's own."""
    min_healthy: float = MIN_HEALTHY_S
    """Seconds for which a device that was ill must be healthy before a worker gets it."""
    clauses: Clauses = NO_CLAUSES
    """Which devices a worker takes that does not say it."""
    directory: Path | None = None
    """The configuration file's folder."""

    @property
    def in_effect(self) -> bool:
        """Whether Kubernetes or YARN requests include it, and workers may request it."""
        return self.state in {SpecState.OK, SpecState.NO_DRIVER}

    def key(self, option: str) -> str:
        """The full key of one of its options, for messages."""
        return f"{options.PREFIX}{self.name}.{option}"


class Given(NamedTuple):
    """A configured value, its place of origin (for people, and for `config show`), and its key as written there."""

    value: Value
    place: str
    key: str

    def problem(
        self,
        problem: str,
        suggestion: str | None = None,
        severity: Severity = Severity.ERROR,
        *,
        resource: str | None = None,
        found: str | None = None,
    ) -> ConfigProblem:
        return ConfigProblem(
            file=self.place,
            key=self.key,
            found=_shown(self.value) if found is None else found,
            problem=problem,
            suggestion=suggestion,
            severity=severity,
            resource=resource,
        )


class ResourceConfigs(NamedTuple):
    """All listed resources, the origins of their values, and the problems."""

    configs: tuple[ResourceConfig, ...]
    origins: dict[str, str]
    problems: tuple[ConfigProblem, ...]


_OPTIONS = {option.name: option for option in options.RESOURCE_OPTIONS}
_GUESSES = 50
"""Most unlisted resources for which we suggest a name."""
_SUGGESTED = [*_OPTIONS, *options.ALIASES, "param.discovery-script.path", "param.discovery-script.args"]


def canonical(rest: str) -> str | None:
    """The option for `rest`, the text after `external-resource.<name>.`; None if it is unknown."""
    if rest in _OPTIONS or (rest.startswith((options.PARAM, options.WHERE)) and not rest.endswith(".")):
        return rest
    return options.ALIASES.get(rest) or options.OLD_SPELLINGS.get(rest)


def split_key(key: str, names: Iterable[str]) -> tuple[str, str]:
    """The resource and the option in a key without its prefix. Names may have dots, so the
    longest listed name counts."""
    listed = [name for name in names if key == name or key.startswith(f"{name}.")]
    if listed:
        name = max(listed, key=len)
        return name, key[len(name) + 1 :]
    for dot in (match.start() for match in re.finditer(r"\.", key)):
        if canonical(key[dot + 1 :]):
            return key[:dot], key[dot + 1 :]
    name, _, rest = key.partition(".")
    return name, rest


def build(
    names: list[str],
    given: Iterable[Given],
    *,
    directory: Path | None,
    environment: Mapping[str, str],
    overrides: Iterable[Given],
) -> ResourceConfigs:
    """Build the resources. `given` and `overrides` have keys with one of the prefixes."""
    builder = _ResourceBuilder(names)
    for layer in (given, _from_environment(names, environment), overrides):
        builder.add(layer)
    configs = [builder.config(name, directory) for name in names]
    configs = builder.refuse_shared_keys(configs)
    return ResourceConfigs(tuple(configs), builder.origins(), tuple(builder.problems))


def _from_environment(names: Iterable[str], environment: Mapping[str, str]) -> Iterable[Given]:
    for name in names:
        for option in options.RESOURCE_OPTIONS:
            words = re.sub(r"[^A-Z0-9]", "_", f"{name}_{option.name}".upper())
            variable = f"OUTFITTER_EXTERNAL_RESOURCE_{words}"
            if environment.get(variable):
                yield Given(environment[variable], f"environment {variable}", f"{options.PREFIX}{name}.{option.name}")


class _ResourceBuilder:
    """Collects values and problems while the resources are built."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.values: dict[str, dict[str, Given]] = {name: {} for name in names}
        self.problems: list[ConfigProblem] = []
        self._unlisted: set[str] = set()

    def add(self, layer: Iterable[Given]) -> None:
        """Add a layer. Its values take precedence over those of earlier layers."""
        chosen: dict[tuple[str, str], Given] = {}
        for item in layer:
            prefix = _prefix(item.key)
            name, rest = split_key(item.key[len(prefix) :], self.names)
            if name not in self.values:
                self._not_listed(name, item)
                continue
            option = canonical(rest)
            if option is None:
                self._unknown(name, rest, item)
            elif self._preferred(name, option, item, chosen.get((name, option))):
                chosen[name, option] = item
        for (name, option), item in chosen.items():
            self.values[name][option] = item

    def _preferred(self, name: str, option: str, item: Given, earlier: Given | None) -> bool:
        """Whether `item` takes precedence over an `earlier` one. The current key does over its old spellings."""
        right = f"{options.PREFIX}{name}.{option}"
        if earlier is None:
            if item.key != right and item.key.removeprefix(f"{options.PREFIX}{name}.") not in options.ALIASES:
                self._add_problem(
                    name, item, f"is an old or mistaken spelling of {right}", f"write {right}", Severity.WARNING
                )
            return True
        if earlier.key == item.key:
            self._add_problem(name, item, f"is given twice, in {earlier.place} too", "keep one of them")
            return True
        winner, loser = (item, earlier) if item.key == right else (earlier, item)
        problem = f"has the same meaning as {winner.key}, which takes precedence"
        self._add_problem(name, loser, problem, "keep one of them", Severity.WARNING)
        return winner is item

    def _add_problem(
        self, name: str, item: Given, problem: str, suggestion: str | None = None, severity: Severity = Severity.ERROR
    ) -> None:
        self.problems.append(item.problem(problem, suggestion, severity, resource=name))

    def _not_listed(self, name: str, item: Given) -> None:
        if name in self._unlisted:
            return
        self._unlisted.add(name)
        near = nearest(name, self.names) if len(self._unlisted) <= _GUESSES else None
        suggestion = f"did you mean {near}?" if near else f"add {name} to {options.LIST_KEY}"
        self._add_problem(
            name,
            item,
            f"configures {name!r}, which {options.LIST_KEY} does not list: it is not read",
            suggestion,
            Severity.WARNING,
        )

    def _unknown(self, name: str, rest: str, item: Given) -> None:
        near = nearest(rest, _SUGGESTED) if rest else "amount"
        suggestion = f"did you mean {options.PREFIX}{name}.{near}?" if near else f"known are {', '.join(_OPTIONS)}"
        self._add_problem(name, item, "is a key that nobody reads", suggestion)

    def config(self, name: str, directory: Path | None) -> ResourceConfig:
        """The configuration of one resource, with what is valid of it."""
        values = {option: self._parsed(name, option) for option in _OPTIONS}
        driver, reason = self._driver(name, values["driver-factory.class"])
        chosen = self._clauses(name, values)
        state = SpecState.OK if driver else SpecState.NO_DRIVER
        if values["amount"] == 0:
            state, reason = SpecState.DISABLED, f"switched off on this host: {options.PREFIX}{name}.amount is 0"
        wrong = [problem for problem in self.problems if problem.resource == name and problem.severity == "error"]
        if wrong:
            state, reason = SpecState.MISCONFIGURED, "; ".join(f"{item.key} {item.problem}" for item in wrong)
        return ResourceConfig(
            name=name,
            amount=values["amount"],
            state=state,
            reason=reason,
            driver=driver,
            params=self._params(name),
            kubernetes_key=values["kubernetes.config-key"],
            yarn_key=values["yarn.config-key"],
            sharing=values["sharing"] or "exclusive",
            replicas=values["replicas"] or 1,
            replicas_same_device=bool(values["replicas-same-device"]),
            on_failure=OnFailure(values["on-failure"] or OnFailure.FAIL_WORKER),
            timeout=values["driver-timeout"],
            min_healthy=MIN_HEALTHY_S if values["min-healthy-time"] is None else values["min-healthy-time"],
            clauses=chosen,
            directory=directory,
        )

    def _parsed(self, name: str, option: str) -> Any:
        item = self.values[name].get(option)
        definition = _OPTIONS[option]
        if item is None or item.value is None:
            if option == "amount":
                self._missing_amount(name, item)
            return None if definition.default is None else definition.parse(definition.default)
        if isinstance(item.value, list) and option != "same":
            self._add_problem(name, item, "must be one value, not a list")
            return None
        try:
            value = definition.parse(item.value)  # type: ignore[arg-type]  # only `same` may be a list
        except ValueError as error:
            self._add_problem(name, item, str(error))
            return None
        if option == "amount" and value == 0:
            self._add_problem(
                name, item, f"switches {name} off on this host: nothing is requested", None, Severity.INFO
            )
        return value

    def _missing_amount(self, name: str, item: Given | None) -> None:
        key = f"{options.PREFIX}{name}.amount"
        problem = "is missing: a listed resource needs its amount per worker"
        missing = Given(None, item.place if item else "", key)
        self._add_problem(name, missing, problem, f"add {key}: 1, or 0 to switch it off")

    def _clauses(self, name: str, values: Mapping[str, Any]) -> Clauses:
        """Which devices a worker takes by default. A problem of a property is that of its first key."""
        words: dict[str, dict[str, Any]] = {}
        first: dict[str, Given] = {}
        for option, item in self.values[name].items():
            if option.startswith(options.WHERE) and item.value is not None:
                property_name, word = _clause_key(option.removeprefix(options.WHERE))
                first.setdefault(property_name, item)
                words.setdefault(property_name, {})[_FIELDS.get(word, word)] = self._clause_value(name, item, word)
        conditions = {property_name: Condition(**said) for property_name, said in words.items()}
        for property_name, condition in conditions.items():
            self._add_clause_problem(name, first[property_name], {property_name: condition}, ())
        same = values["same"] or ()
        if (of_same := self.values[name].get("same")) is not None:
            self._add_clause_problem(name, of_same, {}, same)
            if values["sharing"] == "shared":
                self._add_problem(name, of_same, "has no meaning where sharing is shared: a worker gets all devices")
        return clauses.clauses_of(conditions, same)

    def _add_clause_problem(
        self, name: str, item: Given, where: Mapping[str, Condition], same: tuple[str, ...]
    ) -> None:
        problem = clauses.problem(clauses.clauses_of(where, same))
        if problem is not None:
            self._add_problem(name, item, f"cannot be judged: {problem}")

    def _clause_value(self, name: str, item: Given, word: str) -> Any:
        given = item.value if isinstance(item.value, list) else [item.value or ""]
        if word == "exists":
            try:
                return options.flag(given[0])
            except ValueError as error:
                self._add_problem(name, item, str(error))
                return True
        if word in ("min", "max"):
            return given[0]
        values = tuple([part.strip() for each in given for part in each.split(";")])
        return values[0] if len(values) == 1 else values

    def _params(self, name: str) -> dict[str, str]:
        return {
            option.removeprefix(options.PARAM): _shown(item.value) or ""
            for option, item in self.values[name].items()
            if option.startswith(options.PARAM)
        }

    def _driver(self, name: str, class_name: str | None) -> tuple[str | None, str | None]:
        """The driver's name in the registry, or the reason why there is none."""
        from outfitter_drivers import registry

        key = f"{options.PREFIX}{name}.driver-factory.class"
        if class_name is None:
            return None, f"no driver is configured: {key} is not given"
        item = self.values[name]["driver-factory.class"]
        try:
            return registry.find(class_name).name, None
        except registry.DriverLookupError as error:
            if registry.is_java_class_name(class_name):
                self._add_problem(
                    name,
                    item,
                    f"is a Java class, which Outfitter cannot run: {name} has no driver, its amount is still requested "
                    "from Kubernetes or YARN",
                    "port it to Python as an ExternalResourceDriverFactory and write its package.module:Factory here; "
                    f"known drivers are {', '.join(registry.known_names())}",
                    Severity.WARNING,
                )
                return None, f"no driver: {class_name} is a Java class; port it to Python ({key})"
            known = registry.known_names()
            near = nearest(class_name, known)
            if ":" in class_name or class_name in known:
                self._add_problem(name, item, str(error))
            else:
                valid = (
                    f"is no known driver; known are {', '.join(known)}, or a Python path such as package.module:Factory"
                )
                self._add_problem(name, item, valid, f"did you mean {near}?" if near else None)
            return None, None

    def refuse_shared_keys(self, configs: list[ResourceConfig]) -> list[ResourceConfig]:
        """Refuse two resources with the same key of Kubernetes or YARN: neither would surely get its amount."""
        for option, field in (("kubernetes.config-key", "kubernetes_key"), ("yarn.config-key", "yarn_key")):
            owners: dict[str, str] = {}
            for position, config in enumerate(configs):
                key = getattr(config, field)
                if key is None or config.amount == 0:
                    continue
                owner = owners.setdefault(key, config.name)
                if owner == config.name:
                    continue
                problem = f"is the key of {owner!r} too; every resource needs a key of its own"
                self._add_problem(config.name, self.values[config.name][option], problem)
                for index in {position, next(i for i, c in enumerate(configs) if c.name == owner)}:
                    configs[index] = _misconfigured(configs[index], f"{config.key(option)} {problem}")
        return configs

    def origins(self) -> dict[str, str]:
        """The origin of each value by its full key, also of defaults."""
        origins: dict[str, str] = {}
        for name, values in self.values.items():
            for option in dict.fromkeys([*_OPTIONS, *values]):
                origins[f"{options.PREFIX}{name}.{option}"] = values[option].place if option in values else "default"
        return origins


def _clause_key(rest: str) -> tuple[str, str]:
    """The property and the word of a clause's key."""
    property_name, _, word = rest.rpartition(".")
    return (property_name, word) if property_name and word in options.WORDS else (rest, "is")


_FIELDS = {"is": "is_", "not": "not_"}


def _misconfigured(config: ResourceConfig, reason: str) -> ResourceConfig:
    import msgspec

    reasons = [config.reason] if config.state is SpecState.MISCONFIGURED and config.reason else []
    return msgspec.structs.replace(config, state=SpecState.MISCONFIGURED, reason="; ".join([*reasons, reason]))


def _prefix(key: str) -> str:
    return next(prefix for prefix in (options.PREFIX, *options.OLD_PREFIXES) if key.startswith(prefix))


def _shown(value: Value) -> str | None:
    """A value as text. A list gets the form that drivers and `external-resources` read."""
    return ";".join(value) if isinstance(value, list) else value
