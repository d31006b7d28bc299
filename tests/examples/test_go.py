"""examples/go does what each worker must do."""

from __future__ import annotations

import pytest

from examples.contract import RUNNERS, Program, WorkerContract, built, vectors
from support.processes.tools import run_tool

pytestmark = pytest.mark.examples


def build() -> Program:
    folder = built("go", [["go", "build", "-o", "worker", "."]], also=[RUNNERS / "worker_test.go"])
    return Program(folder, [str(folder / "worker")])


@pytest.fixture(scope="module")
def program() -> Program:
    return build()


class TestGo(WorkerContract):
    def test_it_concludes_what_the_vectors_say(self, program: Program) -> None:
        folder, count = vectors()
        said = run_tool(["env", f"VECTORS={folder}", "go", "test", "-v", "."], program.folder)
        assert f"{count} checked\n" in said
