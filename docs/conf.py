"""The site that `make docs` builds: Sphinx reads the repository's pages where they are, and this says in which order.

A page that stands in no list below, a link to nothing and an anchor that does not exist are warnings, and warnings fail
the build. docs/check.py looks at the result.
"""

from __future__ import annotations

import re
from pathlib import Path

from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]

CONTENTS = {
    "The guide": (
        "Contents <service/README>",
        "service/install",
        "service/size",
        "service/operate",
        "service/maintenance",
        "deploy/security",
        "service/recover",
        "service/troubleshooting",
        "service/failures",
        "service/reference",
        "service/promises",
        "service/console",
        "service/api",
        "service/glossary",
    ),
    "Workers": (
        "In Python, and in any language <proto/README>",
        "service/run",
        "service/where",
        "service/coming-from-flink",
        "service/coming-from-spark",
        "examples/README",
        "examples/*/README",
    ),
    "Deployment": ("Overview <deploy/README>", "deploy/*/README"),
    "Drivers": ("The drivers, and your own <drivers/README>", "drivers/scripts", "drivers/recipes", "drivers/health"),
    "The project": (
        "CHANGELOG",
        "ARCHITECTURE",
        "CONTRIBUTING",
        "tests/README",
        "tests/results",
        "*/*/README",
        "*/README",
    ),
}
"""Captions of the navigation, and their pages in order: `page` or `title <page>`. A pattern stands for those of its
pages that no earlier entry of its list named."""

project = "Outfitter"
copyright = "the authors of Outfitter, under the Apache License 2.0"  # noqa: A001 - Sphinx's name
version = re.findall(r'__version__ = "(.+)"', (ROOT / "proto/outfitter_proto/__init__.py").read_text())[0]
extensions = ["myst_parser"]
root_doc = "README"
exclude_patterns = [".*", "**/.*", "build", "dist", "**/node_modules", "**/target"]
source_suffix = {".md": "markdown"}
myst_heading_anchors = 4  # levels, with the names that code hosts give them
highlight_language = "sh"  # an indented block is a command

html_theme = "furo"
html_title = f"Outfitter {version}"
html_favicon = "../service/outfitter_service/api/console/static/icon.svg"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False


def navigation() -> str:
    """The lists of pages, as directives of Sphinx."""
    lists = []
    for caption, pages in CONTENTS.items():
        lists.append(f"```{{toctree}}\n:hidden:\n:glob:\n:caption: {caption}\n\n" + "\n".join(pages) + "\n```\n")
    return "\n".join(lists)


def add_navigation(_app: Sphinx, page: str, source: list[str]) -> None:
    """Append the navigation to the first page, which is README.md on a code host and has no directives."""
    if page == root_doc:
        source[0] += "\n" + navigation()


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_navigation)
    app.add_lexer("mermaid", TextLexer)
