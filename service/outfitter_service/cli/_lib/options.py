"""The options that many commands share.

For values from `Settings`, pass `given(ctx)` to `config.load`. It has only the values from the command line, so that
those from the environment and the file keep their origin.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import click

from outfitter_proto.names import InvalidNameError, check_name
from outfitter_proto.support.units import parse_duration

F = TypeVar("F", bound=Callable[..., Any])


def _named(what: str) -> Callable[[click.Context, click.Parameter, str | None], str | None]:
    def check(_ctx: click.Context, _param: click.Parameter, value: str | None) -> str | None:
        if value is None:
            return None
        try:
            return check_name(value, what)
        except InvalidNameError as error:
            raise click.BadParameter(str(error)) from error

    return check


bus = click.option(
    "--bus",
    metavar="URL",
    envvar="OUTFITTER_BUS",
    show_envvar=True,
    help="kafka://HOST:PORT[,HOST:PORT] or sqlite:///PATH.",
)
config = click.option(
    "--config",
    type=click.Path(),
    metavar="FILE",
    envvar="OUTFITTER_CONFIG",
    show_envvar=True,
    help="The configuration file: TOML, or Flink's. Default: ./outfitter.toml, then /etc/outfitter/outfitter.toml.",
)
host = click.option(
    "--host",
    metavar="NAME",
    envvar="OUTFITTER_HOST",
    show_envvar=True,
    callback=_named("host"),
    help="The host's name on the bus. Default: the machine's hostname.",
)
only_host = click.option(
    "--host", metavar="NAME", callback=_named("host"),
    help="Only this host. Default: all hosts (OUTFITTER_HOST counts only for registrations).",
)  # fmt: skip
"""For commands that show data: only `--host` restricts them to a host."""
cluster = click.option(
    "--cluster",
    metavar="NAME",
    envvar="OUTFITTER_CLUSTER",
    show_envvar=True,
    callback=_named("cluster"),
    help="The cluster, which is the prefix of its topics. Default: outfitter.",
)


def moment(_ctx: click.Context, _param: click.Parameter, value: str | None) -> datetime | None:
    """A callback for options with a time: RFC 3339 with a time zone, or a duration ago."""
    if value is None:
        return None
    try:
        return datetime.now(UTC) - timedelta(seconds=parse_duration(value))
    except (ValueError, OverflowError):
        pass
    try:
        time = datetime.fromisoformat(value.strip())
    except ValueError:
        time = None
    if time is None or time.tzinfo is None:
        raise click.BadParameter(
            f"{value!r} is no time: write RFC 3339 with a time zone, such as 2026-01-31T12:00:00Z, or a duration ago, "
            "such as 10m"
        )
    try:
        return time.astimezone(UTC)
    except OverflowError as error:
        raise click.BadParameter(f"{value!r} is before the year 1 or after the year 9999 in UTC") from error


since = click.option(
    "--since", metavar="TIME", callback=moment, help="Not before this time: 2026-01-31T12:00:00Z, or 10m (ago)."
)
until = click.option(
    "--until", metavar="TIME", callback=moment, help="Not after this time: 2026-01-31T12:00:00Z, or 10m (ago)."
)

COUNT = click.IntRange(1, 1_000_000_000)
"""A number of things to show."""


json_output = click.option("--json", "as_json", is_flag=True, help="Print one JSON document for programs.")
"""Adds `--json` as parameter `as_json`."""

json_lines = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs: one object per line.")
"""The same for output that is endless or too long for one document."""

SHARED = ("bus", "host", "cluster")


def connection(command: F) -> F:
    """Add `--bus`, `--config`, `--host` and `--cluster`: parameters `bus`, `config`, `host`, `cluster`."""
    for option in (cluster, host, config, bus):
        command = option(command)
    return command


def looking_on(command: F) -> F:
    """Add `--bus`, `--config`, `--host` and `--cluster`, as `connection` does, to a command that only shows data."""
    for option in (cluster, only_host, config, bus):
        command = option(command)
    return command


def given(ctx: click.Context, *more: str) -> dict[str, str]:
    """The command line's values of `bus`, `host`, `cluster` and `more`, by setting name.

    Parameter `lease_grace` is the setting `lease-grace`; a flag is `true` or `false`.
    """
    from click.core import ParameterSource

    values: dict[str, str] = {}
    for name in (*SHARED, *more):
        parameter = name.replace("-", "_")
        if ctx.params.get(parameter) is not None and ctx.get_parameter_source(parameter) is ParameterSource.COMMANDLINE:
            value = ctx.params[parameter]
            values[name] = str(value).lower() if isinstance(value, bool) else str(value)
    return values
