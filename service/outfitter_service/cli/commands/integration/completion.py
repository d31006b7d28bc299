"""`outfitter completion`: the script by which a shell completes these commands. Click does the completing."""

from __future__ import annotations

import click

from outfitter_service.cli._lib import output
from outfitter_service.query.errors import OutfitterCliError

VARIABLE = "_OUTFITTER_COMPLETE"
"""The variable by which a shell's function asks, at each Tab, for completions."""


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, /, shell: str) -> None:
    """Print the completion script for a SHELL, which reads it when it starts.

    \b
    bash, in ~/.bashrc:                     eval "$(outfitter completion bash)"
    zsh, in ~/.zshrc, behind compinit:      eval "$(outfitter completion zsh)"
    fish:  outfitter completion fish > ~/.config/fish/completions/outfitter.fish
    """
    from click.shell_completion import get_completion_class

    completion_class = get_completion_class(shell)
    if completion_class is None:
        raise OutfitterCliError(f"this version of click cannot complete for {shell}")
    output.document(completion_class(ctx.find_root().command, {}, "outfitter", VARIABLE).source())


def complete(group: click.Group, instruction: str) -> int:
    """Answer a shell's request. `instruction` is the variable's value. Returns the exit code."""
    from click.shell_completion import shell_complete

    return shell_complete(group, {}, "outfitter", VARIABLE, instruction)
