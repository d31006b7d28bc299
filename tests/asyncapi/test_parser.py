"""AsyncAPI's own parser reads the schema that we print."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from support.managers.process import OUTFITTER
from tools import tool

pytestmark = pytest.mark.asyncapi

PARSE = Path(__file__).with_name("parse.mjs")


def test_the_parser_accepts_the_schema() -> None:
    schema = subprocess.run([*OUTFITTER, "schema"], capture_output=True, check=True).stdout
    parsed = subprocess.run(["node", PARSE, tool("asyncapi-parser").parent], input=schema, capture_output=True)
    assert parsed.returncode == 0, (parsed.stdout + parsed.stderr).decode()
    assert b"6 channels, 6 operations" in parsed.stdout
