"""The documentation as tests see it: its files, and what stands in them as code.

Markdown is read by a few regular expressions, as far as these documents use it.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("proto", "drivers", "service", "deploy", "docs", "tests", "examples")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))])

_FENCED = re.compile(r"^```(?P<language>[\w-]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?<=\n\n)(?:^    .*\n)+", re.MULTILINE)
_INLINE = re.compile(r"`([^`\n]+)`")
_HEREDOC = re.compile(
    r"^(?P<command>[^\n]*)<<(?P<quote>'?)(?P<end>\w+)(?P=quote)\n(?P<text>.*?)^(?P=end)$", re.MULTILINE | re.DOTALL
)


class Snippet(NamedTuple):
    """Code in a document. `language` is the fence's, `` for indented code."""

    document: Path
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}: {self.text.strip().splitlines()[0][:60]}"


def name_of(path: Path) -> str:
    """A document's name for a test's id."""
    return str(path.relative_to(ROOT))


def blocks(document: Path) -> list[Snippet]:
    """The fenced blocks, then the indented ones."""
    text = document.read_text()
    fenced = [Snippet(document, match["language"], match["text"]) for match in _FENCED.finditer(text)]
    rest = _FENCED.sub("", text)
    return fenced + [Snippet(document, "", textwrap.dedent(match[0])) for match in _INDENTED.finditer(rest)]


def snippets(*languages: str) -> list[Snippet]:
    """The fenced blocks of all documents in one of `languages`."""
    return [block for document in DOCUMENTS for block in blocks(document) if block.language in languages]


def prose(document: Path) -> str:
    """What is no fenced block."""
    return _FENCED.sub("", document.read_text())


def shell_lines(document: Path) -> Iterator[str]:
    """Every line of shell code, and every piece of inline code, continuations joined, here-documents left out."""
    for block in blocks(document):
        if block.language in {"", "sh"}:
            yield from _HEREDOC.sub(r"\g<command>", block.text).replace("\\\n", " ").splitlines()
    yield from _INLINE.findall(prose(document))


def here_documents(document: Path) -> list[tuple[str, str]]:
    """What is fed to a command by `<<'END'` or `<<END`: the command, and the text."""
    shell = [block.text for block in blocks(document) if block.language == "sh"]
    return [(match["command"].strip(), match["text"]) for text in shell for match in _HEREDOC.finditer(text)]
