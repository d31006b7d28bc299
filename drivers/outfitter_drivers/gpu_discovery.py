"""The program `outfitter-gpu-discovery`: names NVIDIA GPUs that its caller may use, as Flink's discovery script does.

It has the command line, output and coordination file of Flink's script, so Flink can call it instead. The manager does
not need it. Standard library only, and quick to start.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

from outfitter_drivers.gpu import coordination
from outfitter_drivers.gpu.complaints import BUS_ID, Complaints, linux_bus_id
from outfitter_drivers.program import MAX_STDOUT_BYTES, Why, run_to_end

PROGRAM = "outfitter-gpu-discovery"
COORDINATION_FILE = "/var/tmp/flink-gpu-coordination"  # noqa: S108  as in Flink's script
ASSIGNMENT_FILE = "/var/tmp/flink-gpu-assignment"  # noqa: S108  as proposed in FLIP-108

NVIDIA_SMI_SECONDS = 8.0
"""Time limit of nvidia-smi: below the 10 s that Flink gives a discovery script."""

USAGE = f"""\
usage: {PROGRAM} AMOUNT [--enable-coordination-mode] [--coordination-file FILE]
       {PROGRAM} allocate|release AMOUNT [--privilege] [--assign-file FILE] [--check-dead-process]
       {PROGRAM} --path | --help
"""

HELP = f"""\
{USAGE}
Print the indexes of AMOUNT NVIDIA GPUs on one line, separated by commas.

  --enable-coordination-mode, --enable-coordination
      Share the GPUs with other callers on this machine: write down in a file which ones the calling process
      takes, and name none that a living process has. Asking again names the same ones.
  --coordination-file FILE
      That file; by default {COORDINATION_FILE}.
  --privilege, --assign-file FILE, --check-dead-process, --check-dead
      The names that FLIP-108 proposed for the same; the default file is then {ASSIGNMENT_FILE}.
      GPUs of dead processes are always given to others.
  release AMOUNT
      Strike out what the caller has, and print nothing.
  --path
      Print where this program is, for `external-resource.gpu.param.discovery-script.path`.

