"""Shared by `register`, `run` and `hold`: the options of a registration, and the registration built from them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import click

from outfitter_proto.names import InvalidNameError, check_name
from outfitter_proto.support.units import LONGEST_S, format_duration, parse_duration
from outfitter_service.cli._lib import choices
from outfitter_service.cli._lib.options import F

if TYPE_CHECKING:
    from outfitter_proto.records import Owner, Register, Survivors

_AMOUNT = r"[0-9]{1,19}"


class Duration(click.ParamType[float | str]):
    """Seconds from `30s`, `5m` or a plain number, at most `LONGEST_S`. With `none` it also accepts the word none."""

    name = "duration"

    def __init__(self, *, none: bool = False) -> None:
        self._none = none

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float | str:
        if not isinstance(value, str):
            return float(value)
        if self._none and value == "none":
            return "none"
        try:
            seconds = parse_duration(value)
            if seconds > LONGEST_S:
                raise ValueError(f"{value!r} is longer than {format_duration(LONGEST_S)}")
        except ValueError as error:
            self.fail(f"{error}" + (", or none" if self._none else ""), param, ctx)
        return seconds


def request(*, wait: str) -> Callable[[F], F]:
    """Add the options of a registration, whose values `registration` takes, and `--wait` with the help text `wait`."""

    def decorate(command: F) -> F:
        wait_option = click.option("--wait", type=Duration(), metavar="DURATION", help=wait)
        for option in (wait_option, *reversed(_OPTIONS)):
            command = option(command)
        return command

    return decorate


_OPTIONS: tuple[Callable[[F], F], ...] = (
    click.option(
        "--worker", metavar="NAME", help="The worker's name [env: OUTFITTER_WORKER]. Default: a generated one."
    ),
    click.option(
        "--resource", "resources", metavar="NAME=AMOUNT", multiple=True,
        help="How many devices; repeatable. Default: the amounts in the manager's configuration.",
    ),
    click.option(
        "--where", "where", metavar=choices.WHERE_FORM, multiple=True,
        help="Which devices: gpu:model~H100 (contains), gpu:memory.total_bytes=40Gi.. (at least), gpu:model!=A100; "
        "repeatable. Default: those of the manager's configuration.",
    ),
    click.option(
        "--same", "same", metavar=choices.SAME_FORM, multiple=True,
        help="What all devices have in common, such as gpu:nvlink.group; repeatable.",
    ),
    click.option(
        "--operator", "operators", metavar="OPERATOR:NAME=AMOUNT", multiple=True,
        help="One operator's share of them; repeatable. Default: every operator sees all devices.",
    ),
    click.option(
        "--lease", metavar="DURATION", type=Duration(none=True),
        help="How long the worker may be silent: 30s, or none. Default: the manager's.",
    ),
    click.option("--priority", type=click.IntRange(-1_000_000, 1_000_000), default=0, help="Higher is served first."),
    click.option("--label", "labels", metavar="KEY=VALUE", multiple=True, help="A note for people; repeatable."),
)  # fmt: skip


def _allowed(_ctx: click.Context, _param: click.Parameter, values: Iterable[str]) -> frozenset[str]:
    from outfitter_proto import environment

    return _names(" ".join(values), "--allow-env") | _names(
        os.environ.get(environment.ALLOWING, ""), environment.ALLOWING
    )


def _names(text: str, place: str) -> frozenset[str]:
    from outfitter_proto import environment

    try:
        return environment.allowed_by(text)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint=place) from error


allow_env = click.option(
    "--allow-env", "allowed", metavar="NAME", multiple=True, callback=_allowed,
    help="A variable that devices may set here, besides those that are known to select devices and those of "
    "[env: OUTFITTER_ALLOW_ENV]; repeatable.",
)  # fmt: skip
"""For commands that pass a record's variables on. The value is a set of names."""


def registration(
    host: str,
    *,
    worker: str | None,
    resources: Iterable[str],
    where: Iterable[str] = (),
    same: Iterable[str] = (),
    operators: Iterable[str],
    lease: float | str | None,
    priority: int,
    labels: Iterable[str],
    owner: Owner | None = None,
    wait_s: float | None = None,
    incarnation: str | None = None,
    survivors: Survivors | None = None,
) -> Register:
    """The registration from the options. `incarnation` None: a new one. `survivors` None: they do not count.

    Raises:
        click.UsageError: every manager would refuse it.
    """
    from msgspec import UNSET

    from outfitter.session.identity import new_incarnation
    from outfitter_proto import codec
    from outfitter_proto.records import Register, ResourceRequest

    def requests(amounts: dict[str, int]) -> dict[str, ResourceRequest]:
        return {name: ResourceRequest(amount=amount) for name, amount in amounts.items()}

    wanted = choices.chosen(requests(_amounts(resources, "--resource")), where, same)
    shares = _shares(operators)
    message = Register(
        host=host,
        worker=worker_name(worker),
        incarnation=incarnation or new_incarnation(),
        resources=wanted or None,
        operators={operator: requests(share) for operator, share in shares.items()} if shares else None,
        owner=owner,
        lease_s=UNSET if lease is None else None if isinstance(lease, str) else lease,
        wait_s=wait_s,
        priority=priority,
        labels=dict(_pair(label, "--label", "KEY=VALUE") for label in labels),
        survivors=survivors or UNSET,
    )
    try:
        codec.decode_registration(codec.encode(message))
    except codec.WireError as error:
        raise click.UsageError(f"no manager would accept this {error}") from error
    return message


def worker_name(option: str | None) -> str:
    """The worker's name: from the option, else from the environment, else generated.

    Under `outfitter run` the environment names the running worker, so a second worker gets a generated name.
    """
    from outfitter.session.identity import new_worker_name

    name = option or ("" if os.environ.get("OUTFITTER_INCARNATION") else os.environ.get("OUTFITTER_WORKER"))
    return _checked(name, "worker", "--worker") if name else new_worker_name()


def _shares(texts: Iterable[str]) -> dict[str, dict[str, int]]:
    shares: dict[str, list[str]] = {}
    for text in texts:
        operator, colon, amounts = text.partition(":")
        if not colon:
            raise click.BadParameter(f"{text!r} is not OPERATOR:NAME=AMOUNT", param_hint="--operator")
        shares.setdefault(_checked(operator, "operator", "--operator"), []).append(amounts)
    return {operator: _amounts(amounts, "--operator") for operator, amounts in shares.items()}


def _amounts(texts: Iterable[str], option: str) -> dict[str, int]:
    amounts: dict[str, int] = {}
    for text in texts:
        name, amount = _pair(text, option, "NAME=AMOUNT")
        _checked(name, "resource", option)
        if name in amounts:
            raise click.BadParameter(f"{name} is given twice", param_hint=option)
        if not re.fullmatch(_AMOUNT, amount) or int(amount) < 1:
            raise click.BadParameter(
                f"{amount!r} is no amount of {name}: write a whole number, 1 or more", param_hint=option
            )
        amounts[name] = int(amount)
    return amounts


def _pair(text: str, option: str, form: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise click.BadParameter(f"{text!r} is not {form}", param_hint=option)
    return name, value


def _checked(name: str, what: str, option: str) -> str:
    try:
        return check_name(name, what)
    except InvalidNameError as error:
        raise click.BadParameter(str(error), param_hint=option) from error
