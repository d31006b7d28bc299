"""`outfitter nvidia release`: run a command, such as a GPU's reset, while no manager has NVIDIA's GPUs open."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import NoReturn

import click

from outfitter_service.cli._lib import output, registration_options
from outfitter_service.cli._lib.errors import warn
from outfitter_service.cli._lib.running import executable
from outfitter_service.query.errors import OutfitterCliError

WITHIN_S = 15.0
"""Seconds in which managers let go. They answer a request for events for up to a second, and a look for longer."""
POLL_S = 0.2
LOOK_AGAIN_S = 1.0
"""Seconds after which managers that have started are looked for."""
MOST_NAMED = 10


@click.group()
def nvidia() -> None:
    """Work on NVIDIA's GPUs beside the managers."""


@nvidia.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--within",
    type=registration_options.Duration(),
    metavar="DURATION",
    default=WITHIN_S,
    show_default=True,
    help="How long the managers may take to let go.",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def release(within: float, command: tuple[str, ...]) -> NoReturn:
    """Run COMMAND while no manager of this machine has NVIDIA's GPUs open.

    For `nvidia-smi --gpu-reset`, for a change of MIG, to unload the driver; or for a shell (`outfitter nvidia release
    bash`). The GPUs are of unknown health meanwhile, so that nobody gets one. Who holds one keeps it: cordon the host
    first, and end its workers. When COMMAND ends, the managers look anew, whatever becomes of this command.

    The exit code is COMMAND's; 125 if Outfitter failed, 126 if COMMAND cannot be executed, 127 if it is not found.
    """
    from outfitter_drivers.nvidia.release import holders

    executable.check(command[0], os.environ)
    _let_go(within)
    others = [f"{holder.pid} ({holder.name})" for holder in holders()]
    if others:
        more = f" and {len(others) - MOST_NAMED} more" if len(others) > MOST_NAMED else ""
        warn(f"other processes have GPUs open: {', '.join(others[:MOST_NAMED])}{more}")
    raise SystemExit(_run(command))


def _let_go(within: float) -> None:
    """Have each manager let go.

    Raises:
        OutfitterCliError: one cannot be asked, or does not let go in time.
    """
    from outfitter_drivers.nvidia.release import nvml_processes

    end = time.monotonic() + within
    asked: set[int] = set()
    while open_now := nvml_processes():
        for pid in open_now:
            if pid not in asked:
                _ask(pid)
                asked.add(pid)
        if time.monotonic() > end:
            raise OutfitterCliError(
                f"process {open_now[0]} has not let go within {within:g} s; if it hangs in the kernel, a reboot helps"
            )
        time.sleep(POLL_S)
    output.say(f"managers that let go of their GPUs: {len(asked)}", err=True)


def _ask(pid: int) -> None:
    from outfitter_drivers.nvidia.release import RefusedError, ask

    try:
        ask(pid)
    except RefusedError as error:
        raise OutfitterCliError(str(error)) from error


def _run(command: tuple[str, ...]) -> int:
    """Run the command to its end, and ask each manager that starts meanwhile. If this process ended before, all others
    would look at GPUs at which the command still works. So a manager that cannot be asked is warned of once, and
    signals are the command's."""
    from outfitter_drivers.nvidia.release import nvml_processes

    process: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def hand_on(sent: int, _: object) -> None:
        if process is None:
            early.append(sent)
        else:
            process.send_signal(sent)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, hand_on)
    try:
        process = subprocess.Popen(command)
    except OSError as error:
        raise OutfitterCliError(f"{command[0]}: {error.strerror}", exit_code=126) from error
    for sent in early:
        process.send_signal(sent)
    refused: set[int] = set()
    while True:
        try:
            code = process.wait(timeout=LOOK_AGAIN_S)
            return code if code >= 0 else 128 - code
        except subprocess.TimeoutExpired:
            for pid in nvml_processes():
                if pid not in refused:
                    try:
                        _ask(pid)
                    except OutfitterCliError as error:
                        refused.add(pid)
                        warn(str(error))
        except KeyboardInterrupt:
            continue  # the terminal tells the command, too
