"""drivers/recipes.md: each block is a configuration that works as it is printed."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable

import pytest

from support.documents import ROOT, blocks
from support.managers.process import Manager

RECIPES = [block.text for block in blocks(ROOT / "drivers" / "recipes.md") if block.language == "toml"]
NAMES = [name for text in RECIPES for name in tomllib.loads(text)["external-resource"]]
CONFIG = f"external-resources = {json.dumps(NAMES)}\n" + "\n".join(RECIPES)


def test_each_recipe_is_a_resource_of_its_own() -> None:
    assert len(NAMES) == len(set(NAMES)) == len(RECIPES) == 6


def test_a_command_has_the_variables_that_its_recipe_promises(start_manager: Callable[..., Manager]) -> None:
    manager = start_manager(config=CONFIG)
    checked = manager.outfitter("config", "check", str(manager.config))
    assert (checked.returncode, checked.stdout) == (0, "ok\n")
    requests = [word for name in NAMES for word in ("--resource", f"{name}=1")]
    done = manager.outfitter("run", *requests, "--", "env")
    assert done.returncode == 0, done.stderr
    variables = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    for text, name in zip(RECIPES, NAMES, strict=True):
        devices = tomllib.loads(text)["external-resource"][name]["param"]["device"]
        assert any(device["env"].items() <= variables.items() for device in devices.values()), name


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_names_no_device_by_a_number(name: str) -> None:
    """A number may be another device's after a reboot; so are names by which `static` would make an id of it."""
    [text] = [text for text in RECIPES if name in tomllib.loads(text)["external-resource"]]
    devices = tomllib.loads(text)["external-resource"][name]["param"]["device"]
    assert not any(key.isdecimal() or str(each.get("id", key)).isdecimal() for key, each in devices.items())
