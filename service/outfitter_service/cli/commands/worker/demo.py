"""`outfitter demo`."""

from __future__ import annotations

import click


@click.command()
@click.option("--keep", is_flag=True, help="Keep the demonstration's files, and print their place.")
def demo(keep: bool) -> int:
    """Show Outfitter at work on this machine, in a few seconds: no broker, no GPU, nothing to install or clean up.

    A manager serves a host with two GPUs, which are files. Three workers want them, and one of them is killed with
    SIGKILL. The exit code is 0 if everything happened as shown.
    """
    from outfitter_service.runtime.liveness import descriptors

    descriptors.prepare()  # its processes inherit the limit

    from outfitter_service.cli._lib.demonstration import Demonstration, demo_folder

    with demo_folder(keep=keep) as folder:
        return Demonstration(folder).play()
