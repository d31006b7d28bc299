"""Programs and packages of others that some kinds of tests need: `python -m tools` fetches them into `.cache`."""

from tools.table import KINDS, TOOLS, MissingToolError, tool

__all__ = ["KINDS", "TOOLS", "MissingToolError", "tool"]
