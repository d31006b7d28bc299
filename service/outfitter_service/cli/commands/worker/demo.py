"""`outfitter demo`."""

from __future__ import annotations

import click


@click.command()
@click.option("--keep", is_flag=True, help="Leave the demonstration's files behind, and say where.")
def demo(keep: bool) -> int:
    """See it work on this machine, in a few seconds: no broker, no GPU, nothing to install or to clean up.

    A manager serves a host of its own with two GPUs that are files. Three workers want them, one of which is killed
    with SIGKILL. The exit code is 0 if all that was shown truly happened.
    """
    from outfitter_service.cli._lib.demonstration import Demonstration, stage

    with stage(keep=keep) as place:
        return Demonstration(place).play()
