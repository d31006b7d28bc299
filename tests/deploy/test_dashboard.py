"""The dashboard's file is what its script makes, the SDK's model has all of it, and promtool takes each query."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from support.dashboard import FILE, as_asked_at_first, content, queries
from support.prometheus import promtool

pytestmark = pytest.mark.deploy


def test_the_file_is_what_the_script_makes() -> None:
    spec = importlib.util.spec_from_file_location("dashboard", FILE.with_name("dashboard.py"))
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert FILE.read_text() == script.text(), "run deploy/grafana/dashboard.py"


def test_the_sdks_model_loads_all_of_it() -> None:
    register_default_plugins()
    loaded = Dashboard.from_json(content())
    assert json.loads(JSONEncoder().encode(loaded)) == content()


def test_promtool_takes_each_query(tmp_path: Path) -> None:
    rules = [
        {"record": f"dashboard:query:{number}", "expr": as_asked_at_first(query)}
        for number, query in enumerate(queries())
    ]
    assert len(rules) > 30
    file = tmp_path / "queries.json"  # JSON is YAML
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", str(file))
