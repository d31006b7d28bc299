"""The program `outfitter-lease`: a discovery script that leases, for Flink's own GPU plugin and for Spark.

The caller is a Java process that starts this program, reads one line, and takes what the line names for its own. Flink
kills a discovery script after 10 s, so everything here has an end before that.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import click

from outfitter_proto.support.printable import printable
from outfitter_service import standard_error
from outfitter_service.cli._lib import options, registration_options, standard_output, standard_streams
from outfitter_service.cli._lib.standard_streams import STDERR, STDOUT
from outfitter_service.query.errors import OutfitterCliError

if TYPE_CHECKING:
    from outfitter_drivers.api import ExternalResourceInfo
    from outfitter_service.cli._lib.holding.owner import OwnerProcess

PROGRAM = "outfitter-lease"
WAIT = "8s"
"""Below the 10 s after which Flink kills a discovery script."""

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""The signals that end it; what it has asked for is given back."""

_SHELLS = frozenset({"sh", "bash", "dash", "ash", "busybox", "zsh", "ksh", "mksh", "fish", "csh", "tcsh"})
_FLINKS_NOTHING = "null"
"""Flink appends this word when no arguments are configured."""


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.argument("amount", type=click.IntRange(1, 2**31), envvar="OUTFITTER_LEASE_AMOUNT", default=1)
@click.argument("ignored", nargs=-1, metavar=f"[{_FLINKS_NOTHING}]")
@options.connection
@click.option(
    "--resource",
    metavar="NAME",
    default="gpu",
    show_default=True,
    callback=options.named("resource"),
    envvar="OUTFITTER_LEASE_RESOURCE",
    show_envvar=True,
    help="The external resource.",
)
@click.option(
    "--property",
    "key",
    metavar="KEY",
    default="index",
    show_default=True,
    envvar="OUTFITTER_LEASE_PROPERTY",
    show_envvar=True,
    help="The property of each device to print.",
)
@click.option(
    "--wait",
    type=registration_options.Duration(),
    metavar="DURATION",
    default=WAIT,
    show_default=True,
    envvar="OUTFITTER_LEASE_WAIT",
    show_envvar=True,
    help="Give up so long after the start of this program.",
)
@click.option(
    "--owner-pid",
    type=click.IntRange(1, 2**31 - 1),
    metavar="PID",
    help="The process that keeps the devices while it lives. Default: the caller, if that is no shell.",
)
@click.option("--debug", is_flag=True, expose_value=False, help="Show where an error happened.")
@click.option("--spark", is_flag=True, help="Print Spark's JSON instead of Flink's line.")
@click.pass_context
def lease(
    ctx: click.Context,
    /,
    amount: int,
    ignored: tuple[str, ...],
    config: str | None,
    resource: str,
    key: str,
    wait: float,
    owner_pid: int | None,
    spark: bool,
    bus: str | None,
    host: str | None,
    cluster: str | None,
) -> int:
    """Lease AMOUNT devices for the calling process and print them, as a discovery script does.

    The caller keeps the devices until it ends; nobody sends heartbeats for it. So the manager must watch the caller:
    if it is on another machine or in another PID namespace, nothing is leased.

    The exit code is 0, or 1 with the reason on standard error, or 2 for a wrong command line.
    """  # fmt: skip
    del bus, host, cluster  # `connection` has read them, also from other sources
    if standard_streams.was_closed(STDOUT):
        raise OutfitterCliError("standard output is closed: there is nowhere to print the devices")
    if ignored not in ((), (_FLINKS_NOTHING,)):
        raise click.UsageError(f"unexpected argument {' '.join(ignored)!r}", ctx)
    import anyio

    from outfitter_service.cli._lib.holding.leasing import LeaseRequest, Leasing, seconds_running
    from outfitter_service.cli._lib.running.signals import SignalFile
    from outfitter_service.config import connection

    where = connection(config, options.given(ctx))
    request = LeaseRequest(where, _owner(owner_pid), resource, amount, wait)

    def deliver(devices: list[ExternalResourceInfo]) -> None:
        values = [_value(device, key) for device in devices]
        _write(_spark_line(resource, values) if spark else _flink_line(values))

    with SignalFile(ENDING) as signals:
        _end_after(wait - seconds_running(), wait, request.owner.pid)
        return anyio.run(Leasing(request, deliver).run, signals)


def _owner(pid: int | None) -> OwnerProcess:
    """The process with this pid; None: the caller, unless it is a shell, which may end long before its caller."""
    from outfitter_service.cli._lib.holding import owner

    process = owner.chosen(pid)
    if pid is None and (shell := process.program) in _SHELLS:
        raise OutfitterCliError(
            f"called by {shell} (process {process.pid}), whose end would give the devices back: "
            "write `exec` before the command, or name the process that keeps them with --owner-pid"
        )
    return process


def _value(device: ExternalResourceInfo, key: str) -> str:
    value = device.get_property(key)
    if value is None:
        known = ", ".join(sorted(device.get_keys()))
        raise OutfitterCliError(f"device {device.get_property('id')} has no property {key!r}; it has: {known}")
    return value


def _flink_line(values: list[str]) -> str:
    for value in values:
        if not value.isprintable() or "," in value or value != value.strip() or not value:
            raise OutfitterCliError(f"{value!r} cannot stand in a line that Flink splits on commas")
    return ",".join(values)


def _spark_line(resource: str, values: list[str]) -> str:
    import msgspec

    return msgspec.json.encode({"name": resource, "addresses": values}).decode()


def _write(line: str) -> None:
    data = f"{line}\n".encode()
    if standard_error.write_all(STDOUT, data) < len(data):
        raise OutfitterCliError("standard output takes no more, so nobody knows the devices: they are given back")


def _end_after(seconds: float, wait: float, owner_pid: int) -> None:
    """End this process then, whatever hangs. The manager withdraws a registration that is not granted by then."""

    def end() -> None:
        _say(
            f"not done after {wait:g} s: the bus does not answer, the machine is too busy, or nobody reads standard "
            f"output; process {owner_pid} keeps what was granted until it ends"
        )
        os._exit(1)

    timer = threading.Timer(max(seconds, 0.0), end)
    timer.daemon = True
    timer.start()


def _say(text: str) -> None:
    standard_error.write_if_taken(f"{PROGRAM}: {printable(text)}\n")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the program: the entry point of `outfitter-lease`."""
    from outfitter_service.cli._lib.errors import describe, leaves

    standard_streams.open_closed()
    standard_error.install(closed=standard_streams.was_closed(STDERR))
    standard_output.install(closed=standard_streams.was_closed(STDOUT))
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = lease.main(words, PROGRAM, standalone_mode=False)
    except click.exceptions.Exit as ended:
        code = ended.exit_code
    except Exception as error:  # noqa: BLE001 - any error ends as one line and an exit code
        if "--debug" in words:
            traceback.print_exception(error)
        code = 2 if isinstance(error, click.UsageError) else 1
        _say("; ".join(describe(leaf).replace("\n", " ") for leaf in leaves(error)))
    sys.stdout.flush()
    os._exit(code or 0)  # an interpreter's shutdown takes as long as its start


def spark() -> NoReturn:
    """The same with `--spark`, because Spark passes no arguments: the entry point of `outfitter-lease-spark`."""
    main(["--spark", *sys.argv[1:]])
