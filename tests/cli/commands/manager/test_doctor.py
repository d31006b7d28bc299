"""`outfitter doctor`: it finds what is wrong, says the remedy, and no check stops another."""

from __future__ import annotations

import json
import os
import re
import resource
import socket
import subprocess
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anyio
import pytest
from msgspec import structs

from outfitter_proto import codec, names
from outfitter_proto import topics as all_topics
from outfitter_proto.bus import Entry, connect
from outfitter_proto.partitioning import partition_of
from outfitter_proto.records import Host, ManagerIdentity
from outfitter_service.cli._lib.diagnosis import bus as bus_checks
from outfitter_service.cli._lib.diagnosis import machine as checks
from outfitter_service.cli._lib.diagnosis.checks import CHECKS
from outfitter_service.cli._lib.diagnosis.examination import examine
from outfitter_service.cli._lib.diagnosis.finding import Finding, Grade, Machine
from outfitter_service.runtime.changelog.topic_layout import backup_id
from outfitter_service.runtime.machine_lock import LockHolder, socket_name
from support.api import checkpoint
from support.documents import ROOT
from support.drivers.gpu_machine import executable
from support.kafka.broker import KafkaBroker
from support.kafka.small_disk import SmallDisk
from support.managers.process import OUTFITTER, StartManager, add_device
from support.processes.command_line import outfitter

pytestmark = pytest.mark.slow

GOLDEN = ROOT / "tests/wire/golden/v0.1"
NOWHERE = Machine(config=None, given={})


def doctor(folder: Path, text: str, **environment: str) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    """The exit code, and the findings by check. Without `http` in `text`, any free port."""
    if "http =" not in text:
        environment = {"OUTFITTER_HTTP": "127.0.0.1:0", **environment}
    (folder / "outfitter.toml").write_text(text)
    done = outfitter("doctor", "--config", "outfitter.toml", "--json", cwd=folder, environment=environment)
    return done.returncode, {item["check"]: item["findings"] for item in json.loads(done.stdout)["checks"]}


def test_all_is_well_on_a_bus_with_topics(tmp_path: Path) -> None:
    bus = f"sqlite:///{tmp_path}/bus/bus.db"
    assert outfitter("topics", "create", "--bus", bus, cwd=tmp_path).returncode == 0
    code, found = doctor(tmp_path, f'bus = "{bus}"\n')
    assert (code, found["configuration"], found["topics"], found["pidfd"]) == (0, [], [], [])


def test_a_disk_without_room_for_the_bus_is_named_with_what_is_free_and_what_is_needed(tmp_path: Path) -> None:
    folder = tmp_path / "disk/bus"  # of a mode of its own: everybody may write to the disk itself
    (config := tmp_path / "outfitter.toml").write_text(f'bus = "sqlite:///{folder}/bus.db"\nhttp = "127.0.0.1:0"\n')

    def run(disk: SmallDisk, *words: str) -> subprocess.CompletedProcess[str]:
        command = [*disk.within, *OUTFITTER, *words, "--config", str(config)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    def within(disk: SmallDisk, script: str) -> None:
        subprocess.run([*disk.within, "sh", "-c", script], check=True)

    with SmallDisk(folder.parent, megabytes=64) as disk:
        assert run(disk, "topics", "create").returncode == 0
        assert "is free" not in run(disk, "doctor").stdout
        within(disk, f"chmod 777 {folder}; head -c 54M /dev/zero > {folder}/nearly")
        done = run(disk, "doctor", "--json")
        room, modes = {item["check"]: item["findings"] for item in json.loads(done.stdout)["checks"]}["topics"]
        assert (done.returncode, room["verdict"]) == (1, "warning")
        assert "everybody may write" in modes["seen"]
        within(disk, f"chmod 700 {folder}; rm {folder}/nearly")
        disk.fill()
        done = run(disk, "doctor", "--json")
        assert done.returncode == 1
        [finding] = {item["check"]: item["findings"] for item in json.loads(done.stdout)["checks"]}["topics"]
        assert (finding["verdict"], finding["seen"]) == (
            "problem",
            f"the disk of {folder} has 0.0 MB free; the bus needs 16.8 MB for its write-ahead log",
        )
        assert "make room" in finding["remedy"]


def test_a_bus_that_is_not_there_is_not_checked_and_not_made(tmp_path: Path) -> None:
    code, found = doctor(tmp_path, f'bus = "sqlite:///{tmp_path}/bus/bus.db"\n')
    assert (code, found["topics"][0]["verdict"], found["rights"]) == (0, "not checked", [])
    assert "not checked" not in {item["verdict"] for item in found["managers"]}
    assert not (tmp_path / "bus").exists()


def test_the_page_has_each_check() -> None:
    page = (ROOT / "service" / "operate.md").read_text().partition("## Check the machine")[2].partition("\n## ")[0]
    told = [name for cell in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE) for name in re.findall(r"`(\w+)`", cell)]
    assert told == [check.__name__ for check in CHECKS]