The caller is the parent process, or the one that OUTFITTER_OWNER_PID names.
Exit code: 0, 2 when the command line is wrong, 1 when there are not that many GPUs or anything else fails.
"""


class UsageError(Exception):
    """The command line is wrong."""


class DiscoveryError(Exception):
    """The GPUs cannot be named."""


class DiscoveryRequest(NamedTuple):
    """The parsed command line."""

    verb: str
    """`allocate` or `release`."""
    amount: int
    coordination_file: str | None
    """None: no coordination."""


def parse_arguments(arguments: Sequence[str]) -> DiscoveryRequest:
    """Read the command line.

    Raises:
        UsageError: an unknown option, a missing value, or an amount that is no whole number.
    """
    rest = list(arguments)
    verb = rest.pop(0) if rest and rest[0] in ("allocate", "release") else "allocate"
    if not rest:
        raise UsageError("AMOUNT is missing")
    amount = _amount(rest.pop(0))
    named_file: str | None = None
    default_file: str | None = None
    while rest:
        option, equals, value = rest.pop(0).partition("=")
        if option in ("--coordination-file", "--assign-file"):
            if not equals:
                value = rest.pop(0) if rest and not rest[0].startswith("--") else ""
            if not value:
                raise UsageError(f"{option} needs a file")
            named_file = value
        elif equals:
            raise UsageError(f"unknown argument {option + equals + value!r}")
        elif option in ("--enable-coordination-mode", "--enable-coordination"):
            default_file = COORDINATION_FILE
        elif option == "--privilege":
            default_file = default_file or ASSIGNMENT_FILE
        elif option not in ("--check-dead-process", "--check-dead", "null"):
            # Flink passes the word `null` when no arguments are configured.
            raise UsageError(f"unknown argument {option!r}")
    return DiscoveryRequest(verb, amount, (named_file or default_file) if default_file else None)


class DiscoveryAnswer(NamedTuple):
    """What nvidia-smi answers: the GPUs that it names and does not report as lost, and what it says besides."""

    gpus: list[str]
    besides: str


def list_gpus() -> DiscoveryAnswer:
    """Ask nvidia-smi for the indexes, and read its answer line by line: a complaint is about the GPU that it names.

    Raises:
        DiscoveryError: nvidia-smi is missing, fails, or does not print indexes.
    """
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        run = run_to_end(command, timeout=NVIDIA_SMI_SECONDS)
    except OSError as error:
        raise DiscoveryError(f"cannot run nvidia-smi: {error.strerror}") from error
    if run.why is Why.LATE:
        raise DiscoveryError(f"nvidia-smi did not answer within {NVIDIA_SMI_SECONDS:g} s")
    if run.why is Why.FLOODED:
        raise DiscoveryError(f"nvidia-smi printed more than {MAX_STDOUT_BYTES} bytes and was killed")
    names: dict[str, None] = {}
    others = run.stderr.decode("utf-8", "replace").splitlines()
    for line in run.stdout.decode("utf-8", "replace").split("\n"):
        words = [word for part in line.split(",") if (word := part.strip())]
        if all(map(_names_gpu, words)):
            names.update(dict.fromkeys(words))
        else:
            others.append(line)
    besides = " | ".join(line.strip() for line in others if line.strip())[:500]
    if not names and run.code != 0:
        raise DiscoveryError(f"nvidia-smi ended with {run.code}: {besides or 'no output'}")
    if not names and besides:
        raise DiscoveryError(f"nvidia-smi named no GPUs but: {besides}")
    complaints = Complaints(others)
    return DiscoveryAnswer([name for name in names if not _is_lost(name, complaints)], besides)


def _is_lost(name: str, complaints: Complaints) -> bool:
    bus_id = BUS_ID.fullmatch(name)
    complaint = complaints.about({linux_bus_id(bus_id) if bus_id else name.lower()}, name)
    return complaint is not None and complaint.is_loss


def _names_gpu(word: str) -> bool:
    """Whether the word names a GPU (an index, a UUID, a bus id) and is not part of a message. Flink's script prints it
    unchanged."""
    return (
        word.isascii()
        and word.replace("-", "").replace(":", "").replace(".", "").replace("/", "").replace("_", "").isalnum()
        and (word.startswith(("GPU-", "MIG-")) or (not word.isalpha() and any(sign.isdigit() for sign in word)))
    )


def discover(request: DiscoveryRequest) -> list[str]:
    """Execute the request; returns the indexes to print.

    Raises:
        DiscoveryError, coordination.CoordinationError: there are too few GPUs, or nvidia-smi or the file fails.
    """
    if request.verb == "release":
        if request.coordination_file and request.amount:
            only = [item for part in os.environ.get("OUTFITTER_DEVICES", "").split(",") if (item := part.strip())]
            owner = coordination.caller(os.environ)
            coordination.give_back(request.coordination_file, owner, only or None)
        return []
    if request.amount == 0:
        return []
    if request.coordination_file is None:
        return _enough_gpus(request.amount)[: request.amount]
    # Before the slow nvidia-smi runs: if the caller dies meanwhile, this process gets another parent.
    owner = coordination.caller(os.environ)
    return coordination.occupy(request.coordination_file, _enough_gpus(request.amount), request.amount, owner)


def _enough_gpus(amount: int) -> list[str]:
    gpus, besides = list_gpus()
    if amount > len(gpus):
        more = f", and says: {besides}" if besides else ""
        raise DiscoveryError(f"{amount} GPUs wanted, but nvidia-smi names {len(gpus)}{more}")
    return gpus


def program_path() -> str | None:
    """The path of this program's executable; None if it is not installed."""
    beside_python = os.path.join(os.path.dirname(sys.executable), PROGRAM)  # noqa: PTH118, PTH120  see below
    for candidate in (sys.argv[0], beside_python, *(os.path.join(d, PROGRAM) for d in os.get_exec_path())):  # noqa: PTH118
        # pathlib and shutil would double the time that this program takes to start.
        if os.path.basename(candidate) == PROGRAM and os.path.isfile(candidate) and os.access(candidate, os.X_OK):  # noqa: PTH113, PTH119
            return os.path.abspath(candidate)  # noqa: PTH100
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        if "--help" in words or "-h" in words:
            return _print(HELP)
        if list(words) == ["--path"]:
            path = program_path()
            if path is None:
                raise DiscoveryError(f"{PROGRAM} is not installed as an executable")
            return _print(f"{path}\n")
        indexes = discover(parse_arguments(words))
        return _print(",".join(indexes) + "\n") if indexes else 0
    except UsageError as error:
        _say(f"{PROGRAM}: {error}\n{USAGE}")
        return 2
    except KeyboardInterrupt:
        return 130
    except (DiscoveryError, coordination.CoordinationError) as error:
        _say(f"{PROGRAM}: {error}\n")
        return 1


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        if sys.stderr is not None:
            sys.stderr.write(text)


def _print(text: str) -> int:
    if sys.stdout is None:
        _say(f"{PROGRAM}: standard output is closed: there is nowhere to print\n")
        return 1
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        _say(f"{PROGRAM}: standard output: {error.strerror}\n")
        # Keep the interpreter from flushing again at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    return 0


def _amount(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"AMOUNT is {text[:40]!r}; valid is a whole number, 0 or more")
    # No machine has that many GPUs, and int() refuses very long numbers.
    digits = text.lstrip("0") or "0"
    return int(digits) if len(digits) <= 20 else 10**20


if __name__ == "__main__":
    sys.exit(main())
