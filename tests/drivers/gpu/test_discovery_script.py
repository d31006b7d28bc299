"""outfitter-gpu-discovery beyond the table: odd arguments, broken files, owners that are hard to judge."""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outfitter_drivers.gpu import coordination
from outfitter_drivers.gpu.coordination import CoordinationError, ScriptOwner
from support.drivers.gpu_machine import PROGRAM, answer, discovery, nvidia_smi
from support.processes.ending import wait_until_ended

Run = Callable[..., tuple[str, int, str]]
BOOT = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
NAMESPACE = str(Path("/proc/self/ns/pid").stat().st_ino)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run the program on a machine with four GPUs."""
    bin_folder = nvidia_smi(tmp_path, "0\n1\n2\n3\n")
    return lambda *arguments, **env: answer(discovery([str(a) for a in arguments], bin_folder, env=env))


@pytest.fixture
def share(run: Run, tmp_path: Path) -> Run:
    """The same in coordination mode, with the file `tmp_path/file`."""
    return lambda *arguments, **env: run(
        *arguments, "--enable-coordination-mode", "--coordination-file", tmp_path / "file", **env
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["+1"],
        ["1e3"],
        ["1.0"],
        [""],
        [" "],
        [" 2"],
        ["２"],
        ["0x2"],
        ["null"],
        ["--enable-coordination-mode", "2"],
        ["2", "3"],
        ["2", "--coordination-file"],
        ["2", "--coordination-file", ""],
        ["2", "--coordination-file="],
        ["2", "--coordination-file", "--enable-coordination-mode"],
        ["2", "--enable-coordination-mode=yes"],
        ["2", "-x"],
        ["allocate"],
        ["release"],
        ["release", "x"],
        ["grab", "2"],
    ],
)
def test_a_wrong_command_line_exits_2_with_the_usage_on_standard_error(run: Run, arguments: list[str]) -> None:
    stdout, code, stderr = run(*arguments)
    assert (stdout, code) == ("", 2)
    assert "usage: outfitter-gpu-discovery" in stderr


@pytest.mark.parametrize("amount", ["5", "9" * 30, "9" * 5000])
def test_more_than_there_are_exits_1_and_says_both_numbers(run: Run, amount: str) -> None:
    stdout, code, stderr = run(amount)
    assert (stdout, code) == ("", 1)
    assert "GPUs wanted, but nvidia-smi names 4" in stderr


@pytest.mark.parametrize("arguments", [["000"], ["0", "null"], ["0", "--enable-coordination"], ["release", "0"]])
def test_an_amount_of_nothing_is_granted_without_a_word(run: Run, arguments: list[str]) -> None:
    assert run(*arguments)[:2] == ("", 0)


@pytest.mark.parametrize("option", ["--enable-coordination", "--enable-coordination-mode", "--privilege"])
@pytest.mark.parametrize("file_option", ["--coordination-file", "--assign-file"])
def test_every_spelling_of_the_coordination_options_coordinates(
    run: Run, tmp_path: Path, option: str, file_option: str
) -> None:
    arguments = ["allocate", 1, option, f"{file_option}={tmp_path / 'file'}", "--check-dead-process", "--check-dead"]
    assert run(*arguments)[:2] == ("0\n", 0)
    assert (tmp_path / "file").read_text().startswith(f"0 {os.getpid()}\t")


def test_the_default_files_are_flinks_and_the_proposals() -> None:
    from outfitter_drivers.gpu_discovery import parse_arguments

    assert parse_arguments(["1", "--enable-coordination"]).coordination_file == "/var/tmp/flink-gpu-coordination"
    assert parse_arguments(["1", "--privilege"]).coordination_file == "/var/tmp/flink-gpu-assignment"
    assert parse_arguments(["1"]).coordination_file is None


def test_it_tells_where_it_is_so_that_flink_can_be_configured_with_it(run: Run) -> None:
    stdout, code, _ = run("--path")
    assert (stdout, code) == (f"{PROGRAM}\n", 0)
    assert "usage:" in run("--help")[0]


def test_without_nvidia_smi_it_says_so_and_exits_1(tmp_path: Path) -> None:
    stdout, code, stderr = answer(discovery(["1"], None, env={"PATH": str(tmp_path)}))
    assert (stdout, code) == ("", 1)
    assert "cannot run nvidia-smi" in stderr


def test_an_nvidia_smi_that_never_stops_printing_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    child = tmp_path / "child"
    bin_folder = nvidia_smi(tmp_path, "", then=f"sleep 1000 &\necho $! > {child}\nexec yes 0")
    stdout, code, stderr = answer(discovery(["1"], bin_folder))
    assert (stdout, code) == ("", 1)
    assert "printed more than 1048576 bytes and was killed" in stderr
    wait_until_ended(int(child.read_text()))


def test_it_needs_nothing_but_the_standard_library() -> None:
    code = (
        "import sys; known = set(sys.modules); import outfitter_drivers.gpu_discovery;"
        "print(*sorted(m for m in set(sys.modules) - known if m.split('.')[0] not in sys.stdlib_module_names))"
    )
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=_source_path(), check=True)
    assert done.stdout.split() == [
        "outfitter_drivers",
        "outfitter_drivers.gpu",
        "outfitter_drivers.gpu.complaints",
        "outfitter_drivers.gpu.coordination",
        "outfitter_drivers.gpu_discovery",
        "outfitter_drivers.program",
    ]


def _source_path() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(coordination.__file__).parents[2])}


# --- owners ---


@pytest.fixture
def living() -> ScriptOwner:
    """A process that lives as long as the test."""
    return ScriptOwner(os.getppid(), coordination._start_of(os.getppid()), NAMESPACE, BOOT)


def test_the_caller_is_written_down_so_that_a_later_process_of_its_number_is_not_taken_for_it(
    share: Run, tmp_path: Path, living: ScriptOwner
) -> None:
    assert share(1)[:2] == ("0\n", 0)
    index, owner = coordination.parse((tmp_path / "file").read_bytes()) or ("", ScriptOwner(0))
    assert (index, owner) == ("0", ScriptOwner(os.getpid(), coordination._start_of(os.getpid()), NAMESPACE, BOOT))
    assert coordination.lives(living)
    assert not coordination.lives(living._replace(start="1"))
    assert not coordination.lives(living._replace(boot="another"))


def test_a_caller_that_dies_while_nvidia_smi_is_asked_leaves_its_gpus_to_others(share: Run, tmp_path: Path) -> None:
    """Whoever inherits the program then, mostly the machine's first process, lives as long as the machine."""
    parent = "sed -n 's/^PPid:[[:space:]]*//p' /proc/$PPID/status"
    dies = f'caller=$({parent})\nkill -9 $caller\nwhile [ "$({parent})" = $caller ]; do :; done'
    bin_folder = nvidia_smi(tmp_path / "slow", "0\n1\n2\n3\n", then=dies)
    arguments = [str(PROGRAM), "4", "--enable-coordination-mode", "--coordination-file", str(tmp_path / "file")]
    caller = subprocess.Popen(
        ["sh", "-c", '"$@"; true', "sh", *arguments],
        env={**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert answer(caller) == ("0,1,2,3\n", -signal.SIGKILL, "")
    assert share(4)[:2] == ("0,1,2,3\n", 0)


def test_an_owner_in_another_pid_namespace_counts_as_living(share: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(f"0 4194303\tstart=5,pidns=1,boot={BOOT}\n")
    assert share(1)[:2] == ("1\n", 0)
    assert share(4)[1] == 1


def test_a_process_that_has_ended_but_was_not_waited_for_is_dead() -> None:
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not coordination.lives(ScriptOwner(process.pid))
    process.wait()


def test_what_flinks_readers_see_of_a_line_is_the_index_and_the_pid(share: Run, tmp_path: Path) -> None:
    share(2)
    done = subprocess.run(
        ["awk", "/^1 / {print $2; exit}", str(tmp_path / "file")], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{os.getpid()}\n"
    # Flink's script deletes `<index> ` wherever it stands in a line: no blank but the one behind our own index.
    assert all(line.count(" ") == 1 for line in (tmp_path / "file").read_text().splitlines())


def test_the_named_owner_is_recorded_and_workers_of_one_owner_are_told_apart(share: Run) -> None:
    owner = {"OUTFITTER_OWNER_PID": str(os.getppid())}
    assert share(1, **owner, OUTFITTER_WORKER="a", OUTFITTER_INCARNATION="1")[0] == "0\n"
    assert share(1, **owner, OUTFITTER_WORKER="b", OUTFITTER_INCARNATION="1")[0] == "1\n"
    assert share(1, **owner, OUTFITTER_WORKER="a", OUTFITTER_INCARNATION="1")[0] == "0\n"
    assert share(1)[0] == "2\n"
    for wrong in ("0", "-1", "x", "9" * 20, "0" * 12 + "1" + "9" * 5000):
        printed, code, error = share(1, OUTFITTER_OWNER_PID=wrong)
        assert (printed, code) == ("", 1)
        assert error.endswith("valid is a process id\n")
    assert share(1, OUTFITTER_WORKER="a,b=c")[:2] == ("", 1)


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">/dev/full"])
def test_a_closed_output_is_an_exit_code_without_a_traceback(tmp_path: Path, closed: str) -> None:
    folder = nvidia_smi(tmp_path, "0\n")
    for amount, code in (("1", 0 if closed == "2>&-" else 1), ("wrong", 2)):
        done = subprocess.run(
            ["sh", "-c", f'"$0" {amount} {closed}', str(PROGRAM)],
            env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        assert (done.stderr == "") == (closed == "2>&-")
        assert done.stderr == "" or done.stderr.startswith("outfitter-gpu-discovery: ")
        assert ("standard output" in done.stderr) == (code == 1)


def test_release_strikes_out_the_callers_records_and_no_others(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "file"
    options = ("--privilege", "--assign-file", file)
    assert run("release", 2, *options)[:2] == ("", 0)
    assert not file.exists()
    file.write_text(f"# note\n3 {os.getppid()}\n")
    assert run("allocate", 3, *options)[0] == "0,1,2\n"
    assert run("release", 1, *options, OUTFITTER_DEVICES="1")[:2] == ("", 0)
    assert [line.split()[0] for line in file.read_text().splitlines()] == ["#", "3", "0", "2"]
    for _ in range(2):
        assert run("release", 2, *options)[:2] == ("", 0)
        assert file.read_text() == f"# note\n3 {os.getppid()}\n"


def test_holding_some_of_what_is_wanted_the_caller_gets_those_first(share: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(f"2 {os.getpid()}\n")
    assert share(2)[0] == "2,0\n"
    assert share(1)[0] == "0\n"


# --- the file ---


@pytest.mark.parametrize("make", ["folder", "fifo", "no parent", "huge", "device"])
def test_a_file_that_is_none_exits_1_and_names_it(run: Run, tmp_path: Path, make: str) -> None:
    file = tmp_path / "file"
    match make:
        case "folder":
            file.mkdir()
        case "fifo":
            os.mkfifo(file)
        case "no parent":
            file = tmp_path / "no/file"
        case "huge":
            file.write_bytes(b"x" * (coordination.MAX_FILE_BYTES + 1))
        case "device":
            file = Path("/dev/null")
    stdout, code, stderr = run(1, "--enable-coordination", "--coordination-file", file)
    assert (stdout, code) == ("", 1)
    assert f"coordination file {file}" in stderr


def test_the_file_is_locked_as_flink_locks_it_and_one_replaced_meanwhile_is_noticed(tmp_path: Path, run: Run) -> None:
    file = tmp_path / "file"
    file.write_text("")
    bin_folder = tmp_path / "bin"
    with file.open("r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        waiting = discovery(["1", "--enable-coordination", "--coordination-file", str(file)], bin_folder)
        _until_open(waiting.pid, file)
        # What Flink's script does (`sed -i`), and then somebody takes device 0.
        (tmp_path / "new").write_text(f"0 {os.getppid()}\n")
        (tmp_path / "new").replace(file)
    assert answer(waiting)[:2] == ("1\n", 0)
    assert [line.split()[0] for line in file.read_text().splitlines()] == ["0", "1"]


def _until_open(pid: int, file: Path) -> None:
    """Wait until a process has opened the file: what it does next is to lock it."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if link.readlink() == file:
                    return
        time.sleep(0.005)
    raise AssertionError(f"process {pid} has not opened {file}")


def test_writing_keeps_the_files_inode(share: Run, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("0 4194303\n1 4194302\n")
    before = file.stat().st_ino
    assert share(4)[0] == "2,3,0,1\n"
    assert file.stat().st_ino == before


def test_callers_killed_at_any_moment_leave_whole_records_and_no_double_allocation(tmp_path: Path) -> None:
    """Each caller is killed a little later than the one before; whoever answers afterwards gets a free device."""
    bin_folder = nvidia_smi(tmp_path, "".join(f"{n}\n" for n in range(64)))
    file = tmp_path / "file"
    file.write_text(f"63 {os.getppid()}\n")
    arguments = ["1", "--enable-coordination", "--coordination-file", str(file)]
    for step in range(12):
        # Every caller is a worker of its own, whose owner lives on. It has to lock the file, write, and end.
        with file.open("r+") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            killed = discovery(arguments, bin_folder, env={"OUTFITTER_WORKER": f"killed-{step}"})
            _until_open(killed.pid, file)
        try:
            killed.wait(step * 0.002)
        except subprocess.TimeoutExpired:
            killed.send_signal(signal.SIGKILL)
        killed.communicate(timeout=30)
        assert answer(discovery(arguments, bin_folder, env={"OUTFITTER_WORKER": f"asks-{step}"}))[1] == 0
    records = [coordination.parse(line) for line in file.read_bytes().splitlines() if line]
    assert None not in records
    taken = [record[0] for record in records if record]
    assert len(set(taken)) == len(taken)
    assert sum(1 for record in records if record and (record[1].worker or "").startswith("asks")) == 12


# --- properties ---

WORDS = st.one_of(st.integers(0, 12).map(str), st.sampled_from(["", "abc", "-1", "9" * 30, "start=1", "\x00", "ü"]))
LINES = st.lists(st.lists(WORDS, max_size=4).map(" ".join), max_size=12).map("\n".join)


@given(
    content=st.one_of(st.binary(max_size=60), LINES.map(lambda text: text.encode("utf-8"))),
    devices=st.integers(0, 12),
    amount=st.integers(1, 6),
    alive=st.sets(st.integers(0, 12)),
)
def test_whatever_the_file_says_living_owners_keep_their_devices(
    content: bytes, devices: int, amount: int, alive: set[int]
) -> None:
    me = ScriptOwner(4711, start="7")
    indexes = [str(index) for index in range(devices)]
    before = {r for line in content.split(b"\n") if (r := coordination.parse(line))}
    held = {index for index, owner in before if owner.pid in alive}
    try:
        chosen, after = coordination.choose(content, indexes, amount, me, lambda owner: owner.pid in alive)
    except CoordinationError:
        assert len(set(indexes) - held) < amount
        return
    assert len(set(chosen)) == amount
    assert held.isdisjoint(chosen)
    records = [r for line in after.split(b"\n") if (r := coordination.parse(line))]
    assert {r for r in before if r[1].pid in alive} <= set(records)
    for index in chosen:
        assert [owner for known, owner in records if known == index] == [me]
    again, unchanged = coordination.choose(after, indexes, amount, me, lambda owner: owner.pid in alive)
    assert (set(again), unchanged) == (set(chosen), after)


@given(st.binary(max_size=200))
def test_any_line_is_a_record_or_none(line: bytes) -> None:
    record = coordination.parse(line)
    assert record is None or (record[0] and record[1].pid >= 0)


# --- what others put in the way ---


@pytest.mark.parametrize(
    ("printed", "named"),
    [
        ("GPU-aaa\nGPU-bbb\n", "GPU-aaa"),
        ("GPU-8a56f3d1-0000-1111-2222-333344445555\n", "GPU-8a56f3d1-0000-1111-2222-333344445555"),
        ("MIG-8a56\n", "MIG-8a56"),
        ("00000000:01:00.0\n", "00000000:01:00.0"),
        ("gpu0\n", "gpu0"),
        (" 3 \n", "3"),
        ("\u00a03\u2003\n", "3"),
    ],
)
def test_what_nvidia_smi_calls_a_gpu_is_printed_as_it_is(tmp_path: Path, printed: str, named: str) -> None:
    assert answer(discovery(["1"], nvidia_smi(tmp_path, printed)))[:2] == (f"{named}\n", 0)
    coordinated = ["1", "--enable-coordination-mode", "--coordination-file", str(tmp_path / "file")]
    assert answer(discovery(coordinated, nvidia_smi(tmp_path, printed)))[:2] == (f"{named}\n", 0)
    assert (tmp_path / "file").read_text().split()[:2] == [named, str(os.getpid())]


@pytest.mark.parametrize(
    "printed",
    ["No devices were found\n", "N/A\n", "[N/A]\n", "ERR!\n", "None\n", "Unable to GPU-0\n",
     "\u200b\n", "0\u200b\n", "\uff10\n"],
)  # fmt: skip
def test_a_word_of_a_message_is_no_gpu(tmp_path: Path, printed: str) -> None:
    assert answer(discovery(["1"], nvidia_smi(tmp_path, printed)))[:2] == ("", 1)


@pytest.mark.parametrize("kind", ["link", "dangling link", "hard link"])
def test_no_link_leads_the_program_into_another_file(share: Run, tmp_path: Path, kind: str) -> None:
    """As anybody can make one in /var/tmp, for root to write through."""
    target = tmp_path / "target"
    if kind != "dangling link":
        target.write_text("precious\n")
    tmp_path.chmod(0o1777)
    if kind == "hard link":
        (tmp_path / "file").hardlink_to(target)
    else:
        (tmp_path / "file").symlink_to(target)
    stdout, code, stderr = share(1)
    assert (stdout, code) == ("", 1)
    assert "link" in stderr
    assert not target.exists() if kind == "dangling link" else target.read_text() == "precious\n"


def test_what_is_put_there_in_the_moment_in_which_it_is_made_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, open_file = tmp_path / "target", os.open

    def overtaken(path: str, flags: int, mode: int = 0o777) -> int:
        try:
            return open_file(path, flags, mode)
        except FileNotFoundError:
            (tmp_path / "file").symlink_to(target)
            raise

    monkeypatch.setattr(os, "open", overtaken)
    with pytest.raises(coordination.CoordinationError, match="symbolic link"):
        coordination.occupy(str(tmp_path / "file"), ["0"], 1, coordination.ScriptOwner(os.getpid()))
    assert not target.exists()


def test_a_stranger_s_file_is_refused_where_everybody_may_make_one_and_taken_where_not(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ours, folder = (tmp_path / "file").stat(), tmp_path.stat()
    strangers = os.stat_result((*ours[:4], os.geteuid() + 4711, *ours[5:]))
    shared = os.stat_result((folder.st_mode | 0o1777, *folder[1:]))
    coordination._check("file", strangers, folder)
    coordination._check("file", ours, shared)
    with pytest.raises(coordination.CoordinationError, match="belongs to user"):
        coordination._check("file", strangers, shared)
