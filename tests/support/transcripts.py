"""Transcripts: files of shell commands with all that they print, which is compared as a whole.

    --- a.toml                  a file in the folder: for each scene below, or within a scene
    lease = "30s"
    === A sentence names a scene, which is one test in a folder of its own
    $ outfitter config check a.toml
    a line of standard output
    ! a line of standard error
    [1]                         the exit code, if it is not 0

`…` stands for anything within a line, and a line of `…` alone for any lines. A line that ends with `\\` goes on in the
next. `FOLDER` is the folder's path; where a test names more texts, commands write `$NAME`, and print `NAME`. Where one
prints something else, the test's error is the scene as it is now.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from support.managers.process import OUTFITTER, environment


class Step(NamedTuple):
    """A command and what it prints, or a file and its lines."""

    head: str
    lines: tuple[str, ...]


class Scene(NamedTuple):
    """One test of a transcript."""

    title: str
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        return self.title

    def play(self, folder: Path, variables: Mapping[str, str] | None = None, **names: str) -> None:
        """Run the commands in `folder`, with `variables` in their environment; `names` are of texts that vary.

        Raises:
            AssertionError: one printed something else.
        """
        names["FOLDER"] = str(folder)
        same, now = True, [f"=== {self.title}"]
        for head, lines in self.steps:
            if head.startswith("--- "):
                (folder / head[4:]).write_text("".join(f"{line}\n" for line in lines).replace("FOLDER", str(folder)))
                continue
            printed = run(head[2:], folder, {**(variables or {}), **names})
            for name, text in names.items():
                printed = printed.replace(text, name)
            same_here = re.fullmatch(_pattern(lines), printed) is not None
            same = same and same_here
            now += [head, *(lines if same_here else printed.splitlines())]
        assert same, "\n".join(["a command prints something else than its transcript has. Now it is:", *now])


def scenes(path: Path) -> list[Scene]:
    """All scenes of a transcript."""
    shared, *parts = re.split(r"^=== ", path.read_text().replace("\\\n", ""), flags=re.MULTILINE)
    found = [Scene(part.partition("\n")[0], (*_steps(shared), *_steps(part))) for part in parts]
    assert len({scene.title for scene in found}) == len(found), f"{path} has a title twice"
    return found


def _steps(text: str) -> list[Step]:
    parts = re.split(r"^(?=--- |\$ )", text, flags=re.MULTILINE)[1:]
    return [Step(head, tuple(lines)) for head, *lines in (part.rstrip("\n").split("\n") for part in parts)]


def run(command: str, folder: Path, variables: Mapping[str, str]) -> str:
    """What a command of sh prints, as it stands in a transcript."""
    done = subprocess.run(
        ["sh", "-c", f'outfitter() {{ {shlex.join(OUTFITTER)} "$@"; }}\n{command}'], cwd=folder,
        env=environment(COLUMNS="200", PYTHONPATH=str(folder)) | variables, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    lines = [*done.stdout.splitlines(), *(f"! {line}".rstrip() for line in done.stderr.splitlines())]
    lines += [f"[{done.returncode}]"] if done.returncode else []
    return "".join(f"{line}\n" for line in lines)


def _pattern(lines: tuple[str, ...]) -> str:
    """…of the printed lines that `lines` stand for."""
    return "".join("(.*\n)*" if line == "…" else ".*".join(map(re.escape, line.split("…"))) + "\n" for line in lines)
