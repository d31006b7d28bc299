"""Flags by the option table, as `outfitter serve` has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from outfitter_service.cli._lib.options import F
from outfitter_service.config.options import SETTINGS, Choice, Option, flag

NAMES = tuple(option.name for option in SETTINGS if option.flag is not None)


def add(*names: str, with_defaults: bool = False) -> Callable[[F], F]:
    """Add the flags of these settings. `with_defaults`: for a command that is no manager and reads no other source."""

    def decorate(command: F) -> F:
        for option in reversed([option for option in SETTINGS if option.name in names]):
            more: dict[str, Any] = {"default": option.default_text} if with_defaults else {}
            command = click.option(f"--{option.name}", help=option.flag, **_kind(option), **more)(command)
        return command

    return decorate


def _kind(option: Option) -> dict[str, Any]:
    if option.parse is flag:
        return {"is_flag": True}
    if isinstance(option.parse, Choice):
        return {"type": click.Choice(option.parse.allowed)}
    return {"metavar": option.type.upper()}