def test_a_broker_that_refuses_is_a_problem(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        code, found = doctor(tmp_path, f'bus = "kafka://127.0.0.1:{taken.getsockname()[1]}"\n')
    assert (code, found["topics"][0]["verdict"], found["pidfd"]) == (1, "problem", [])
    assert [item["verdict"] for name in ("rights", "managers") for item in found[name][-1:]] == ["not checked"] * 2


def test_a_wrong_setting_is_a_problem_with_its_key(tmp_path: Path) -> None:
    code, found = doctor(tmp_path, f'bus = "sqlite:///{tmp_path}/bus/bus.db"\nhtpp = "x"\n')
    assert found["configuration"][0]["seen"].startswith("htpp"), (code, found)


def test_an_address_that_is_in_use_is_a_problem(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        text = f'bus = "sqlite:///{tmp_path}/bus/bus.db"\nhttp = "127.0.0.1:{taken.getsockname()[1]}"\n'
        code, found = doctor(tmp_path, text)
    assert (code, [item["verdict"] for item in found["address"]]) == (1, ["problem"])
    assert "Address already in use" in found["address"][0]["seen"]
    assert doctor(tmp_path, text)[1]["address"] == []


def test_the_address_of_the_running_manager_is_its_own(start_manager: StartManager, tmp_path: Path) -> None:
    manager = start_manager()
    address = manager.url.removeprefix("http://")
    text = f'bus = "{manager.bus_url}"\nhost = "{manager.host}"\nhttp = "{address}"\n'
    assert doctor(tmp_path, text)[1]["address"] == []
    assert doctor(tmp_path, text.replace(manager.host, "another"))[1]["address"][0]["verdict"] == "problem"


@pytest.mark.parametrize("wrong", ['host = "a b"', 'htpp = "x"', "not TOML"])
def test_what_needs_a_configuration_without_errors_is_said_to_be_not_checked(tmp_path: Path, wrong: str) -> None:
    text = f"""\
{wrong}
bus = "sqlite:///{tmp_path}/bus/bus.db"
external-resources = ["gpu"]
[kafka]
security-protocol = "SASL_PLAINTEXT"
sasl-username = "m"
sasl-password-file = "{tmp_path}/nowhere"
[external-resource.gpu]
amount = 1
driver = "files"
param.path = "{tmp_path}/nowhere"
"""
    code, found = doctor(tmp_path, text)
    assert code == 1
    for name in ("secrets", "drivers", "devices", "rights", "address"):
        assert found[name][-1]["verdict"] == "not checked", name
        assert found[name][-1]["remedy"].startswith("put right what `"), name


# --- files of secrets ---


def secret(folder: Path, password: Path) -> list[dict[str, Any]]:
    kafka = f'[kafka]\nsecurity-protocol = "SASL_PLAINTEXT"\nsasl-username = "m"\nsasl-password-file = "{password}"\n'
    return doctor(folder, f'bus = "sqlite:///{folder}/bus/bus.db"\n{kafka}')[1]["secrets"]


def test_a_secret_that_is_not_there_is_a_problem(tmp_path: Path) -> None:
    (found,) = secret(tmp_path, tmp_path / "nowhere")
    assert (found["verdict"], found["seen"]) == (
        "problem",
        f"kafka.sasl-password-file: {tmp_path}/nowhere is not there",
    )


def test_a_secret_that_others_may_change_is_a_warning(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("x")
    file.chmod(0o600)
    assert secret(tmp_path, file) == []
    file.chmod(0o602)
    (found,) = secret(tmp_path, file)
    assert (found["verdict"], "everybody may write" in found["seen"]) == ("warning", True)


def test_a_secret_that_everybody_may_read_is_a_warning_with_the_command_that_hides_it(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("x" * 16)
    file.chmod(0o604)
    _, found = doctor(tmp_path, f'bus = "sqlite:///{tmp_path}/bus/bus.db"\napi-token-file = "{file}"\n')
    assert [item["remedy"] for item in found["configuration"]] == [f"chmod o-r {file}"]


# --- drivers, their programs, and what they find ---


def found_devices(folder: Path, driver: str, **environment: str) -> list[dict[str, Any]]:
    text = f'external-resources = ["gpu"]\n[external-resource.gpu]\namount = 1\n{driver}\n'
    return doctor(folder, f'bus = "sqlite:///{folder}/bus/bus.db"\n{text}', **environment)[1]["devices"]


def test_a_program_that_a_driver_lacks_is_a_problem(tmp_path: Path) -> None:
    (found,) = found_devices(tmp_path, 'driver = "gpu"', PATH=str(tmp_path))
    assert found["verdict"] == "problem"
    assert found["seen"].startswith("gpu: its driver fails: cannot run nvidia-smi: No such file or directory")
    assert "outfitter discover gpu" in found["remedy"]


def test_a_driver_that_finds_nothing_and_an_ill_device_are_warnings(tmp_path: Path) -> None:
    (folder := tmp_path / "gpus").mkdir()
    driver = f'driver = "files"\nparam.path = "{folder}"'
    (found,) = found_devices(tmp_path, driver)
    assert (found["verdict"], found["seen"]) == ("warning", "gpu: its driver finds no device")
    add_device(folder, 0)
    assert found_devices(tmp_path, driver) == []
    add_device(folder, 1, health="unhealthy")
    (found,) = found_devices(tmp_path, driver)
    assert (found["verdict"], found["seen"].startswith("gpu: GPU-1 is unhealthy")) == ("warning", True)


def test_a_device_that_the_health_script_calls_ill_is_a_warning_with_its_reason(tmp_path: Path) -> None:
    (folder := tmp_path / "gpus").mkdir()
    add_device(folder, 0)
    script = executable(tmp_path / "check", "echo 91 degrees; exit 1")
    (found,) = found_devices(tmp_path, f'driver = "files"\nparam.path = "{folder}"\nparam.health-script = "{script}"')
    assert (found["verdict"], found["seen"]) == ("warning", "gpu: GPU-0 is unhealthy: health script: 91 degrees")


def test_names_for_which_a_hosts_record_has_no_room_are_a_problem_with_the_numbers(tmp_path: Path) -> None:
    (folder := tmp_path / "gpus").mkdir()
    for number in range(64):
        aliases = ";".join(f"{number}-{each}-".ljust(500, "n") for each in range(16))
        (folder / str(number)).write_text(f"id=GPU-{number}\naliases={aliases}\n")
    (found,) = found_devices(tmp_path, f'driver = "files"\nparam.path = "{folder}"')
    assert found["verdict"] == "problem"
    assert found["seen"].startswith("gpu: the report of the driver of gpu is refused: the names of its devices take 51")


def test_a_driver_that_hands_devices_out_is_not_asked(tmp_path: Path) -> None:
    script = tmp_path / "discovery"
    script.write_text(f"#!/bin/sh\ntouch {tmp_path}/asked\necho 0\n")
    script.chmod(0o755)
    assert found_devices(tmp_path, f'driver = "gpu"\nparam.discovery-script.path = "{script}"') == []
    assert not (tmp_path / "asked").exists()


# --- other managers ---


def elsewhere(folder: Path, host: str) -> list[Finding]:
    given = {"bus": f"sqlite:///{folder}/bus/bus.db", "host": host}
    found = bus_checks.managers(Machine(config=None, given=given))
    return [item for item in found if repr(host) in item.seen]


def write(folder: Path, *entries: Entry) -> None:
    """Write records of host gpu-3 to a new ledger."""

    async def commit() -> None:
        async with connect(f"sqlite:///{folder}/bus/bus.db") as bus:
            await all_topics.create(bus, "outfitter", partitions=2)
            async with await bus.open_writer("outfitter-host-gpu-3", partition_of("gpu-3", 2)) as writer:
                await writer.commit([(names.topics("outfitter").allocations, list(entries))])

    anyio.run(commit)


def test_a_manager_of_another_host_on_this_machine_is_a_warning(start_manager: StartManager, tmp_path: Path) -> None:
    manager = start_manager()
    given = {"bus": manager.bus_url, "host": manager.host}
    assert not [item for item in bus_checks.managers(Machine(None, given)) if repr(manager.host) in item.seen]
    found = [item for item in bus_checks.managers(Machine(None, given | {"host": "x"})) if manager.host in item.seen]
    assert [item.verdict for item in found] == [Grade.WARNING]
    assert found[0].seen.startswith(f"process {manager.pid} of user ")


def test_a_stranger_who_holds_the_lock_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stranger = LockHolder(uid=os.geteuid() + 4711, pid=7)
    monkeypatch.setattr("outfitter_service.runtime.machine_lock.holders", lambda: {socket_name("gpu-3"): stranger})
    (found,) = elsewhere(tmp_path, "gpu-3")
    assert (found.verdict, "RuntimeDirectory=" in found.remedy) == (Grade.WARNING, True)


@pytest.mark.parametrize(
    ("machine", "stopped", "number"), [("there", False, 1), ("here", False, 0), ("there", True, 0)]
)
def test_a_manager_of_this_host_on_another_machine_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, machine: str, stopped: bool, number: int
) -> None:
    now = datetime(2026, 1, 31, 12, tzinfo=UTC)
    manager = ManagerIdentity(
        instance="i", version="0.1.0", since=now, machine_id=machine, stopped_at=now if stopped else None
    )
    record = Host(host="gpu-3", manager=manager, since=now)

    write(tmp_path, Entry(record.key.encode(), codec.encode(record)))
    monkeypatch.setattr("outfitter_service.runtime.identity.machine_id", lambda: "here")
    found = elsewhere(tmp_path, "gpu-3")
    assert [item.verdict for item in found] == [Grade.PROBLEM] * number
    assert all("there serves host 'gpu-3' since 2026-01-31T12:00:00Z" in item.seen for item in found)
    assert all("--take-over" in item.remedy for item in found)


# --- the ledger ---


OF_HOST, OF_CLUSTER = 'host = "gpu-3"\n', 'scope = "cluster"\n'


def ledger_findings(folder: Path, text: str = OF_HOST) -> list[Finding]:
    file = folder / "outfitter.toml"
    file.write_text(text if "bus =" in text else f'bus = "sqlite:///{folder}/bus/bus.db"\n{text}')
    return list(bus_checks.ledger(Machine(config=str(file), given={})))


def test_a_ledger_with_which_a_manager_starts_is_well(start_manager: StartManager, tmp_path: Path) -> None:
    manager = start_manager()
    assert ledger_findings(tmp_path, f'bus = "{manager.bus_url}"\nhost = "{manager.host}"\n') == []


def test_managers_of_the_other_scope_are_a_problem(tmp_path: Path) -> None:
    record = checkpoint("host/gpu-3", partition=partition_of("gpu-3", 2))
    write(tmp_path, Entry(record.key.encode(), codec.encode(record)))
    (found,) = ledger_findings(tmp_path, OF_CLUSTER)
    assert found.verdict is Grade.PROBLEM
    assert "must not share topics" in found.seen
    assert "give it another --cluster" in found.remedy


def test_a_restored_ledger_is_a_problem_until_it_is_adopted(tmp_path: Path) -> None:
    restored = structs.replace(checkpoint("host/gpu-3"), ledger_id=backup_id(datetime(2026, 1, 31, tzinfo=UTC)))
    write(tmp_path, Entry(restored.key.encode(), codec.encode(restored)))
    (found,) = ledger_findings(tmp_path)
    assert (found.verdict, "restored from a backup of 2026-01-31" in found.seen) == (Grade.PROBLEM, True)
    assert "--adopt-ledger" in found.remedy


@pytest.mark.parametrize("scope", [OF_HOST, OF_CLUSTER])
def test_a_damaged_record_is_a_problem_with_the_command_that_continues_without_it(tmp_path: Path, scope: str) -> None:
    write(tmp_path, Entry(b"gpu-3/w/run-1", b'{"type":"allocation", broken'))
    (found,) = ledger_findings(tmp_path, scope)
    assert found.verdict is Grade.PROBLEM
    assert "outfitter ledger forget gpu-3/w/run-1" in found.remedy


@pytest.mark.parametrize(("scope", "writer"), [(OF_HOST, "host/gpu-3"), (OF_CLUSTER, "partition/1")])
def test_a_damaged_checkpoint_is_a_problem_that_a_backup_ends(tmp_path: Path, scope: str, writer: str) -> None:
    write(tmp_path, Entry(f"@checkpoint/{writer}".encode(), b'{"type":"checkpoint", broken'))
    (found,) = ledger_findings(tmp_path, scope)
    assert found.verdict is Grade.PROBLEM
    assert "restore a backup" in found.remedy
    assert "ledger forget" not in found.remedy


def test_a_record_of_an_earlier_version_that_lacks_names_is_a_problem_while_somebody_holds_a_device(
    tmp_path: Path,
) -> None:
    host = codec.decode_ledger((GOLDEN / "host-with-names-left-out.json").read_bytes())
    holder = codec.decode_ledger((GOLDEN / "allocation-allocated.json").read_bytes())
    write(tmp_path, *(Entry(record.key.encode(), codec.encode(record)) for record in (host, holder)))
    (found,) = ledger_findings(tmp_path)
    assert found.verdict is Grade.PROBLEM
    assert found.remedy.startswith(f"End these holders first: {holder.key}.")


# --- the machine ---


def test_a_wrong_bus_is_said_once_and_stops_no_other_check(tmp_path: Path) -> None:
    code, found = doctor(tmp_path, 'bus = "nonsense://x"\n')
    assert code == 1
    assert [found[name][-1]["verdict"] for name in ("topics", "rights", "managers", "ledger")] == [
        "problem", "not checked", "not checked", "not checked",
    ]  # fmt: skip
    assert found["pidfd"] == []


def test_a_driver_that_prints_does_not_spoil_the_answer(tmp_path: Path) -> None:
    (tmp_path / "chatty.py").write_text(
        "from outfitter_drivers.files import FilesDriverFactory\n"
        "class Chatty(FilesDriverFactory):\n"
        "    def create_external_resource_driver(self, config):\n"
        "        print('hello')\n"
        "        return super().create_external_resource_driver(config)\n"
    )
    (tmp_path / "gpus").mkdir()
    driver = f'driver = "chatty:Chatty"\nparam.path = "{tmp_path}/gpus"'
    (found,) = found_devices(tmp_path, driver, PYTHONPATH=str(tmp_path))
    assert found["seen"] == "gpu: its driver finds no device"


def test_a_check_that_fails_or_never_ends_stops_no_other() -> None:
    def never(_machine: Machine) -> Iterator[Finding]:
        threading.Event().wait()
        yield Finding(Grade.OK, "", "")

    def fails(_machine: Machine) -> Iterator[Finding]:
        raise OSError("no such thing")
        yield

    def well(_machine: Machine) -> Iterator[Finding]:
        return
        yield

    found = examine([never, fails, well], NOWHERE, within=1.0)
    assert [item.verdict for item in found["never"]] == [Grade.PROBLEM]
    assert found["fails"][0].seen == "no such thing"
    assert found["well"] == []


@pytest.mark.parametrize(
    ("limit", "verdicts"), [(64, [Grade.PROBLEM]), (1_024, [Grade.WARNING]), (4_096, []), (-1, [])]
)
def test_a_low_limit_of_open_files_is_found(monkeypatch: pytest.MonkeyPatch, limit: int, verdicts: list[Grade]) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (limit, limit))
    assert [item.verdict for item in checks.descriptors(NOWHERE)] == verdicts


def test_a_kernel_without_pidfd_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_pid: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    assert list(checks.pidfd(NOWHERE)) == []
    monkeypatch.setattr(os, "pidfd_open", refuse)
    assert [item.verdict for item in checks.pidfd(NOWHERE)] == [Grade.WARNING]


def test_a_proc_that_hides_others_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(checks.processes(NOWHERE)) == []
    monkeypatch.setattr("outfitter_service.runtime.liveness.process_table.start_seen", lambda _pid: None)
    assert [item.verdict for item in checks.processes(NOWHERE)] == [Grade.WARNING]


@pytest.mark.kafka
def test_missing_topics_on_a_broker_are_problems_until_they_are_made(kafka_broker: KafkaBroker, tmp_path: Path) -> None:
    cluster = kafka_broker.new_cluster()
    text = f'bus = "{kafka_broker.url}"\ncluster = "{cluster}"\n'
    code, found = doctor(tmp_path, text)
    assert (code, {item["verdict"] for item in found["topics"]}) == (1, {"problem", "warning"})
    assert f"{cluster}.registrations: (topic) is missing, must be present" in {item["seen"] for item in found["topics"]}
    for optional in ("managers", "control"):
        seen = f"{cluster}.{optional}: (topic) is missing, should be present"
        assert [item["verdict"] for item in found["topics"] if item["seen"] == seen] == ["warning"]
    done = outfitter("topics", "create", "--bus", kafka_broker.url, "--cluster", cluster, cwd=tmp_path)
    assert done.returncode == 0
    assert not [item for item in doctor(tmp_path, text)[1]["topics"] if item["verdict"] == "problem"]
