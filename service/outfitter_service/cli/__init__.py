"""The command line, the only code of the service that prints. This module imports little.

Starting must be cheap, because `outfitter run` runs for every worker. So the commands are a table of names, imported on
use. All errors of commands end here, as a line on standard error and an exit code, with a traceback only for
`--debug`. Commands return their exit code, or None for 0.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from outfitter_service.cli._lib import missing_extra

if lacking := missing_extra.missing():
    missing_extra.hand_over(lacking)

import click

from outfitter_proto import __version__
from outfitter_service import standard_error
from outfitter_service.cli._lib import standard_output, standard_streams
from outfitter_service.cli._lib.errors import exit_code_of, print_error, show_log_lines
from outfitter_service.cli._lib.lazy import CommandEntry, LazyGroup
from outfitter_service.query.errors import OutfitterCliError

_COLLECT_EVERY = 10_000
"""Objects between two garbage collections. With Python's default of 700 they take a tenth of the start, for nothing."""

RUN_FAILED = 125
"""`outfitter run` returns its command's exit code, so its own failures have a code that commands avoid."""

HOLD_FAILED = 125
"""`outfitter hold` has the codes of `outfitter run`, because the same programs read both."""

VERIFY_FAILED = 125
"""`outfitter verify` returns 1 for violations, so its own failures have another code."""


def _entry(module: str, about: str, *, failure: int = 1) -> CommandEntry:
    """The command of a module in `commands`, which has the module's name."""
    return CommandEntry(f"outfitter_service.cli.commands.{module}:{module.partition('.')[2]}", about, failure)


COMMANDS = {
    "serve": _entry("manager.serve", "Manage this machine's resources (runs in the foreground)."),
    "run": _entry("worker.run", "Run a command that holds devices while it lives.", failure=RUN_FAILED),
    "hold": _entry("worker.hold", "Hold devices for another process and print them as JSON.", failure=HOLD_FAILED),
    "demo": _entry("worker.demo", "Show registrations, allocations and a queue at work, in a few seconds."),
    "register": _entry("worker.register", "Ask for devices on behalf of a worker."),
    "deregister": _entry("worker.deregister", "Give back what a worker holds."),
    "top": _entry("view.top", "Show the whole fleet in the terminal, live: what needs a person first."),
    "watch": _entry("view.watch", "Follow allocations as they change."),
    "status": _entry("view.status", "List the workers and what they hold or wait for."),
    "devices": _entry("view.devices", "List the devices, their health, and who holds them."),
    "explain": _entry("view.explain", "Explain what a worker holds, or why it waits."),
    "history": _entry("view.history", "List what happened to workers and devices."),
    "replay": _entry("view.replay", "Show the workers as they were at a moment in the past."),
    "dead-letters": _entry("view.dead_letters", "Show the messages that managers refused, and why."),
    "api": _entry("view.api", "Serve a read API for the whole cluster (runs in the foreground)."),
    "cordon": _entry("operator.cordon", "Take devices of a host out: nobody gets them any more."),
    "uncordon": _entry("operator.uncordon", "End orders that take devices out."),
    "orders": _entry("operator.orders", "List the orders that take devices out, and whether they are in effect."),
    "nvidia": _entry("manager.nvidia", "Work on NVIDIA's GPUs beside the managers.", failure=RUN_FAILED),
    "ledger": _entry("manager.ledger", "Repair the ledger by hand."),
    "backup": _entry("manager.backup", "Copy the ledger into a file."),
    "restore": _entry("manager.restore", "Write a backup into a new, empty ledger."),
    "discover": _entry("manager.discover", "Run one resource's driver once and print its infos."),
    "topics": _entry("manager.topics", "Create or check the topics."),
    "verify": _entry("manager.verify", "Check all committed records against the promises.", failure=VERIFY_FAILED),
    "doctor": _entry("manager.doctor", "Check this machine, and say what to put right."),
    "config": _entry("manager.config", "Check a configuration, or show what is in effect."),
    "schema": _entry("integration.schema", "Print the wire contract as AsyncAPI or JSON Schema."),
    "completion": _entry("integration.completion", "Print the completion script for a shell."),
    "kubernetes": _entry("integration.kubernetes", "Request the configured amounts in a pod template."),
    "webhook": _entry("integration.webhook", "Set the fields of pods that ask by annotation (runs in the foreground)."),
    "yarn": _entry("integration.yarn", "Request the configured amounts from YARN."),
}


@click.group(
    cls=LazyGroup, entries=COMMANDS, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(__version__, message="%(prog)s %(version)s")
def outfitter() -> None:
    """Lease GPUs and other external resources to stream workers over a message bus."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: the entry point of the `outfitter` script."""
    standard_streams.open_closed()
    standard_error.install(closed=standard_streams.was_closed(standard_error.DESCRIPTOR))
    standard_output.install(closed=standard_streams.was_closed(standard_streams.STDOUT))
    gc.set_threshold(_COLLECT_EVERY)
    _accept_any_text()
    show_log_lines()
    code = _flush(_guarded(list(sys.argv[1:] if arguments is None else arguments)))
    standard_error.finish()
    sys.exit(code)


def _guarded(arguments: list[str]) -> int:
    context: click.Context | None = None
    try:
        if (instruction := os.environ.get("_OUTFITTER_COMPLETE")) is not None:
            from outfitter_service.cli.commands.integration.completion import complete

            return complete(outfitter, instruction)
        context = outfitter.make_context("outfitter", arguments)
        with context:
            result = outfitter.invoke(context)
    except click.exceptions.Exit as ended:
        return ended.exit_code
    except (KeyboardInterrupt, click.Abort):
        return 128 + 2
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - any error ends as text and an exit code
        if isinstance(standard_output.error(), BrokenPipeError):
            return standard_output.CLOSED_PIPE
        entry = LazyGroup.chosen(context)
        print_error(error, debug=LazyGroup.debug(context))
        return exit_code_of(error, entry.failure if entry is not None else 1)
    return result if isinstance(result, int) else 0


def _accept_any_text() -> None:
    """Prevent a UnicodeEncodeError for any locale or file name."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def _flush(code: int) -> int:
    """Flush the output while an error of it can still be reported. No error of it ends with the code 0."""
    told = standard_output.error()
    try:
        sys.stdout.flush()
    except (OSError, OutfitterCliError) as error:
        if not isinstance(error, BrokenPipeError):
            print_error(error, debug=False)
        told = error
    if isinstance(told, BrokenPipeError):
        return standard_output.CLOSED_PIPE
    return code or (1 if told is not None else 0)
