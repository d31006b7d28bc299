"""The search for a worker's processes among processes that show any memory as their environment or command line."""

from __future__ import annotations

import errno
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec import structs

from outfitter_proto.records import ResolvedRequest, Survivors
from outfitter_service.runtime.processor import unrecorded_workers
from outfitter_service.runtime.survivors import processes
from outfitter_service.runtime.survivors.processes import Mark, MarksOfHost, Search, open_survivor, search
from outfitter_service.runtime.survivors.survivor_watch import NONE_LEFT, SurvivorWatch
from support.api import allocation
from support.documents import ROOT
from support.managers.in_process import another
from support.processes.owners import owner_of

RUN = secrets.token_hex(4)
HOST = f"h-{RUN}"
"""Tests on the same machine find only their own processes."""
MARK = Mark(HOST, "w", RUN, os.getuid())
NAMES = {"OUTFITTER_HOST": HOST, "OUTFITTER_WORKER": "w", "OUTFITTER_INCARNATION": RUN}
ENTRIES = b"".join(f"{name}={value}\0".encode() for name, value in NAMES.items())
PYTHON = Path(sys.executable).name
MIB, GIB = 2**20, 2**30

SHOWING = """
import ctypes, sys
which, size, head, filling = sys.argv[1], int(sys.argv[2]), bytes.fromhex(sys.argv[3]), bytes.fromhex(sys.argv[4])
libc = ctypes.CDLL(None, use_errno=True)
names = "start_code end_code start_data end_data start_brk brk start_stack arg_start arg_end env_start env_end auxv"
class Map(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in names.split()]
    _fields_ += [("auxv_size", ctypes.c_uint32), ("exe_fd", ctypes.c_uint32)]
libc.mmap.restype = libc.sbrk.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
PRIVATE_ANONYMOUS_NORESERVE = 0x4022
start = libc.mmap(None, size, 3, PRIVATE_ANONYMOUS_NORESERVE, -1, 0)
content = (head + filling * ((size - len(head)) // len(filling))) if filling else head
ctypes.memmove(start, content, len(content))
fields = open("/proc/self/stat").read().rpartition(")")[2].split()
field = lambda number: int(fields[number - 3])
shown = {"arg": (field(48), field(49)), "env": (field(50), field(51)), which: (start, start + size)}
shown = Map(field(26), field(27), field(45), field(46), field(47), libc.sbrk(0), field(28), *shown["arg"],
            *shown["env"], 0, 0, 0xffffffff)
PR_SET_MM, PR_SET_MM_MAP = 35, 14
done = libc.prctl(PR_SET_MM, PR_SET_MM_MAP, ctypes.byref(shown), ctypes.sizeof(shown), 0)
print(done, ctypes.get_errno(), flush=True)
sys.stdin.read()
"""
"""Shows so many bytes of memory as its environment (env) or its command line (arg). The first are `head`, the others
`filling` again and again, or zeros that take no memory."""

SEARCHING = """
import resource, sys
from outfitter_service.runtime.survivors.processes import Mark, MarksOfHost, search
marks = eval(sys.argv[1])
has = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (has + 64 * 2**20,) * 2)
found = search(marks)
print([survivor.command for survivors in found.survivors.values() for survivor in survivors])
"""
"""Searches in a process that may take 64 MiB more than it has."""

NAMING = """
import resource, sys
from outfitter_service.cli._lib.running.left_behind import _command_line
has = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (has + 64 * 2**20,) * 2)
print(_command_line(int(sys.argv[1])))
"""


