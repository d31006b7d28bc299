"""Looks at the built site as a browser would: nothing comes from another host, each link leads somewhere.

And the search knows all pages.

python docs/check.py build/docs
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
"""What a browser loads by itself: the attribute of each element."""
WORDS = ("outfitterdown", "survivor", "outfitter_readi")
"""An alert, a word of the guide and a metric, as the search shortens them."""
_IN_STYLE = re.compile(r"(?:url\(|@import\s+(?=[\"']))\s*[\"']?([^\"')\s]+)")


class Reference(NamedTuple):
    """`is_loaded`: without a click."""

    target: str
    is_loaded: bool


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.references: list[Reference] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attributes}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if LOADED.get(tag) in values:
            self.references.append(Reference(values[LOADED[tag]], is_loaded=True))
        elif tag == "a" and "href" in values:
            self.references.append(Reference(values["href"], is_loaded=False))


@cache
def page(path: Path) -> Page:
    return Page(path.read_text())


def problems(site: Path) -> Iterator[str]:
    pages = sorted(site.rglob("*.html"))
    for path in pages:
        for reference in page(path).references:
            if wrong := problem(path, reference):
                yield f"{path.relative_to(site)}: {reference.target}: {wrong}"
    for path in sorted(site.rglob("*.css")):
        for target in _IN_STYLE.findall(path.read_text()):
            if not target.startswith("data:") and (wrong := problem(path, Reference(target, is_loaded=True))):
                yield f"{path.relative_to(site)}: {target}: {wrong}"


def problem(path: Path, reference: Reference) -> str | None:
    parts = urlsplit(reference.target)
    if parts.scheme == "data":
        return None
    if parts.scheme or parts.netloc:
        return "another host's, and loaded without a click" if reference.is_loaded else None
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if not target.is_file():
        return "is not there"
    if parts.fragment and target.suffix == ".html" and unquote(parts.fragment) not in page(target).anchors:
        return "has no such anchor"
    return None


def unsearchable(site: Path) -> Iterator[str]:
    """The pages that the search does not know, and words of the guide that it does not find."""
    index = json.loads((site / "searchindex.js").read_text().removeprefix("Search.setIndex(").removesuffix(")"))
    searched = {site / f"{name}.html" for name in index["docnames"]}
    others = {site / f"{name}.html" for name in ("index", "search", "genindex")}
    yield from (f"{path.relative_to(site)}: is not searched" for path in {*site.rglob("*.html")} ^ searched ^ others)
    yield from (f"{word}: is not found" for word in WORDS if word not in index["terms"])


def main(site: Path) -> int:
    found = [*problems(site.resolve()), *unsearchable(site)]
    print(*found, sep="\n", end="\n" if found else "")
    print(f"{len(list(site.rglob('*.html')))} pages, {len(found)} problems")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
