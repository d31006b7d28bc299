"""examples/java does what each worker must do."""

from __future__ import annotations

import json

import pytest

from examples.contract import RUNNERS, Program, WorkerContract, built, vectors
from support.processes.tools import needs, run_tool

pytestmark = pytest.mark.examples


def build() -> Program:
    needs("java")
    folder = built("java", [["mvn", "--quiet", "--batch-mode", "compile"]], also=[RUNNERS / "Vectors.java"])
    return Program(folder, ["java", "-Xmx64m", "-cp", "target/classes:target/lib/*", "Worker"])


@pytest.fixture(scope="module")
def program() -> Program:
    return build()


class TestJava(WorkerContract):
    def test_it_concludes_what_the_vectors_say(self, program: Program) -> None:
        folder, count = vectors()
        # a hash and a partition of each host
        count += len(json.loads((folder / "partitions.json").read_text())["vectors"])
        said = run_tool([*program.command[:-1], "Vectors", str(folder)], program.folder)
        assert said == f"{count} checked, 0 wrong\n"