@contextmanager
def showing(
    which: str, size: int, head: bytes = b"", filling: bytes = b"", environ: dict[str, str] | None = None
) -> Iterator[int]:
    """The pid of a process that shows memory."""
    command = [sys.executable, "-c", SHOWING, which, str(size), head.hex(), filling.hex()]
    with subprocess.Popen(command, env=environ or {}, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            if said != b"0 0\n":
                pytest.skip(f"this kernel lets no process show other memory: {said!r}")
            yield process.pid
        finally:
            process.kill()


def searched(marks: str) -> tuple[str, str]:
    """What a search in little memory finds, and its errors."""
    done = subprocess.run([sys.executable, "-c", SEARCHING, marks], capture_output=True, text=True, check=False)
    return done.stdout, done.stderr


@pytest.mark.parametrize("marks", [f"[{MARK!r}]", f"MarksOfHost({HOST!r})"], ids=["of a worker", "of a host"])
def test_an_environment_of_a_gibibyte_is_none_that_a_program_was_given(marks: str) -> None:
    with showing("env", GIB, ENTRIES):
        assert searched(marks) == ("[]\n", "")


@pytest.mark.parametrize(
    "filling", [b"\0", b"ab\0", b"OUTFITTER_OUTER=h/w/1\0", b"=", b"OUTFITTER_HOST=g\0OUTFITTER_INCARNATION=1\0"]
)
def test_the_largest_environment_costs_little_and_its_first_names_count(filling: bytes) -> None:
    with showing("env", 8 * MIB, ENTRIES, filling):
        assert searched(f"[{MARK!r}]") == (f"[{PYTHON!r}]\n", "")


@pytest.mark.parametrize("names", [f"{HOST}/w/{RUN} ", "a/b/c ", "\udcff"], ids=["its own", "others", "no text"])
def test_a_variable_that_execve_would_refuse_names_nobody(names: str) -> None:
    filling = names.encode(errors="surrogateescape")
    with showing("env", 8 * MIB, b"OUTFITTER_OUTER=", filling):
        assert searched(f"[{MARK!r}]") == ("[]\n", "")


def test_a_command_line_of_a_gibibyte_is_cut() -> None:
    with showing("arg", GIB, b"/bin/" + b"a" * 5000, environ=NAMES):
        assert searched(f"[{MARK!r}]") == (f"['{'a' * processes.LONGEST_COMMAND}']\n", "")


def test_run_names_what_is_left_behind_by_a_part_of_its_command_line() -> None:
    with showing("arg", GIB, b"train\0--rate") as pid:
        command = [sys.executable, "-c", NAMING, str(pid)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("train --rate\n", "")


def test_a_program_that_was_given_much_is_found() -> None:
    much = {f"MUCH_{number}": "x" * 100_000 for number in range(15)}
    with subprocess.Popen(["/bin/sleep", "1000"], env=much | NAMES) as process:
        found = search([MARK]).survivors.get(MARK, [])
        process.kill()
    assert [survivor.pid for survivor in found] == [process.pid]


UNPRIVILEGED = """
import os, sys
from outfitter_service.runtime.survivors.processes import Mark, search
if os.geteuid() == 0:  # root is denied nothing: be somebody else
    os.setgroups([])
    os.setuid(int(sys.argv[1]))
print(sorted(search([Mark("h", "w", "1", os.getuid())]).refused - {os.getuid()}))
"""


def test_processes_of_users_that_no_worker_has_are_not_even_opened() -> None:
    nobodys = str(2_000_000_000 + secrets.randbelow(100_000_000))
    done = subprocess.run([sys.executable, "-c", UNPRIVILEGED, nobodys], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# --- memory that is not there ---


def without_memory(*_: object) -> bytes:
    raise MemoryError


@pytest.mark.parametrize("marks", [[MARK], MarksOfHost(HOST)], ids=["of a worker", "of a host"])
def test_a_search_without_memory_fails_as_a_system_call_without_memory(
    marks: list[Mark] | MarksOfHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen(["/bin/sleep", "1000"], env=NAMES) as process:
        [found] = search([MARK]).survivors[MARK]
        monkeypatch.setattr(processes, "read_at_most", without_memory)
        for call in (lambda: search(marks), lambda: open_survivor(found)):
            with pytest.raises(OSError, match="Cannot allocate memory") as caught:
                call()
            assert caught.value.errno == errno.ENOMEM
        process.kill()


async def test_a_search_without_memory_is_said_and_made_again() -> None:
    answers: list[Search | OSError] = [OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), Search({}, frozenset())]

    def find(_: object) -> Search:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    identity = another()
    owner = owner_of(os.getpid(), boot_id=identity.boot_id, pid_ns=identity.pid_ns)
    request = ResolvedRequest(amounts={"gpu": 1}, priority=0, owner=owner, survivors=Survivors(uid=0))
    record = structs.replace(allocation("h", "w", "releasing"), request=request)
    assert await SurvivorWatch(identity, search=find).wait_until_gone(record, lambda _: None) == NONE_LEFT
    assert answers == []


async def test_a_ledger_is_not_adopted_unseen_for_want_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Search({}, frozenset({4711}))
    answers = [errno.ENOMEM, errno.EMFILE]

    def find(_: object) -> Search:
        if answers:
            raise OSError(answers.pop(), "none is left")
        return found

    monkeypatch.setattr(processes, "search", find)
    assert await unrecorded_workers.search_host(HOST) == found


# --- names that strangers chose ---


@pytest.mark.parametrize("worker", ["a\nb", "a\x1b[31m", "a/b", "", "ä", "a" * 254, "-a", "a\u202eb"])
def test_a_name_that_no_worker_can_have_is_no_workers(worker: str) -> None:
    """An escape or a line break in one would otherwise get into messages."""
    environ = NAMES | {"OUTFITTER_HOST": RUN, "OUTFITTER_WORKER": worker}
    outer = {"OUTFITTER_OUTER": f"{RUN}/{worker}/1"}
    with (
        subprocess.Popen(["/bin/sleep", "1000"], env=environ) as first,
        subprocess.Popen(["/bin/sleep", "1000"], env=outer) as second,
    ):
        found = search(MarksOfHost(RUN)).survivors
        first.kill()
        second.kill()
    assert found == {}


# --- other readers of /proc ---


def test_no_file_of_another_process_in_proc_is_read_whole() -> None:
    unbounded = re.compile(r"/proc/\{.*\.(read_bytes|read_text|open)\(|(?<!os\.)\bopen\(f?.*/proc/\{|\.readall\(")
    sources = [path for folder in ("proto", "service", "drivers") for path in (ROOT / folder).rglob("*.py")]
    assert len(sources) > 200
    found = [f"{path.name}: {line}" for path in sources for line in unbounded.findall(path.read_text())]
    assert found == []
