"""`outfitter config check` and `outfitter config show`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click
from msgspec import structs

from outfitter_proto.clauses import Clauses, in_words
from outfitter_service.cli._lib import output
from outfitter_service.cli._lib.options import config as config_option
from outfitter_service.cli._lib.options import json_output
from outfitter_service.config import ConfigProblem, ConfigurationError, ResourceConfig, Settings, Severity, inspect
from outfitter_service.config.options import LIST_KEY
from outfitter_service.config.problems import masked
from outfitter_service.core.model import SpecState


@click.group()
def config() -> None:
    """Check a configuration, or show what is in effect."""


@config.command()
@click.argument("file", type=click.Path(), required=False)
@config_option
@json_output
def check(file: str | None, config: str | None, as_json: bool) -> int:
    """Report all errors in FILE: exit code 1 if there are any.

    Without FILE it checks the file that a manager would read. Drivers that list devices list them once. Warnings and
    information leave the exit code at 0.
    """
    from outfitter_service.cli._lib.device_lists import name_problems
    from outfitter_service.cli._lib.driver_check import driver_problems
    from outfitter_service.cli._lib.driver_remarks import remark_problems

    inspection = inspect(file or config)
    of_drivers = [*driver_problems(inspection), *remark_problems(inspection), *name_problems(inspection)]
    problems = [*inspection.problems, *of_drivers]
    if inspection.settings is not None and not any(problem.key == LIST_KEY for problem in problems):
        problems += _nothing(inspection.settings)
    serious = [problem for problem in problems if problem.severity is not Severity.INFO]
    ok = not any(problem.severity is Severity.ERROR for problem in problems)
    if as_json:
        output.print_json({"ok": ok, "problems": [_as_json(problem) for problem in serious]})
    for problem in problems:
        if problem.severity is Severity.INFO or not as_json:
            output.say(str(problem), err=problem.severity is Severity.INFO)
    if not as_json and not serious:
        output.say("ok")
    return 0 if ok else 1


def _nothing(settings: Settings) -> Iterator[ConfigProblem]:
    """The problem that no resource is configured, if so."""
    if not settings.resources:
        yield ConfigProblem(
            file=str(settings.file or ""),
            key=LIST_KEY,
            problem="lists no resource, so a manager would serve none",
            suggestion='write external-resources = ["gpu"], and an amount and a driver for it',
            severity=Severity.WARNING,
        )


def _as_json(problem: ConfigProblem) -> dict[str, str | None]:
    return {
        "key": problem.key or None,
        "found": problem.found,
        "problem": problem.problem,
        "suggestion": problem.suggestion,
        "severity": str(problem.severity),
        "file": problem.file or None,
    }


@config.command()
@click.argument("file", type=click.Path(), required=False)
@config_option
@click.option("--set", "pairs", metavar="KEY=VALUE", multiple=True, help="A value, as with an option of `serve`.")
@json_output
def show(file: str | None, config: str | None, pairs: tuple[str, ...], as_json: bool) -> None:
    """Print each value in effect with FILE, and its origin.

    Without FILE it shows the file that a manager would read. Secrets are masked. Resources that are switched off or
    misconfigured are marked.
    """
    from outfitter_service.cli._lib.driver_check import driver_problems

    inspection = inspect(file or config, dict(_pair(pair) for pair in pairs))
    if inspection.settings is None:
        raise ConfigurationError(inspection.errors)
    refused = list(driver_problems(inspection))
    for problem in (*inspection.problems, *refused):
        if problem.severity is not Severity.INFO:
            output.say(str(problem), err=True)
    settings = _without(inspection.settings, refused)
    if as_json:
        output.print_json(_shown(settings))
    else:
        output.print_table(["key", "value", "origin"], _rows(settings))


def _without(settings: Settings, refused: list[ConfigProblem]) -> Settings:
    """The settings as in a manager, where resources whose drivers cannot be built are misconfigured."""
    errors = {problem.resource: problem for problem in reversed(refused) if problem.severity is Severity.ERROR}
    resources = [
        structs.replace(item, state=SpecState.MISCONFIGURED, reason=f"{error.key}: {error.problem}")
        if (error := errors.get(item.name)) is not None
        else item
        for item in settings.resources
    ]
    return structs.replace(settings, resources=tuple(resources))


def _pair(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator or not key.strip():
        raise click.BadParameter(f"{text!r} is not KEY=VALUE", param_hint="--set")
    return key.strip(), value


def mask(key: str, value: Any) -> Any:
    """The value with secrets replaced; see `masked`."""
    return masked(key, value) if isinstance(value, str) else value


def _shown(settings: Settings) -> dict[str, Any]:
    return {
        "resources": {item.name: _resource(item) for item in settings.resources if item.in_effect},
        "not_in_effect": {
            item.name: {"state": str(item.state), "reason": item.reason}
            for item in settings.resources
            if not item.in_effect
        },
        "settings": {
            name: {"value": mask(name, value), "origin": settings.origins[name]} for name, value in _values(settings)
        },
        "file": str(settings.file) if settings.file else None,
        "origins": {key: origin for key, origin in settings.origins.items() if key.startswith("external-resource")},
    }


def _resource(item: ResourceConfig) -> dict[str, Any]:
    return {
        "amount": item.amount,
        "driver": item.driver,
        "params": {key: mask(key, value) for key, value in item.params.items()},
        "kubernetes_key": item.kubernetes_key,
        "yarn_key": item.yarn_key,
        "sharing": item.sharing,
        "replicas": item.replicas,
        "replicas_same_device": item.replicas_same_device,
        "on_failure": str(item.on_failure),
        "driver_timeout": item.timeout,
        "min_healthy_time": item.min_healthy,
        "state": str(item.state),
        **({"where": dict(item.clauses.where), "same": list(item.clauses.same)} if item.clauses else {}),
    }


def _values(settings: Settings) -> list[tuple[str, Any]]:
    from outfitter_proto.bus.schemes import is_local
    from outfitter_service.config.options import KAFKA, SETTINGS

    values = [(option.name, getattr(settings, option.field)) for option in SETTINGS]
    of_brokers = not is_local(settings.bus)
    return [(name, value) for name, value in values if of_brokers or value is not None or not name.startswith(KAFKA)]


def _rows(settings: Settings) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = [
        (name, _text(mask(name, value)) or "none", settings.origins[name]) for name, value in _values(settings)
    ]
    names = ";".join(item.name for item in settings.resources) or "none"
    rows.append(("external-resources", names, settings.origins["external-resources"]))
    for item in settings.resources:
        if not item.in_effect:
            rows.append((f"external-resource.{item.name}", f"{item.state}: {item.reason}", ""))
            continue
        values = {
            "amount": item.amount,
            "driver-factory.class": item.driver,
            "kubernetes.config-key": item.kubernetes_key,
            "yarn.config-key": item.yarn_key,
            "sharing": item.sharing,
            "replicas": item.replicas,
            "replicas-same-device": item.replicas_same_device,
            "on-failure": item.on_failure,
            "driver-timeout": item.timeout,
            "min-healthy-time": item.min_healthy,
            "same": ";".join(item.clauses.same) or None,
            **{f"param.{key}": mask(key, value) for key, value in item.params.items()},
        }
        rows += [
            (item.key(option), _text(value), settings.origins[item.key(option)]) for option, value in values.items()
        ]
        rows += [
            (key := item.key(f"where.{name}"), in_words(Clauses(where=((name, condition),))), _origin(settings, key))
            for name, condition in item.clauses.where
        ]
    return rows


def _origin(settings: Settings, key: str) -> str:
    """The origin of the first key of a clause."""
    return next(origin for given, origin in settings.origins.items() if given == key or given.startswith(f"{key}."))


def _text(value: Any) -> str | None:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        from outfitter_proto.support.units import format_duration

        return format_duration(value)
    return None if value is None else str(value)
