"""Turns exceptions into text on standard error and an exit code.

Of an exception of our own classes, of click or of the operating system we print only the message. Any other exception
is an internal error, and the text says so.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import click

from outfitter_proto.support import descriptors
from outfitter_proto.support.causes import causes
from outfitter_proto.support.printable import printable
from outfitter_service.cli._lib import process_limit
from outfitter_service.query.errors import OutfitterCliError

_USAGE = 2
WAITED_TOO_LONG = 124
"""The exit code of whoever waited for devices longer than it wanted, as timeout(1) has it."""
NOT_TAKEN = 75
"""The exit code where an order stands and no manager has taken it yet, as sysexits.h has EX_TEMPFAIL."""


def warn(message: str) -> None:
    """Print a warning on standard error."""
    print(f"outfitter: {printable(message)}", file=sys.stderr)


def print_error(error: BaseException, *, debug: bool) -> None:
    """Print the error on standard error: one line for each exception in a group."""
    if debug and not isinstance(error, click.UsageError):
        import traceback

        traceback.print_exception(error)
        return
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        click.echo(error.format_message(), err=True)  # the help itself
        return
    for leaf in leaves(error):
        first, *more = describe(leaf).split("\n")
        # further lines are indented, so that none looks like a message of its own
        click.echo("\n".join([f"outfitter: {printable(first)}", *(f"  {printable(line)}" for line in more)]), err=True)


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The causes of an error, each message once."""
    texts: set[str] = set()
    for leaf in causes(error):
        text = describe(leaf)
        if text not in texts:
            texts.add(text)
            yield leaf


def describe(error: BaseException) -> str:
    """One exception as text for people."""
    if isinstance(error, click.UsageError):
        command = f" (see `{error.ctx.command_path} --help`)" if error.ctx is not None else ""
        return error.format_message() + command
    if isinstance(error, click.ClickException):
        return error.format_message()
    if isinstance(error, OSError) and error.errno in descriptors.LACKING:
        return descriptors.explain(error.errno)
    if isinstance(error, OSError) and error.strerror:
        files = " -> ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
        return f"{files}: {error.strerror}" if files else error.strerror
    if _is_verdict(error):
        return str(error)
    if (code := descriptors.lack_behind(error)) is not None:
        return descriptors.explain(code)
    if process_limit.is_behind(error):
        return process_limit.explain()
    if isinstance(error, ModuleNotFoundError) and not _is_ours(error.name or ""):
        return (
            f"the module {error.name} is not installed: the extra `service` brings what commands need "
            "(service/install.md says how to install it)"
        )
    return f"internal error: {type(error).__name__}: {error} (a defect of Outfitter; --debug shows where it happened)"


def exit_code_of(error: BaseException, failure: int) -> int:
    """The exit code for `error` in a command with this one for failures."""
    from outfitter.errors import WaitedTooLongError

    for leaf in causes(error):
        if isinstance(leaf, WaitedTooLongError):
            return WAITED_TOO_LONG
        if isinstance(leaf, OutfitterCliError) and leaf.exit_code is not None:
            return leaf.exit_code
        if isinstance(leaf, click.UsageError) and failure == 1:
            return _USAGE
    return failure


def _is_verdict(error: BaseException) -> bool:
    return _is_ours(type(error).__module__) and bool(str(error))


def _is_ours(module: str) -> bool:
    ours = {"outfitter", "outfitter_proto", "outfitter_drivers", "outfitter_service", "outfitter_verify"}
    return module.partition(".")[0] in ours


def show_log_lines() -> None:
    """Print log lines of WARNING and above as `warn` does. aiokafka's lines about each attempt are left out, because
    the worker session logs an outage once, and commands say what failed. Commands that serve replace this."""
    import logging

    class ErrorLine(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return f"outfitter: {printable(record.getMessage())}"

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(ErrorLine())
    handler.addFilter(lambda record: record.name.partition(".")[0] != "aiokafka")
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
