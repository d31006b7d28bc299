"""`--where` and `--same`: which devices a worker takes, in a form that no shell takes for something else.

    --where gpu:model=NVIDIA_H100,*H200*     is one of these; `*` and `?` as in patterns
    --where gpu:model~H100                   contains
    --where gpu:model!=*PCIe*  gpu:model!~PCIe
    --where gpu:memory.total_bytes=40Gi..    at least; ..80Gi at most; 40Gi..80Gi both
    --same gpu:nvlink.group

There is no `>=`, because a shell takes `>` for a redirection: it would leave the clause without a word.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from outfitter_proto.records import Condition, ResourceRequest

WHERE_FORM = "NAME:PROPERTY=VALUE"
SAME_FORM = "NAME:PROPERTY"
_WHERE = re.compile(r"(?P<name>[^:=!~<>]+):(?P<property>[^=!~<>]+)(?P<operator>!=|!~|=|~)(?P<value>.+)", re.DOTALL)
_VALID = (
    "write gpu:model=A100,H100, gpu:model~H100 (contains), gpu:model!=A100, gpu:memory.total_bytes=40Gi.. (at least), "
    "..80Gi (at most) or 40Gi..80Gi"
)


def chosen(
    requests: dict[str, ResourceRequest], where: Iterable[str], same: Iterable[str]
) -> dict[str, ResourceRequest]:
    """The requests with the clauses of the options.

    Raises:
        click.BadParameter: an option is not in its form, names a resource without an amount, or cannot be judged.
    """
    from msgspec import UNSET, structs

    conditions: dict[str, dict[str, Condition]] = {}
    for text in where:
        name, property_name, condition = _clause(text)
        of_resource = conditions.setdefault(name, {})
        of_resource[property_name] = _merged(of_resource.get(property_name), condition, text)
    common: dict[str, dict[str, None]] = {}
    for text in same:
        name, colon, properties = text.partition(":")
        if not colon or not name or not all(properties.split(",")):
            raise click.BadParameter(f"{text!r} is not {SAME_FORM}", param_hint="--same")
        common.setdefault(name, {}).update(dict.fromkeys(properties.split(",")))
    for option, names in (("--where", conditions), ("--same", common)):
        for name in names:
            if name not in requests:
                raise click.BadParameter(f"{name} needs its amount: --resource {name}=1", param_hint=option)
    return {
        name: _judged(
            structs.replace(
                request, where=conditions.get(name, UNSET), same=tuple(common[name]) if name in common else UNSET
            ),
            name,
        )
        for name, request in requests.items()
    }


def _judged(request: ResourceRequest, name: str) -> ResourceRequest:
    from outfitter_proto import clauses

    if (problem := clauses.problem(clauses.clauses_of(request.where, request.same))) is not None:
        raise click.BadParameter(f"{name}: {problem}", param_hint="--where")
    return request


def _clause(text: str) -> tuple[str, str, Condition]:
    """The resource, the property and what it must be."""
    from msgspec import UNSET

    from outfitter_proto.records import Condition

    match = _WHERE.fullmatch(text)
    if match is None:
        hint = "; the shell takes > and < for itself" if re.search("[<>]", text) or ":" in text else ""
        raise click.BadParameter(f"{text!r} is not {WHERE_FORM}: {_VALID}{hint}", param_hint="--where")
    name, property_name, operator, value = match.groups()
    least, dots, most = value.partition("..")
    if dots and operator == "=":
        if not least and not most:
            raise click.BadParameter(f"{text!r} has neither a minimum nor a maximum: {_VALID}", param_hint="--where")
        return name, property_name, Condition(min=least or UNSET, max=most or UNSET)
    if dots and operator == "!=":
        raise click.BadParameter(
            f"{text!r} excludes a range; say what is wanted instead, such as {name}:{property_name}=..{least or most}",
            param_hint="--where",
        )
    values = tuple(value.split(","))
    if operator.endswith("~"):
        values = tuple([f"*{each}*" for each in values])
    said = values[0] if len(values) == 1 else values
    return name, property_name, Condition(not_=said) if operator.startswith("!") else Condition(is_=said)


def _merged(before: Condition | None, after: Condition, text: str) -> Condition:
    """Two clauses about one property."""
    from msgspec import UNSET, structs

    said = {word: value for word, value in structs.asdict(after).items() if value is not UNSET}
    if before is None:
        return after
    for word in said:
        if getattr(before, word) is not UNSET:
            raise click.BadParameter(
                f"{text!r} is about what another --where has said; name several values with commas",
                param_hint="--where",
            )
    return structs.replace(before, **said)
