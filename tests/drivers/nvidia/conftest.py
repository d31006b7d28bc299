"""The tests may run in a container. There a list of NVML without processes says nothing, which one test is about."""

from __future__ import annotations

import pytest

from outfitter_proto.support import processes


@pytest.fixture(autouse=True)
def in_the_first_pid_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "INITIAL_PID_NAMESPACE", processes.pid_namespace())
