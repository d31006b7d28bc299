"""The commands of service/recover.md and deploy/README.md, as they stand there, run against a manager of a test.

    for command in commands("The ledger is lost"):
        run(manager, command)

`outfitter` is a command of its own process, `outfitter serve` and `systemctl` are the manager's start and stop,
`kafka-topics` is the tool of deploy/kafka, and `kafka-configs` is done by a client. Names of topics, brokers and
directories become those of the test.
"""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import anyio

from outfitter_proto.bus import connect
from outfitter_proto.names import topics
from support.bus import remaking
from support.documents import ROOT
from support.managers.process import Manager
from support.polling import until

PAGE = ROOT / "service" / "recover.md"
DEPLOYING = ROOT / "deploy" / "README.md"
TOPICS_TOOL = ROOT / "deploy" / "kafka" / "bin" / "topics"
HOME = "/var/lib/outfitter"
"""The embedded bus's directory in the page."""


def commands(section: str, number: int = 0, *, page: Path = PAGE) -> list[list[str]]:
    """The words of each command in one of the blocks of a section."""
    text = page.read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    block = text.split("```sh\n")[number + 1].partition("```")[0].replace("\\\n", " ")
    return [words for line in block.splitlines() if (words := shlex.split(line, comments=True))]


def run(manager: Manager, words: list[str], **replaced: str) -> str:
    """Run one command, which must succeed; what it printed. `replaced`: names of the page by those of the test."""
    words = [_of_test(manager, word, replaced) for word in words]
    match words:
        case ["systemctl", "stop", "outfitter"]:
            manager.stop()
        case ["systemctl", "start", "outfitter"]:
            manager.start()
        case ["outfitter", "serve", *arguments]:
            manager.start(*arguments)
        case ["outfitter", "ledger", "forget", key]:
            return _checked(manager.outfitter("ledger", "forget", key, "--yes"))  # there is no terminal to answer on
        case ["outfitter", *arguments]:
            return _checked(manager.outfitter(*arguments))
        case ["kafka-topics", *arguments]:
            output = _checked(subprocess.run([TOPICS_TOOL, *arguments], capture_output=True, text=True, check=False))
            if "--delete" in arguments:
                _await_deletion(manager)
            return output
        case ["kafka-configs", "--bootstrap-server", server, "--alter", "--topic", topic, "--add-config", setting]:
            remaking.set_config(server, topic, *setting.split("="))
        case _:
            line = ["sh", "-c", " ".join(words)]  # which knows what an asterisk means
            return _checked(subprocess.run(line, capture_output=True, text=True, check=False, cwd=manager.folder))
    return ""


def _of_test(manager: Manager, word: str, replaced: dict[str, str]) -> str:
    for name, value in replaced.items():
        word = word.replace(name, value)
    word = word.replace("broker-1:9092", manager.bus_url.rpartition("/")[2]).replace(HOME, str(manager.folder))
    for name in ("outfitter.a", "outfitter.r", "outfitter[.]"):
        word = word.replace(name, name.replace("outfitter", manager.cluster))
    return word


def _checked(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, f"{done.args}: {done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def _await_deletion(manager: Manager) -> None:
    """A broker deletes a topic some moments after its answer."""

    async def is_there() -> bool:
        async with connect(manager.bus_url) as bus:
            return topics(manager.cluster).allocations in await bus.layouts([topics(manager.cluster).allocations])

    until(lambda: not anyio.run(is_there), lambda: "the topic is still there")
