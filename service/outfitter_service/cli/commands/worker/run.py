"""`outfitter run`: a command that holds devices while it lives."""

from __future__ import annotations

import os
import signal
from typing import Any, NoReturn

import click

from outfitter_service.cli._lib import options, registration_options
from outfitter_service.cli._lib.running import executable

KILL_AFTER = 10.0
"""Seconds between SIGTERM and SIGKILL for the command, when its devices are lost."""
SHORTEST_S = 0.001
"""The shortest time between SIGTERM and SIGKILL that a registration can have, in seconds."""
DESCRIPTORS = 24
"""File descriptors that must be free: for the event loop, the bus and the command."""


@click.command(context_settings={"allow_interspersed_args": False})
@options.connection
@registration_options.request(wait="Give up after this time (exit code 124).")
@click.option("--wait-for-manager", is_flag=True, help="Wait until there is a manager, however long.")
@click.option(
    "--kill-after",
    type=registration_options.Duration(),
    metavar="DURATION",
    default=KILL_AFTER,
    show_default=True,
    help="When something is ended: time between SIGTERM and SIGKILL.",
)
@click.option("--kill-survivors", is_flag=True, help="End the processes that COMMAND leaves behind.")
@registration_options.allow_env
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def run(
    ctx: click.Context,
    /,
    config: str | None,
    wait: float | None,
    wait_for_manager: bool,
    kill_after: float,
    kill_survivors: bool,
    allowed: frozenset[str],
    command: tuple[str, ...],
    bus: str | None,
    host: str | None,
    cluster: str | None,
    **request: Any,
) -> NoReturn:
    """Wait for devices, run COMMAND with them, and give them back when it ends.

    Drivers set variables with COMMAND's devices (CUDA_VISIBLE_DEVICES …), and a RuntimeContext() in it attaches to the
    allocation. Signals are passed on. Ctrl-C while waiting withdraws the registration.

    The exit code is COMMAND's; 125 if Outfitter failed, 126 if COMMAND cannot be executed, 127 if it is not found, 124
    if it waited longer than --wait. It dies of the signal that ended COMMAND or the waiting.

    COMMAND inherits all open files. A standard stream that is closed is /dev/null for it.

    Processes that COMMAND leaves behind keep the devices: `outfitter run` ends only after they have ended. It says for
    whom it waits; Ctrl-C or SIGTERM then ends them, and --kill-survivors does so at once.

    COMMAND dies with `outfitter run`, whatever kills it, unless it has changed its user. If processes of COMMAND
    survive that, the manager keeps their devices until they have ended, or ends them (--kill-survivors), where it can
    see them. If the allocation is lost while COMMAND runs (somebody deregistered it, or its lease is about to end and
    no manager on this machine watches the process), it and its descendants get SIGTERM, and SIGKILL after --kill-after,
    or sooner: before the lease ends.
    """  # fmt: skip
    del bus, host, cluster  # `connection` reads these from all sources
    from outfitter_proto.support import descriptors

    descriptors.require(DESCRIPTORS, "`outfitter run`")

    import anyio
    from msgspec import UNSET

    from outfitter_proto.support.processes import process_owner, survivors_of
    from outfitter_service import standard_error
    from outfitter_service.cli._lib.running.child import Child
    from outfitter_service.cli._lib.running.left_behind import LeftBehind, become_reaper
    from outfitter_service.cli._lib.running.run_session import RECEIVED, RunSession
    from outfitter_service.cli._lib.running.signals import SignalFile, die_of
    from outfitter_service.config import connection

    where = connection(config, options.given(ctx))
    executable.check(command[0], os.environ)  # no record changes its PATH
    owner = process_owner()
    survivors = survivors_of(owner, kill_after_s=max(kill_after, SHORTEST_S) if kill_survivors else UNSET)
    message = registration_options.registration(where.host, **request, owner=owner, wait_s=wait, survivors=survivors)
    earlier = become_reaper()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, nobody can wait for processes
    with SignalFile(RECEIVED) as signals, Child(command, mask=signals.blocked_before) as child:
        standard_error.go_background()  # its thread comes after the fork

        async def work() -> int:
            session = RunSession(
                where,
                message,
                child,
                LeftBehind(child.pid, earlier, kill=kill_survivors, kill_after=kill_after),
                signals=signals,
                wait_for_manager=wait_for_manager,
                kill_after=kill_after,
                allowed=allowed,
            )
            return await session.run()

        code = anyio.run(work)
    # Everything is closed, and an interpreter's shutdown takes as long as its start, so skip it.
    standard_error.finish()
    if code < 0:
        die_of(-code)
    os._exit(code)
