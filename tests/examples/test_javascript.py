"""examples/javascript does what each worker must do."""

from __future__ import annotations

import pytest

from examples.contract import RUNNERS, Program, WorkerContract, built, vectors
from support.processes.tools import needs, run_tool

pytestmark = pytest.mark.examples


def build() -> Program:
    needs("node")
    folder = built(
        "javascript",
        [["npm", "ci", "--silent", "--no-audit", "--no-fund", "--ignore-scripts"]],
        also=[RUNNERS / "vectors.mjs"],
    )
    return Program(folder, ["node", "worker.mjs"])


@pytest.fixture(scope="module")
def program() -> Program:
    return build()


class TestJavaScript(WorkerContract):
    def test_it_concludes_what_the_vectors_say(self, program: Program) -> None:
        folder, count = vectors()
        assert run_tool(["node", "vectors.mjs", str(folder)], program.folder) == f"{count} checked, 0 wrong\n"
