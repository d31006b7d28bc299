"""`outfitter schema` prints the contract and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

from outfitter_proto import schema
from support.processes.command_line import outfitter


def test_both_forms_are_printed_as_json(tmp_path: Path) -> None:
    for arguments, document in (
        ((), schema.asyncapi()),
        (("--format", "asyncapi"), schema.asyncapi()),
        (("--format", "json-schema"), schema.json_schema()),
    ):
        done = outfitter("schema", *arguments, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert json.loads(done.stdout) == document


def test_an_unknown_form_is_a_usage_error(tmp_path: Path) -> None:
    done = outfitter("schema", "--format", "protobuf", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "asyncapi" in done.stderr
