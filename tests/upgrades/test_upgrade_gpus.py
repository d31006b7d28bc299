"""A fleet of the last release whose workers hold GPUs goes over to this version, manager by manager, under load.

The last release lends by nvidia-smi and knows neither MIG nor choices: it lends a card in MIG mode as a whole. This
version finds the same GPUs by NVML, lends MIG instances as parts, and lets workers choose. On each host one worker's
program stays at the last release. Then managers go back, and are refused where the ledger needs what that one does not
know.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import pytest

from outfitter_drivers.nvidia.testing import FakeGpu, FakeInstance
from outfitter_proto.bus import connect
from outfitter_proto.names import topics
from outfitter_proto.partitioning import partition_of
from outfitter_proto.records import Allocation, Host
from outfitter_service.query import ledger_view
from support.bus.committed import committed
from support.drivers.pretended_gpus import PretendedGpus
from support.kafka.broker import KafkaBroker
from support.managers.process import OUTFITTER, Manager
from support.managers.upgrading import EARLIER, WITHIN_S, Fleet, Load, Work
from support.polling import until

pytestmark = [pytest.mark.upgrade, pytest.mark.kafka, pytest.mark.timeout(900)]

PARTITIONS = 2
IGNORES = "(version 0.2.0) ignores where and same, and would grant any device: upgrade it"
SMALL, LARGE = "NVIDIA A100-SXM4-40GB", "NVIDIA H200"
CONFIG = """
lease = "20s"
lease-grace = "5s"
external-resources = ["gpu"]
[external-resource.gpu]
amount = 1
driver = "gpu"
param.poll-interval = "1s"
"""
SLOT = """
[external-resource.slot]
amount = 1
driver = "static"
param.devices = "slot-0"
replicas = 2
"""
OLD_PROPERTIES = {"id", "index", "local_index", "uuid", "model", "memory.total_bytes", "pci.bus_id"}
MIG = 3
"""The number of the GPU that is in MIG mode from the beginning, where one is."""


def instances(number: int) -> list[FakeInstance]:
    """Two of a GPU. Their names begin as that of `FakeGpu` does: see `CLAIM`."""
    return [
        FakeInstance(slot=slot, uuid=f"MIG-{number:08x}-0000-4000-8000-{slot:012x}", gpu_instance=slot + 1)
        for slot in range(2)
    ]


def gpus(*, count: int = 4, with_mig: bool) -> list[FakeGpu]:
    """The first half are small ones."""
    made = [
        FakeGpu(number, name=SMALL, memory_mib=40960) if number < count // 2 else FakeGpu(number, name=LARGE)
        for number in range(count)
    ]
    if with_mig:
        made[MIG] = FakeGpu(MIG, name=LARGE, mig=(1, 1), instances=instances(MIG))
    return made


class Holder(NamedTuple):
    """A job that has a GPU until it is told to end."""

    worker: str
    device: str
    process: subprocess.Popen[str]


class Site:
    """The fleet, its GPUs and its load."""

    def __init__(self, broker: KafkaBroker, folder: Path, machines: Mapping[str, list[FakeGpu]]) -> None:
        self.cluster = broker.new_cluster()
        self.bus = broker.url
        names = {name: f"{self.cluster}-{name}" for name in machines}
        self.gpus = {names[name]: PretendedGpus(folder / name, machines[name]) for name in machines}
        self.hosts = list(self.gpus)
        self.programs = {
            host: machine.program_without_nvml if host.endswith("-smi") else machine.program
            for host, machine in self.gpus.items()
        }
        self.fleet = Fleet(
            {
                host: Manager(
                    folder / host, CONFIG, bus=self.bus, host=host, cluster=self.cluster, program=EARLIER,
                    variables={"PATH": self.gpus[host].path},
                )
                for host in self.hosts
            }
        )  # fmt: skip
        self._started: list[subprocess.Popen[str]] = []
        self._variables = {"OUTFITTER_BUS": self.bus, "OUTFITTER_CLUSTER": self.cluster}
        works = [Work(host, "old", EARLIER) for host in self.hosts]
        works += [self.chooser(host) for host in self.hosts[:2]]
        works += [Work(host, "new", OUTFITTER) for host in self.hosts[2:]]
        self.load = Load(folder, self._variables, works, refusal=IGNORES)

    def chooser(self, host: str, where: str = "gpu:model~A100", fits: str | None = None) -> Work:
        """A worker that takes small GPUs only, unless `where` says otherwise."""
        small = " ".join(self.gpus[host].uuids(SMALL))
        asks = ("--resource", "gpu=1", "--where", where)
        return Work(host, "chooses", OUTFITTER, asks, small if fits is None else fits)

    def started(self, work: Work, worker: str, then: str, *options: str) -> subprocess.Popen[str]:
        """A worker of its own."""
        process = subprocess.Popen(
            self.load.command(work, worker, then, *options), env=self.load.environment(work),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._started.append(process)
        return process

    @contextmanager
    def leaving_nobody(self) -> Iterator[None]:
        """End in any case whom it has started."""
        try:
            yield
        finally:
            for process in self._started:
                process.kill()
                process.wait()

    def ended(self, work: Work, worker: str, *options: str) -> tuple[int, str]:
        """How a worker ended, and what it said."""
        process = self.started(work, worker, "", *options)
        _, said = process.communicate(timeout=WITHIN_S)
        return process.returncode, said

    def administer(self, program: tuple[str, ...], *arguments: str) -> subprocess.CompletedProcess[str]:
        env = self.load.environment(Work(self.hosts[0], "", program))
        return subprocess.run([*program, *arguments], env=env, capture_output=True, text=True, timeout=WITHIN_S)

    @contextmanager
    def holders(self, numbers: Mapping[str, tuple[int, ...]]) -> Iterator[dict[tuple[str, int], Holder]]:
        """Jobs of the last release that hold the GPUs with these numbers of each host, and compute there."""
        with ExitStack() as stack:
            found: dict[tuple[str, int], Holder] = {}
            for host, wanted in numbers.items():
                while not {(host, number) for number in wanted} <= found.keys():
                    job = stack.enter_context(self._job(host, f"job-{len(found)}"))
                    found[host, self.gpus[host].number(job.device)] = job
            for host, number in list(found):
                if number not in numbers[host]:
                    self.end(host, found.pop((host, number)))
            yield found

    @contextmanager
    def _job(self, host: str, worker: str) -> Iterator[Holder]:
        then = "echo $$ $CUDA_VISIBLE_DEVICES; read end; exit 0"
        with self.started(Work(host, "job", EARLIER), worker, then) as process:
            try:
                words = process.stdout.readline().split() if process.stdout else []
                assert len(words) == 2, process.communicate()
                self._computes(host, words[1], [int(words[0])])
                yield Holder(worker, words[1], process)
            finally:
                process.kill()

    def end(self, host: str, holder: Holder) -> None:
        """Have a job end its computation, and itself."""
        self._computes(host, holder.device, [])
        _, said = holder.process.communicate("\n", timeout=WITHIN_S)
        assert holder.process.returncode == 0, said

    def _computes(self, host: str, device: str, pids: list[int]) -> None:
        """CUDA computes on the first instance of a card in MIG mode."""
        machine = self.gpus[host]
        number = machine.number(device)
        of = machine.fake.state.gpus[number].instances
        if of:
            of[0].processes = pids
            machine.change(number, instances=of)
        else:
            machine.change(number, processes=pids)

    # --- what stands in the ledger ---

    def ledger(self) -> ledger_view.LedgerView:
        async def read() -> ledger_view.LedgerView:
            async with connect(self.bus) as bus:
                return await ledger_view.read(bus, self.cluster)

        return anyio.run(read)

    def record(self, host: str) -> Host:
        found = self.ledger().hosts_record(host)
        assert found is not None
        return found

    def allocation(self, host: str, worker: str) -> Allocation | None:
        """The newest record of a worker."""
        found = [each.record for each in self.ledger().allocations_of(host) if each.record.worker == worker]
        return found[-1] if found else None

    def until(self, host: str, worker: str, state: str) -> None:
        """Wait until a worker is in this state."""

        def look() -> bool:
            self.load.check()
            record = self.allocation(host, worker)
            return record is not None and record.state == state

        until(look, lambda: f"{self.allocation(host, worker)}")

    def grant(self, host: str, worker: str) -> tuple[Any, ...]:
        """What a worker was granted. This version adds properties."""
        record = self.allocation(host, worker)
        assert record is not None
        infos = [
            {name: value for name, value in info.items() if name in OLD_PROPERTIES} for info in record.resources["gpu"]
        ]
        return record.state, record.token, record.env, record.aliases, infos

    def has_registered(self, host: str, worker: str) -> bool:
        async def read() -> bool:
            async with connect(self.bus) as bus:
                topic = topics(self.cluster).registrations
                messages = await committed(bus, topic, partition_of(host, PARTITIONS))
            return any(json.loads(each.value or b"{}").get("worker") == worker for each in messages)

        return anyio.run(read)

    def needs(self, host: str) -> list[str]:
        return list(self.ledger().checkpoints[f"host/{host}"].needs or ())


def test_gpus_held_by_ids_of_the_last_release_are_lent_once_and_choices_are_never_granted_wrongly(
    kafka_broker: KafkaBroker, tmp_path: Path
) -> None:
    machines = {"nvml": gpus(with_mig=True), "smi": gpus(with_mig=True), "back": gpus(count=8, with_mig=False)}
    site = Site(kafka_broker, tmp_path, machines)
    by_nvml, by_smi, back = site.hosts
    created = site.administer(EARLIER, "topics", "create", "--partitions", str(PARTITIONS))
    assert created.returncode == 0, created.stderr
    with site.fleet.ended(), site.leaving_nobody():
        site.fleet.started()
        numbers = {by_nvml: (0, MIG), by_smi: (0, MIG), back: (0, 1)}
        with site.holders(numbers) as held, site.load.running():
            site.load.goes_on(refused={(by_nvml, "chooses"), (by_smi, "chooses")})

            goes_over(site, by_nvml, site.programs[by_nvml], held)
            instances_are_lent_after_their_gpu(site, by_nvml, held)
            site.load.goes_on(refused={(by_smi, "chooses")})
            goes_back_and_is_refused(site, by_nvml, "choices", "parts")

            goes_over(site, by_smi, site.programs[by_smi], held)
            site.load.goes_on()
            a_gpu_in_mig_mode_is_lent_to_nobody(site, by_smi, held)
            somebody_waits_for_certain_gpus(site, by_smi)
            goes_back_and_is_refused(site, by_smi, "choices")
            replicas_come_in(site, by_smi)

            goes_over(site, back, site.programs[back], held)
            site.load.goes_on()
            somebody_chooses_and_does_not_wait(site, back)
            goes_back_and_serves(site, back, held)
            goes_over(site, back, site.programs[back], held)
            instances_come_in(site, back, 7)
            site.load.goes_on()
        site.load.check()
        report = site.administer(OUTFITTER, "verify", "--json")
        assert report.returncode == 0, report.stdout + report.stderr
        print(f"well: {dict(site.load.well)}; refused: {dict(site.load.refused)}")


def goes_over(site: Site, host: str, program: tuple[str, ...], held: Mapping[tuple[str, int], Holder]) -> None:
    """A manager of this version serves the host; who holds a GPU keeps it as it was granted."""
    workers = [job.worker for (of, _), job in held.items() if of == host]
    grants = {worker: site.grant(host, worker) for worker in workers}
    before = {device.id: device for device in site.record(host).resources["gpu"].devices}
    assert not [each for each in site.ledger().allocations_of(host) if each.record.worker.startswith("chooses")]
    site.fleet.exchange(host, program)
    assert grants == {worker: site.grant(host, worker) for worker in workers}
    after = {device.id: device for device in site.record(host).resources["gpu"].devices}
    whole = {gpu.uuid for gpu in site.gpus[host].fake.state.gpus if gpu.instances}
    assert before.keys() - after.keys() <= whole
    for name in before.keys() & after.keys():
        known, now = before[name].properties, after[name].properties
        assert OLD_PROPERTIES & known.keys() == OLD_PROPERTIES & now.keys()
        assert not {key for key in known.keys() & now.keys() if known[key] != now[key]}
        assert after[name].health == "healthy" or "MIG" in (after[name].reason or ""), after[name]


def instances_are_lent_after_their_gpu(site: Site, host: str, held: Mapping[tuple[str, int], Holder]) -> None:
    """The last release has lent the whole card, and knew no instances of it."""
    wanted = [each.uuid for each in instances(MIG)]
    assert set(wanted) <= {device.id for device in site.record(host).resources["gpu"].devices}
    waits = site.started(site.chooser(host, "gpu:mig.profile=1g.18gb", " ".join(wanted)), "wants-a-part", "")
    site.until(host, "wants-a-part", "pending")
    site.load.goes_on(refused={(site.hosts[1], "chooses")})
    site.until(host, "wants-a-part", "pending")
    assert not [device for device in site.record(host).resources["gpu"].devices if device.used_by]
    site.end(host, held[host, MIG])
    _, said = waits.communicate(timeout=WITHIN_S)
    assert waits.returncode == 0, said


def a_gpu_in_mig_mode_is_lent_to_nobody(site: Site, host: str, held: Mapping[tuple[str, int], Holder]) -> None:
    """nvidia-smi does not tell enough of it; who has it as a whole keeps it."""
    job = held[host, MIG]
    lent = site.load.lent(host, job.device)
    site.end(host, job)
    site.load.goes_on()
    (device,) = [device for device in site.record(host).resources["gpu"].devices if device.id == job.device]
    assert device.health == "unknown", device
    assert "it is in MIG mode" in (device.reason or "")
    assert site.load.lent(host, job.device) == lent


def somebody_waits_for_certain_gpus(site: Site, host: str) -> None:
    work = site.chooser(host)._replace(asks=("--resource", "gpu=2", "--where", "gpu:model~A100"))
    code, said = site.ended(work, "waits", "--wait", "3s")
    assert code == 124, said


def somebody_chooses_and_does_not_wait(site: Site, host: str) -> None:
    """There are more GPUs than anybody uses, so that the ledger needs nothing: no choice waits in it."""
    every = " ".join(gpu.uuid for gpu in site.gpus[host].fake.state.gpus)
    code, said = site.ended(site.chooser(host, "gpu:memory.total_bytes=30Gi..", every), "takes-any")
    assert code == 0, said
    assert site.needs(host) == []


def goes_back_and_serves(site: Site, host: str, held: Mapping[tuple[str, int], Holder]) -> None:
    """A worker chooses while no manager says that it ignores that."""
    manager = site.fleet.managers[host]
    assert manager.stop() == 0
    chooses = site.started(site.chooser(host, "gpu:model~B200", ""), "wants-none", "", "--wait-for-manager")
    until(lambda: site.has_registered(host, "wants-none"), str)
    goes_over(site, host, EARLIER, held)
    _, said = chooses.communicate(timeout=WITHIN_S)
    assert chooses.returncode == 125, said
    assert "gpu was granted without regard to where and same" in said
    code, said = site.ended(site.chooser(host), "comes-late")
    assert code == 125, said
    assert IGNORES in said
    assert not site.has_registered(host, "comes-late")
    site.load.goes_on()


def instances_come_in(site: Site, host: str, number: int) -> None:
    """From then on the ledger needs `parts`, whether or not anybody has one."""
    wanted = instances(number)
    site.gpus[host].change(number, mig=(1, 1), instances=wanted)
    until(lambda: site.needs(host) == ["parts"], lambda: f"{site.record(host)}")
    goes_back_and_is_refused(site, host, "parts")
    work = site.chooser(host, "gpu:mig.profile=1g.18gb", " ".join(each.uuid for each in wanted))
    code, said = site.ended(work, "takes-a-part")
    assert code == 0, said


def replicas_come_in(site: Site, host: str) -> None:
    """Both programs have one of them at once."""
    manager = site.fleet.managers[host]
    manager.config.write_text(CONFIG.replace('["gpu"]', '["gpu", "slot"]') + SLOT)
    site.fleet.exchange(host, site.programs[host])
    for name, program in (("old", EARLIER), ("new", OUTFITTER)):
        wanted = ("--worker", f"{name}-slot", "--resource", "slot=1", "--lease", "none", "--wait", "60")
        done = site.administer(program, "register", "--host", host, *wanted)
        assert done.returncode == 0, done.stderr
    for worker in ("old-slot", "new-slot"):
        site.until(host, worker, "allocated")
    assert site.needs(host) == ["choices", "parts"]


def goes_back_and_is_refused(site: Site, host: str, *needs: str) -> None:
    """Then it goes on with this version."""
    refused = site.fleet.refused(host, EARLIER)
    assert "has format 2" in refused, refused
    assert site.needs(host) == list(needs)
    site.fleet.exchange(host, site.programs[host])
