"""`outfitter completion`: what a shell needs to complete these commands. The completing is click's."""

from __future__ import annotations

import click

from outfitter_service.cli._lib import output
from outfitter_service.query.errors import OutfitterCliError

VARIABLE = "_OUTFITTER_COMPLETE"
"""With it a shell's function asks, at each Tab, what may come next."""


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, /, shell: str) -> None:
    """Print the completion for a SHELL, which reads it when it starts.

    \b
    bash, in ~/.bashrc:                     eval "$(outfitter completion bash)"
    zsh, in ~/.zshrc, behind compinit:      eval "$(outfitter completion zsh)"
    fish:  outfitter completion fish > ~/.config/fish/completions/outfitter.fish
    """
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    if found is None:
        raise OutfitterCliError(f"this version of click cannot complete for {shell}")
    output.document(found(ctx.find_root().command, {}, "outfitter", VARIABLE).source())


def complete(group: click.Group, instruction: str) -> int:
    """Answer a shell's question, as `instruction` (the variable's value) has it; the exit code."""
    from click.shell_completion import shell_complete

    return shell_complete(group, {}, "outfitter", VARIABLE, instruction)
