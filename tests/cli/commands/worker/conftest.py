"""What tests of `outfitter run` share."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator

import pytest

from support.managers.process import Manager, StartManager

PATIENCE = 30.0


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out, err


@pytest.fixture(autouse=True)
def _signals_are_not_ignored() -> Iterator[None]:
    """Shells start what runs in the background with Ctrl-C ignored, and `outfitter run` respects that."""
    ignored = {
        number: signal.signal(number, signal.SIG_DFL)
        for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
        if signal.getsignal(number) is signal.SIG_IGN
    }
    yield
    for number, handler in ignored.items():
        signal.signal(number, handler)


@pytest.fixture
def one_gpu(start_manager: StartManager) -> Manager:
    return start_manager(gpus=1)
