"""The event loop of commands that run for long."""

from __future__ import annotations


def backend_options() -> dict[str, bool]:
    """The options of `anyio.run`: uvloop where it is installed."""
    from importlib.util import find_spec

    return {"use_uvloop": find_spec("uvloop") is not None}
