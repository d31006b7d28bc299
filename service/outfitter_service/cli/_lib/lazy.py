"""A click group that imports a command when it is used. It does not know what commands do."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_CHOSEN = "outfitter.entry"
_DEBUG = "outfitter.debug"


class CommandEntry(NamedTuple):
    """One command: its `module:attribute`, its line in the list, and the exit code of its failures."""

    target: str
    help: str
    failure: int = 1


class LazyGroup(click.Group):
    """Finds its commands in a table, adds `--debug` to each, and makes them accept only valid text."""

    def __init__(self, *args: Any, entries: Mapping[str, CommandEntry], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.entries = dict(entries)
        self.params.append(_debug_option())

    @staticmethod
    def chosen(context: click.Context | None) -> CommandEntry | None:
        """The entry of the running command, once it is known."""
        entry = context.meta.get(_CHOSEN) if context is not None else None
        return entry if isinstance(entry, CommandEntry) else None

    @staticmethod
    def debug(context: click.Context | None) -> bool:
        """Whether the group or the command has `--debug`."""
        return context is not None and bool(context.meta.get(_DEBUG))

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(self.entries)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = self.entries.get(cmd_name)
        if entry is None:
            return None
        ctx.meta[_CHOSEN] = entry
        module, attribute = entry.target.split(":")
        command = getattr(importlib.import_module(module), attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{entry.target} is no click command")
        _complete(command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's signature
        """List the commands from the table, so that help does not import all of them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.help) for name, entry in self.entries.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete from the table, so that a Tab does not import all commands."""
        from click.shell_completion import CompletionItem

        items = [
            CompletionItem(name, help=entry.help) for name, entry in self.entries.items() if name.startswith(incomplete)
        ]
        return items + click.Command.shell_complete(self, ctx, incomplete)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.entries and not args[0].startswith("-") and not ctx.resilient_parsing:
            # click's own search for a near name would import every command
            from difflib import get_close_matches

            near = get_close_matches(args[0], self.entries, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else f" Commands: {', '.join(self.entries)}."
            raise click.UsageError(f"No such command {args[0]!r}.{hint}", ctx)
        return super().resolve_command(ctx, args)


class _Text(click.types.StringParamType):
    """Text that can be encoded as UTF-8.

    Python decodes other bytes of a command line as lone surrogates. File names may have them (`click.Path`), but values
    on the bus may not.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        text = super().convert(value, param, ctx)
        try:
            text.encode()
        except UnicodeEncodeError:
            self.fail(f"{text[:80]!a} is not UTF-8", param, ctx)
        return text


TEXT = _Text()


def _debug_option() -> click.Option:
    def remember(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
        if value:
            ctx.meta[_DEBUG] = True

    return click.Option(
        ["--debug"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=remember,
        help="Show the traceback of an error.",
    )


def _complete(command: click.Command) -> None:
    for parameter in command.params:
        if parameter.type is click.STRING:
            parameter.type = TEXT
    if not any("--debug" in parameter.opts for parameter in command.params):
        command.params.append(_debug_option())
    if isinstance(command, click.Group):
        for child in command.commands.values():
            _complete(child)
