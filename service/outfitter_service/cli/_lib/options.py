"""The options that many commands share.

For values from `Settings`, pass `given(ctx)` to `config.load`. It has only the values from the command line, so that
those from the environment and the file keep their origin.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple, TypeVar, cast

import click

from outfitter_proto.names import InvalidNameError, check_name
from outfitter_proto.support.printable import printable
from outfitter_proto.support.units import parse_duration
from outfitter_service.cli._lib.lazy import TEXT

F = TypeVar("F", bound=Callable[..., Any])


def named(what: str) -> Callable[[click.Context, click.Parameter, str | None], str | None]:
    """A callback for options with a name that goes over the wire."""

    def check(_ctx: click.Context, _param: click.Parameter, value: str | None) -> str | None:
        if value is None:
            return None
        try:
            return check_name(value, what)
        except InvalidNameError as error:
            raise click.BadParameter(str(error)) from error

    return check


def _from_environment(name: str, metavar: str, about: str, **more: Any) -> Callable[[F], F]:
    """An option whose value may come from the environment."""
    return click.option(
        f"--{name}", metavar=metavar, envvar=f"OUTFITTER_{name.upper()}", show_envvar=True, help=about, **more
    )


bus = _from_environment("bus", "URL", "kafka://HOST:PORT[,HOST:PORT] or sqlite:///PATH.")
config = _from_environment(
    "config",
    "FILE",
    "The configuration file: TOML, or Flink's. Default: ./outfitter.toml, then /etc/outfitter/outfitter.toml.",
    type=click.Path(),
)
host = _from_environment(
    "host", "NAME", "The host's name on the bus. Default: the machine's hostname.", callback=named("host")
)
only_host = click.option(
    "--host", metavar="NAME", callback=named("host"),
    help="Only this host. Default: all hosts (OUTFITTER_HOST counts only for registrations).",
)  # fmt: skip
"""For commands that show data: only `--host` restricts them to a host."""
cluster = _from_environment(
    "cluster",
    "NAME",
    "The cluster, which is the prefix of its topics. Default: outfitter.",
    callback=named("cluster"),
)


def moment(_ctx: click.Context, _param: click.Parameter, value: str | None) -> datetime | None:
    """A callback for options with a time: RFC 3339 with a time zone, or a duration ago."""
    if value is None:
        return None
    try:
        return datetime.now(UTC) - timedelta(seconds=parse_duration(value))
    except (ValueError, OverflowError):
        pass
    return _rfc3339(value, "a duration ago, such as 10m")


def moment_ahead(_ctx: click.Context, _param: click.Parameter, value: str | None) -> datetime | None:
    """A callback for options with a time that is to come: RFC 3339 with a time zone, or a duration from now on."""
    if value is None:
        return None
    now = datetime.now(UTC)
    try:
        time = now + timedelta(seconds=parse_duration(value))
    except (ValueError, OverflowError):
        time = _rfc3339(value, "a duration from now on, such as 2h")
    if time <= now:
        raise click.BadParameter(f"{value!r} is not in the future: it is {now:%Y-%m-%dT%H:%M:%SZ} now, by this machine")
    return time


def _rfc3339(value: str, otherwise: str) -> datetime:
    """…in UTC. `otherwise`: what else may be written.

    Raises:
        BadParameter: it is none.
    """
    try:
        time = datetime.fromisoformat(value.strip())
    except ValueError:
        time = None
    if time is None or time.tzinfo is None:
        raise click.BadParameter(
            f"{value!r} is no time: write RFC 3339 with a time zone, such as 2026-01-31T12:00:00Z, or {otherwise}"
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


class WorkerNames(NamedTuple):
    """A worker as commands print it: perhaps with its host, and with the incarnation."""

    host: str | None
    worker: str
    incarnation: str | None

    def __str__(self) -> str:
        return "/".join(filter(None, self))

    def fits(self, host: str, worker: str, incarnation: str) -> bool:
        return self.worker == worker and self.host in {None, host} and self.incarnation in {None, incarnation}

    def fits_key(self, key: str) -> bool:
        """Whether a key of the ledger is an allocation of this worker."""
        from outfitter_proto.keys import allocation_names, is_allocation_key

        return is_allocation_key(key) and key.count("/") == 2 and self.fits(*allocation_names(key))


class _WorkerType(click.ParamType[WorkerNames]):
    name = "worker"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> WorkerNames:
        if isinstance(value, WorkerNames):
            return value
        parts = TEXT.convert(value, param, ctx).split("/")
        if len(parts) > 3 or not all(parts):
            self.fail(f"{printable(value[:300])!r} is no worker: write {WORKER_FORMS}", param, ctx)
        if len(parts) == 1:
            return WorkerNames(None, parts[0], None)
        return WorkerNames(parts[0], parts[1], parts[2] if len(parts) == 3 else None)


WORKER_FORMS = "WORKER, HOST/WORKER or HOST/WORKER/INCARNATION"
WORKER = _WorkerType()
"""A worker in any of `WORKER_FORMS`, as commands print it."""
one_worker = click.option("--worker", metavar="WORKER", type=WORKER, help=f"Only this worker: {WORKER_FORMS}.")


def _labels(_ctx: click.Context, _param: click.Parameter, value: Sequence[str]) -> tuple[tuple[str, str], ...]:
    from outfitter_service.query import labels

    try:
        return labels.wanted(TEXT.convert(text, _param, _ctx) for text in value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


only_labels = click.option(
    "--label", "labelled", metavar="NAME=VALUE", multiple=True, callback=_labels,
    help="Only workers with this label; repeatable, then with all of them.",
)  # fmt: skip

HEALTHS = ("healthy", "unhealthy", "unknown")


def only_devices(command: F) -> F:
    """Add `--resource`, `--model` and `--health`: parameters `resource`, `model`, `health`."""
    health = click.option("--health", type=click.Choice(HEALTHS), help="Only devices of this health.")
    model = click.option("--model", metavar="TEXT", help="Only devices whose model's name has this in it.")
    resource = click.option("--resource", metavar="NAME", help="Only this resource.")
    return resource(model(health(command)))


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


def _connecting(*added: Callable[[F], F], dropped: Sequence[str]) -> Callable[[F], F]:
    """A decorator that adds these options and passes the `Connection` by them as the first parameter. The command does
    not get the values of `config` and of `dropped`, because the connection may have them from other sources."""

    def decorate(command: F) -> F:
        for option in added:
            command = option(command)

        @click.pass_context
        @functools.wraps(command)
        def connected(ctx: click.Context, /, **values: Any) -> Any:
            from outfitter_service.config import connection

            where = connection(values.pop("config"), given(ctx))
            for name in dropped:
                del values[name]
            return command(where, **values)

        return cast("F", connected)

    return decorate


connected = _connecting(cluster, host, config, bus, dropped=SHARED)
"""Add `--bus`, `--config`, `--host` and `--cluster`, and pass the connection by them."""
of_cluster = _connecting(cluster, config, bus, dropped=("bus", "cluster"))
"""The same without `--host`."""
looking_on = _connecting(cluster, only_host, config, bus, dropped=("bus", "cluster"))
"""As `connected`, for a command that only shows data. Parameter `host` has the value of `--host`."""


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


def host_of(host: str | None, worker: WorkerNames | None) -> str | None:
    """The host that the command line names, by `--host` or as a part of `worker`; None: it names none."""
    if worker is None or worker.host is None:
        return host
    if host not in {None, worker.host}:
        raise click.UsageError(f"--host is {host}, but the worker is {worker}: leave one of the hosts out")
    return worker.host


def _file(flag: str, about: str, **more: Any) -> Callable[[F], F]:
    return click.option(flag, metavar="FILE", type=click.Path(), help=about, **more)


def certificate(*, required: bool = False) -> Callable[[F], F]:
    """Add `--cert-file` and `--key-file` of a listener: parameters `cert_file`, `key_file`."""

    def decorate(command: F) -> F:
        command = _file("--key-file", "The certificate's key, if it is in a file of its own (PEM).")(command)
        return _file("--cert-file", "The certificate for TLS, with its chain (PEM).", required=required)(command)

    return decorate


client_ca_file = _file(
    "--client-ca-file", "The authorities of the clients' certificates (PEM): no client gets in without one."
)
