"""Fetch what kinds of tests need, and say where it is: `PYTHONPATH=tests .venv/bin/python -m tools console deploy`.

Single tools have names as well, such as `prometheus`.
"""

from __future__ import annotations

import argparse

from tools.table import KINDS, TOOLS, fetch


def main() -> None:
    parser = argparse.ArgumentParser(prog="tools", description=__doc__)
    parser.add_argument("names", nargs="+", choices=[*KINDS, *TOOLS], metavar="KIND|TOOL")
    for name in parser.parse_args().names:
        for tool in KINDS.get(name, (name,)):
            print(f"{tool}: {fetch(tool)}", flush=True)


main()
