"""What a pod asks for by its annotation, as requests to Kubernetes.

The text is a list as in `external-resources`, in which an item may have an amount of its own: `gpu`, or `gpu=2;fpga`.
Errors are those of `outfitter config check`: all at once, in the same words.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from msgspec import structs

from outfitter_service.config import ConfigProblem, ConfigurationError, ResourceConfig, options
from outfitter_service.config.names import NONE, resource_names
from outfitter_service.config.problems import nearest
from outfitter_service.requests.amounts import DriverOf, RequestError, kubernetes_amounts, no_driver

ANNOTATION = "outfitter.dev/resources"
MOST_CHARACTERS = 4096
"""Longest annotation: far more than there are kinds of devices in a cluster."""
MOST_PROBLEMS = 8
"""Most problems that one answer lists."""


class _Item(NamedTuple):
    """One item of the list. `amount`: as text; None: the configured one."""

    text: str
    name: str
    amount: str | None

    def problem(self, problem: str, suggestion: str | None = None) -> ConfigProblem:
        return _problem(problem, suggestion, key=self.name, found=self.amount)


class _WrongItemError(ValueError):
    """An item that cannot be requested."""

    def __init__(self, problem: str, suggestion: str | None = None) -> None:
        super().__init__(problem)
        self.suggestion = suggestion


def annotated_amounts(
    text: str, resources: Iterable[ResourceConfig], driver_of: DriverOf = no_driver
) -> dict[str, str]:
    """Extended resource name → quantity, for `resources.requests` and `resources.limits`. An amount of 0
    gives "0": the container must have none. `none` gives it for all resources that have a name in Kubernetes.

    Raises:
        ConfigurationError: the annotation is wrong. It has all problems, of which the first `MOST_PROBLEMS` are listed.
    """
    if text.strip() == NONE:
        return _nothing({config.name: config for config in resources}, driver_of)
    if not text.strip():
        raise ConfigurationError([_problem("is empty", "name resources, such as gpu or gpu=2;fpga, or write none")])
    if len(text) > MOST_CHARACTERS:
        raise ConfigurationError([_problem(f"has {len(text)} characters; at most {MOST_CHARACTERS} are read")])
    configured = {config.name: config for config in resources}
    items = [_item(part) for part in text.strip().removesuffix(";").split(";")]
    names, _ = resource_names([item.name for item in items])
    problems = [*_problems_of_list(items)]
    amounts: dict[str, str] = {}
    for item in items:
        try:
            if item.name in names:
                amounts |= _amounts_of(item, configured, driver_of)
        except _WrongItemError as error:
            problems.append(item.problem(str(error), error.suggestion))
    if problems:
        more = f"and {len(problems) - MOST_PROBLEMS} more problems" if len(problems) > MOST_PROBLEMS else None
        raise ConfigurationError([*problems[:MOST_PROBLEMS], *([_problem(more)] if more else [])])
    return amounts


def _nothing(configured: Mapping[str, ResourceConfig], driver_of: DriverOf) -> dict[str, str]:
    """An amount of 0 of each resource that can be requested."""
    amounts: dict[str, str] = {}
    for name in configured:
        with suppress(_WrongItemError):
            amounts |= _amounts_of(_Item(name, name, "0"), configured, driver_of)
    return amounts


def _item(text: str) -> _Item:
    name, equals, amount = text.partition("=")
    return _Item(text.strip(), name.strip(), amount.strip() if equals else None)


def _problem(problem: str, suggestion: str | None = None, *, key: str = "", found: str | None = None) -> ConfigProblem:
    return ConfigProblem(file=f"annotation {ANNOTATION}", key=key, problem=problem, suggestion=suggestion, found=found)


def _problems_of_list(items: Sequence[_Item]) -> Iterator[ConfigProblem]:
    """What is wrong with the list, whatever is configured."""
    names = [item.name for item in items]
    for error in resource_names(names)[1]:
        yield _problem(error.problem, error.suggestion, found=error.item)
    for name in dict.fromkeys(filter(None, names)):
        if names.count(name) > 1:
            yield _problem("is given twice", "keep one of them", key=name)


def _amounts_of(item: _Item, configured: Mapping[str, ResourceConfig], driver_of: DriverOf) -> dict[str, str]:
    """What one item asks for. An amount of 0 may be of a resource without a name in Kubernetes, and then gives nothing.

    Raises:
        _WrongItemError: the resource is not configured, or has no name in Kubernetes, or the amount is wrong.
    """
    config = configured.get(item.name)
    if config is None:
        near = nearest(item.name, configured)
        known = ", ".join(configured) or "none"
        raise _WrongItemError(
            f"is no configured resource; configured are {known}", f"did you mean {near}?" if near else None
        )
    if not config.in_effect:
        raise _WrongItemError(f"cannot be requested: {config.reason}")
    try:
        amount = config.amount if item.amount is None else options.amount(item.amount)
        requested = structs.replace(config, amount=amount or 1)
        amounts = kubernetes_amounts([requested], driver_of)
    except (ValueError, RequestError) as error:
        raise _WrongItemError(str(error)) from error
    if not amount:
        return dict.fromkeys(amounts, "0")
    if not amounts:
        default = options.DEFAULT_KEYS.get(item.name, ("",))[0]
        raise _WrongItemError(
            f"has no name in Kubernetes: {config.key('kubernetes.config-key')} is not given",
            f"for NVIDIA's devices it is {default}" if default else None,
        )
    return amounts
