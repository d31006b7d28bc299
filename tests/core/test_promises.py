"""The promises under random events, failed commits and crashes between any two steps, replayed."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from msgspec import UNSET, structs

from outfitter_proto.keys import allocation_key
from outfitter_proto.records import (
    FINAL_STATES,
    NO_TOKEN,
    Condition,
    CordonOrder,
    Deregister,
    Health,
    Heartbeat,
    Owner,
    Register,
    ResourceRequest,
    Survivors,
    Unwatched,
)
from outfitter_service.core import delays
from outfitter_service.core import model as m
from outfitter_service.core.decide import Rules
from support.core.core_driver import HOST
from support.core.world import WHOLES, World, known

pytestmark = pytest.mark.timeout(600)  # 250 examples take as long as a busy machine lets them

OWNER = Owner(pid=1, start_ticks=1, pid_ns=1, boot_id="b")
SIGHTS: st.SearchStrategy[delays.Sight] = st.sampled_from([("b", 1), ("b", 2)])
"""Where a manager sees the processes of `OWNER`, and where it does not."""
WORKERS = st.sampled_from(["v", "w", "x", "y", "z"])
INCARNATIONS = st.sampled_from(["1", "2", "3"])
AMOUNTS = st.integers(1, 3)
BURST = 6
RESOURCES = {
    "gpu": ["g0", "g1", "g2", "g3"],
    "fpga": ["f0", "p0"],
    "cuda": ["g2", "p0", "x1"],
    "net": ["n0", "n1"],
    "mon": ["g2", "g0", "m0"],
    "disk": ["d0", "g3", "d2"],
    "part": ["g0.0", "g0.1", "g2.0"],
    "slice": ["g0.0", "g2.0", "s0"],
    "half": ["g0", "g3", "h0"],
    "npu": ["u0", "u1", "u2"],
    "tpu": ["u0", "u1", "u2"],
}
"""Some of them show the same devices, under the same or another name. `part` shows parts of them, and so does `slice`,
which does not know that. `half` has replicas. `npu` and `tpu` are one resource: its devices may
have other ids at any time, and when the manager starts again, it may be renamed."""
INVENTORIES = ["gpu", "fpga", "cuda", "net", "mon"]
TURNED = ["cuda", "net", "mon"]
"""What is shared or exclusive as the configuration has it, besides `npu` and `tpu`."""
PARTED = ["part", "slice", "half", "gpu", "cuda", "mon", "disk"]
"""What shows parts, wholes and replicas."""
HEALTH = st.sampled_from([Health.HEALTHY, Health.HEALTHY, Health.HEALTHY, Health.UNHEALTHY, Health.UNKNOWN])
STRANGERS = st.sampled_from([None, None, None, None, "process 7 (x) of ada", "process 8 (y) of bob"])
"""Who uses a device to whom it was not lent."""
UNTOLD = st.sampled_from([None, None, "its library is too old"])

REQUESTS = st.one_of(
    st.none(),
    st.dictionaries(st.sampled_from(["gpu", *RESOURCES]), AMOUNTS, max_size=4),
    st.dictionaries(st.sampled_from(["gpu", "cuda", "mon"]), AMOUNTS, min_size=1, max_size=3),
    st.dictionaries(st.sampled_from(["npu", "tpu"]), AMOUNTS, min_size=1, max_size=1),
)
OPERATORS = st.one_of(
    st.none(),
    st.dictionaries(
        st.sampled_from(["one", "two"]),
        st.dictionaries(st.sampled_from(["gpu", *TURNED]), AMOUNTS, max_size=2),
        min_size=1,
    ),
)


WHAT = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"resource": st.sampled_from([*RESOURCES])}),
    st.fixed_dictionaries({"device": st.sampled_from(["g0", "g1", "p0", "x1", "f0", "n0", "m0", "d0", "u0", "zz"])}),
)
"""What an order takes out."""
CHOICES = st.dictionaries(
    st.sampled_from(["gpu", "cuda", "mon", "fpga"]),
    st.fixed_dictionaries(
        {},
        optional={
            "where": st.sampled_from([{"colour": "red"}, {"colour": Condition(not_="red")}, {"group": "b"}, {}]),
            "same": st.sampled_from([("group",), ("group", "colour")]),
        },
    ),
    max_size=2,
)
"""Which devices somebody takes."""
LONG = st.sampled_from([0, 0, 0, 100, 700, 3000])
"""How long another name of each reported device is; 0: it has none."""


def named_at_length(one: m.KnownDevice, long: int) -> m.KnownDevice:
    """The device with another name of this length."""
    return structs.replace(one, aliases=(*one.aliases, f"{one.id}-".ljust(long, "n"))) if long else one


def requests(amounts: dict[str, int], choices: dict[str, dict[str, Any]] | None = None) -> dict[str, ResourceRequest]:
    chosen = choices or {}
    return {name: ResourceRequest(amount=amount, **chosen.get(name, {})) for name, amount in amounts.items()}


class Core(RuleBasedStateMachine):
    """Workers, drivers, watchers and a failing bus around one core."""

    renamings = 0
    parted = False
    """Whether there are resources with parts."""

    @initialize(
        chunk=st.sampled_from([1, 2, 4, 100]),
        reported=st.booleans(),
        prepares=st.booleans(),
        confirms=st.booleans(),
        on_failure=st.sampled_from(m.OnFailure),
        npu_shared=st.booleans(),
        min_healthy_s=st.sampled_from([0, 0, 4, 50]),
        parted=st.booleans(),
        repeats=st.booleans(),
        disk_state=st.sampled_from([m.SpecState.OK, m.SpecState.OK, m.SpecState.MISCONFIGURED]),
        bounds=st.sampled_from(
            [
                {},
                {},
                {"max_waiting": 2},
                {"max_final": 1},
                {"max_incarnations": 2},
                {"max_live": 1},
                {"max_bytes": 4000},
            ]
        ),
    )
    def begin(
        self,
        chunk: int,
        reported: bool,
        prepares: bool,
        confirms: bool,
        on_failure: m.OnFailure,
        npu_shared: bool,
        min_healthy_s: int,
        parted: bool,
        repeats: bool,
        disk_state: m.SpecState,
        bounds: dict[str, int],
    ) -> None:
        specs = [
            m.ResourceSpec(name="gpu", amount=1, prepares=prepares, on_failure=on_failure, min_healthy_s=min_healthy_s),
            m.ResourceSpec(name="fpga", amount=1, confirms=confirms),
            m.ResourceSpec(name="cuda", amount=1, on_failure=on_failure),
            m.ResourceSpec(name="net", amount=1, shared=True, min_healthy_s=min_healthy_s),
            m.ResourceSpec(name="mon", amount=1, shared=True),
            m.ResourceSpec(name="disk", amount=1, on_demand=True, on_failure=on_failure, state=disk_state),
            m.ResourceSpec(name="npu", amount=1, confirms=confirms, shared=npu_shared),
        ]
        self.parted = parted
        specs.append(m.ResourceSpec(name="half", amount=1, replicas=2, replicas_same_device=repeats))
        if parted:
            specs += [m.ResourceSpec(name="part", amount=1), m.ResourceSpec(name="slice", amount=1)]
        rules = Rules(writer="host/h", specs={spec.name: spec for spec in specs}, chunk=chunk, retention_s=50, **bounds)
        self.world = World(rules)
        if reported:
            self.report_all()

    # --- workers ---

    @rule(
        worker=WORKERS,
        incarnation=INCARNATIONS,
        amounts=REQUESTS,
        operators=OPERATORS,
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        wait_s=st.sampled_from([None, None, 0.0, 5.0]),
        choices=st.just({}) | CHOICES,
    )
    def register(
        self,
        worker: str,
        incarnation: str,
        amounts: dict[str, int] | None,
        operators: dict[str, dict[str, int]] | None,
        priority: int,
        wait_s: float | None,
        choices: dict[str, dict[str, Any]],
    ) -> None:
        fields: dict[str, Any] = {
            "resources": None if amounts is None else requests(amounts, choices),
            "operators": {name: requests(wanted) for name, wanted in (operators or {}).items()} or None,
            "priority": priority,
            "wait_s": wait_s,
        }
        self.world.message(Register(host=HOST, worker=worker, incarnation=incarnation, **fields))

    @rule(worker=WORKERS, amounts=st.dictionaries(st.sampled_from(TURNED), AMOUNTS, min_size=1, max_size=2))
    def register_operators(self, worker: str, amounts: dict[str, int]) -> None:
        """Two operators that want all that their worker does: they can have it where it is shared."""
        wanted = requests(amounts)
        run = f"run-{self.world.offset}"
        operators = {"one": wanted, "two": wanted}
        self.world.message(Register(host=HOST, worker=worker, incarnation=run, resources=wanted, operators=operators))

    @rule(
        worker=WORKERS, incarnation=INCARNATIONS, code=st.sampled_from(Unwatched), lease_s=st.sampled_from([None, 5.0])
    )
    def be_silent(self, worker: str, incarnation: str, code: Unwatched, lease_s: float | None) -> None:
        """Nobody will send heartbeats for somebody whose owner cannot be watched."""
        self.world.message(
            Register(
                host=HOST, worker=worker, incarnation=incarnation, resources=requests({"gpu": 1}), owner=OWNER,
                lease_s=lease_s, heartbeats=False,
            )
        )  # fmt: skip
        self.cannot_watch(worker, incarnation, code)

    @rule(worker=WORKERS, resource=st.sampled_from(["gpu", "npu"]), dies=st.booleans(), committed=st.booleans())
    def leave_processes_behind(self, worker: str, resource: str, dies: bool, committed: bool) -> None:
        """Somebody whose survivors count comes and goes."""
        run, wanted = f"run-{self.world.offset}", requests({resource: 1})
        survivors = Survivors(uid=0)
        self.world.message(
            Register(host=HOST, worker=worker, incarnation=run, resources=wanted, owner=OWNER, survivors=survivors)
        )
        if committed:
            self.world.commit()
        if dies:
            self.world.say(m.OwnerDied(allocation=f"{HOST}/{worker}/{run}", detail="gone"))
        else:
            self.world.message(Deregister(host=HOST, worker=worker, incarnation=run))

    @rule(worker=WORKERS, dies=st.booleans(), sees=SIGHTS, ends=st.sampled_from(["dies", "leaves", "is silent"]))
    def lose_sight(self, worker: str, dies: bool, sees: delays.Sight, ends: str) -> None:
        """The manager has named what somebody has left behind, and starts again where it may not see that."""
        world, run = self.world, f"run-{self.world.offset}"
        key = allocation_key(HOST, worker, run)
        self.leave_processes_behind(worker, "gpu", dies, committed=True)
        record = world.ledger.allocations.get(key)
        token = record.token or NO_TOKEN if record is not None else NO_TOKEN
        world.say(m.ReleaseDelayed(allocation=key, token=token, reason="process 8 still runs"))
        world.commit()
        self.crash(sees)
        if world.is_out_of_sight(key):
            world.commands = [command for command in world.commands if command.allocation != key]
        if ends == "leaves":
            world.message(Deregister(host=HOST, worker=worker, incarnation=run))
        else:
            world.say(m.OwnerDied(allocation=key, detail="gone") if ends == "dies" else m.LeaseExpired(allocation=key))

    @rule(worker=WORKERS, incarnation=INCARNATIONS)
    def heartbeat(self, worker: str, incarnation: str) -> None:
        self.world.message(Heartbeat(host=HOST, worker=worker, incarnation=incarnation))

    @rule(worker=WORKERS, incarnation=st.one_of(st.none(), INCARNATIONS))
    def deregister(self, worker: str, incarnation: str | None) -> None:
        self.world.message(Deregister(host=HOST, worker=worker, incarnation=incarnation))

    @rule(worker=WORKERS, incarnation=INCARNATIONS, dead=st.booleans())
    def end(self, worker: str, incarnation: str, dead: bool) -> None:
        key = f"{HOST}/{worker}/{incarnation}"
        self.world.say(m.OwnerDied(allocation=key, detail="gone") if dead else m.LeaseExpired(allocation=key))

    @rule(worker=WORKERS, incarnation=INCARNATIONS, code=st.sampled_from(Unwatched))
    def cannot_watch(self, worker: str, incarnation: str, code: Unwatched) -> None:
        key = f"{HOST}/{worker}/{incarnation}"
        self.world.say(m.OwnerUnwatched(allocation=key, code=code, reason="cannot", lease_s=7.0))

    @rule(
        wanted=st.lists(
            st.dictionaries(st.sampled_from(["gpu", "cuda", "fpga", "mon"]), AMOUNTS, min_size=1, max_size=2),
            min_size=5,
            max_size=5,
        ),
        choices=st.lists(CHOICES, min_size=5, max_size=5),
        incarnation=st.sampled_from(["8", "9"]),
    )
    def crowd(self, wanted: list[dict[str, int]], choices: list[dict[str, dict[str, Any]]], incarnation: str) -> None:
        """Everybody wants the same devices at once."""
        for worker, amounts, chosen in zip("zyxwv", wanted, choices, strict=True):
            resources = requests(amounts, chosen)
            message = Register(host=HOST, worker=worker, incarnation=incarnation, resources=resources)
            self.world.message(message)

    @rule(
        resource=st.sampled_from(["gpu", "gpu", "cuda"]),
        choices=st.lists(st.sampled_from([{}, {"where": {"colour": "red"}}, {"where": {"group": "b"}}]), min_size=3),
        incarnation=st.sampled_from(["6", "7"]),
    )
    def choose_in_turn(self, resource: str, choices: list[dict[str, Any]], incarnation: str) -> None:
        """One has a device, the next waits for two, and others come behind it who want other ones."""
        for worker, amount, choice in zip("xyzvw", [1, 2, 1, 1, 2], choices, strict=False):
            resources = requests({resource: amount}, {resource: choice})
            message = Register(host=HOST, worker=worker, incarnation=incarnation, resources=resources)
            self.world.message(message)

    @rule(worker=WORKERS, kinds=st.lists(st.sampled_from(["fails", "waits", "unseen", "leaves"]), max_size=BURST))
    def storm(self, worker: str, kinds: list[str]) -> None:
        """A worker that is started again and again, and deregistrations of runs that nobody has seen."""
        world = self.world
        before = {key for _, key in world.ledger.host_state(HOST).runs.endings}
        for kind in kinds:
            incarnation = f"run-{world.offset}"
            resources = {"gpu": ResourceRequest(amount=9 if kind == "fails" else 1)}
            if kind != "unseen":
                world.message(Register(host=HOST, worker=worker, incarnation=incarnation, resources=resources))
            if kind in ("unseen", "leaves"):
                world.message(Deregister(host=HOST, worker=worker, incarnation=incarnation))
        host_state = world.ledger.host_state(HOST)
        runs = [key for _, key in host_state.runs.incarnations.get(worker, ())]
        live = sum(key in host_state.holders.live for key in runs)
        fresh = 2 * BURST  # of this commit, and of the one before
        assert len(runs) <= world.rules.max_incarnations + live + fresh
        # what a driver's failure ends meanwhile is in no way bounded by the messages
        ended = {key for _, key in host_state.runs.endings} - before
        others = sum(not key.startswith(f"{HOST}/{worker}/") for key in ended)
        assert host_state.runs.final_count <= max(len(before), world.rules.max_final) + fresh + others
        world.commit()

    # --- operators ---

    @rule(
        name=st.sampled_from(["o1", "o2", "o3"]),
        what=WHAT,
        renamed=st.booleans(),
        until=st.sampled_from([None, None, 0, 5, 60]),
        ends=st.booleans(),
    )
    def order(self, name: str, what: dict[str, str], renamed: bool, until: int | None, ends: bool) -> None:
        """An order begins, changes or ends, whatever it said before."""
        if renamed and "device" in what:
            what = {"device": f"{what['device']}~{self.renamings}"}
        now = self.world.now
        self.world.order(
            CordonOrder(
                id=name, host=HOST, author="ada", reason="why", at=now, **what,
                until=UNSET if until is None else now + timedelta(seconds=until),
                ended_at=now if ends else UNSET,
            )
        )  # fmt: skip

    @rule()
    def lose_orders(self) -> None:
        """The control topic is made anew: what is in effect stays."""
        self.world.orders.clear()

    @precondition(lambda self: self.world.ledger.host_state(HOST).holders.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Somebody who holds devices is over."""
        key = data.draw(st.sampled_from(sorted(self.world.ledger.host_state(HOST).holders.live)))
        self.world.say(m.OwnerDied(allocation=key, detail="gone"))

    # --- drivers ---

    @rule(
        resource=st.sampled_from(["gpu", *INVENTORIES]),
        long=LONG,
        painted=st.sampled_from(["", "", "red"]),
        data=st.data(),
    )
    def report(self, resource: str, long: int, painted: str, data: st.DataObject) -> None:
        """…by their names and, where they are `long`, by others that may outgrow what a record has room for."""
        names = data.draw(st.lists(st.sampled_from(RESOURCES[resource]), unique=True))
        devices = tuple(
            named_at_length(
                known(name, data.draw(HEALTH), used_by=data.draw(STRANGERS), untold=data.draw(UNTOLD), painted=painted),
                long,
            )
            for name in names
        )
        self.world.say(m.DriverReport(host=HOST, resource=resource, devices=devices))

    @precondition(lambda self: self.parted)
    @rule(resource=st.sampled_from(["part", "part", "slice", "half"]), tells=st.booleans(), long=LONG, data=st.data())
    def report_parts(self, resource: str, tells: bool, long: int, data: st.DataObject) -> None:
        """A driver `tells` of what its devices are parts, or forgets it; and `long` is as in `report`."""
        names = data.draw(st.lists(st.sampled_from(RESOURCES[resource]), unique=True))
        wholes = WHOLES if tells and resource == "part" else {}
        devices = tuple(
            named_at_length(known(name, data.draw(HEALTH), part_of=wholes.get(name)), long) for name in names
        )
        self.world.say(m.DriverReport(host=HOST, resource=resource, devices=devices))

    @precondition(lambda self: self.parted)
    @rule(worker=WORKERS, amounts=st.dictionaries(st.sampled_from(PARTED), AMOUNTS, min_size=1, max_size=3))
    def ask_for_parts(self, worker: str, amounts: dict[str, int]) -> None:
        run = f"run-{self.world.offset}"
        self.world.message(Register(host=HOST, worker=worker, incarnation=run, resources=requests(amounts)))

    @precondition(lambda self: self.parted)
    @rule(first=st.sampled_from(["gpu", "part", "slice", "half"]), tells=st.booleans(), worker=WORKERS)
    def restart_with_parts(self, first: str, tells: bool, worker: str) -> None:
        """The manager starts again, and somebody wants what one driver reports before the others."""
        self.world.crash()
        wholes = WHOLES if tells and first == "part" else {}
        devices = tuple(known(name, part_of=wholes.get(name)) for name in RESOURCES[first])
        self.world.say(m.DriverReport(host=HOST, resource=first, devices=devices))
        self.ask_for_parts(worker, {first: 1})

    @precondition(lambda self: self.parted)
    @rule(
        first=st.sampled_from(["part", "slice", "half", "gpu", "cuda", "mon"]),
        amount=st.sampled_from([1, 1, 2]),
        late=st.booleans(),
        between=st.sampled_from(["nothing", "commit", "fail", "forget", "restart", "leave"]),
        second=st.sampled_from(["part", "slice", "half", "gpu", "cuda", "mon"]),
    )
    def take_turns(self, first: str, amount: int, late: bool, between: str, second: str) -> None:
        """Nobody has anything, two take something, something happens, and others come. Drivers may tell `late` what is
        part of what."""
        world = self.world
        for _, record in sorted(world.ledger.allocations.items()):
            if record.state not in FINAL_STATES:
                world.message(Deregister(host=HOST, worker=record.worker, incarnation=record.incarnation))
        world.commit()
        for command in [command for command in world.commands if isinstance(command, m.Unprepare)]:
            world.commands.remove(command)
            world.say(m.Unprepared(allocation=command.allocation, token=command.token, confirmed=True))
        self.report_all()
        if late:
            self.say_parts(tells=False)
        taker = f"run-{world.offset}"
        self.ask_for_parts("v", {first: amount})
        self.ask_for_parts("w", {first: 1})
        if late:
            self.say_parts(tells=True)
        if between == "commit":
            world.commit()
        elif between == "fail":
            world.fail_commit()
        elif between == "restart":
            world.commit()
            self.restart_with_parts(second, False, "x")
        elif between == "leave":
            world.message(Deregister(host=HOST, worker="v", incarnation=taker))
            world.settle()
        if between in ("fail", "forget", "restart"):
            self.say_parts(tells=False)
        self.ask_for_parts("y", {second: 1})
        self.ask_for_parts("z", {second: 1})

    def say_parts(self, *, tells: bool) -> None:
        devices = tuple(known(name, part_of=WHOLES[name] if tells else None) for name in RESOURCES["part"])
        self.world.say(m.DriverReport(host=HOST, resource="part", devices=devices))

    @precondition(lambda self: self.parted)
    @rule()
    def halve(self) -> None:
        """What was lent in two is lent whole after a restart, or the reverse."""
        half = self.world.rules.specs["half"]
        changed = structs.replace(half, replicas=3 - half.replicas)
        self.world.crash(structs.replace(self.world.rules, specs=self.world.rules.specs | {"half": changed}))

    @property
    def renamed(self) -> str:
        return "npu" if "npu" in self.world.rules.specs else "tpu"

    def report_renamed(self, *names: str) -> None:
        devices = tuple(known(f"{name}~{self.renamings}") for name in names)
        self.world.say(m.DriverReport(host=HOST, resource=self.renamed, devices=devices))

    @rule(names=st.sets(st.sampled_from(RESOURCES["npu"])), worker=WORKERS, incarnation=INCARNATIONS)
    def report_and_take(self, names: set[str], worker: str, incarnation: str) -> None:
        self.report_renamed(*sorted(names))
        resources = {self.renamed: ResourceRequest(amount=1)}
        self.world.message(Register(host=HOST, worker=worker, incarnation=incarnation, resources=resources))

    @rule()
    def report_all(self) -> None:
        for resource in [*INVENTORIES, *(["part", "slice", "half"] if self.parted else [])]:
            devices = tuple(known(name, part_of=WHOLES.get(name)) for name in RESOURCES[resource])
            if resource == "slice":
                devices = tuple(known(name) for name in RESOURCES[resource])
            self.world.say(m.DriverReport(host=HOST, resource=resource, devices=devices))

    @rule(resource=st.sampled_from(INVENTORIES), permanent=st.booleans(), silent=st.booleans())
    def fail(self, resource: str, permanent: bool, silent: bool) -> None:
        """…and if its driver is `silent` for long, nobody knows any more how its devices are."""
        failure = m.DriverFailure(reason="no", permanent=permanent)
        named = self.world.ledger.host_state(HOST).devices.inventory(resource).as_reported if silent else ()
        devices = tuple(structs.replace(each, health=Health.UNKNOWN, reason="silent") for each in named)
        self.world.say(m.DriverReport(host=HOST, resource=resource, devices=devices, failure=failure))

    @precondition(lambda self: self.world.commands)
    @rule(well=st.sampled_from([True, True, False]), count=st.integers(0, 3), repeat=st.booleans(), data=st.data())
    def carry_out(self, well: bool, count: int, repeat: bool, data: st.DataObject) -> None:
        commands = self.world.commands
        at = data.draw(st.integers(0, len(commands) - 1))
        command = commands[at] if repeat else commands.pop(at)
        match command:
            case m.Discover() if well:
                devices = tuple(known(name) for name in RESOURCES["disk"][: min(count + 1, command.amount)])
                self.world.say(
                    m.DriverReport(host=HOST, resource=command.resource, devices=devices, asked=command.amount)
                )
            case m.Discover():
                failure = m.DriverFailure(reason="no", permanent=count > 0, at_least=command.least if count > 1 else 0)
                self.world.say(m.DriverReport(host=HOST, resource=command.resource, failure=failure))
            case m.Prepare(allocation=key, token=token):
                self.world.say(m.Prepared(allocation=key, token=token, error=None if well else "no"))
            case m.Unprepare(allocation=key, token=token) if self.world.is_out_of_sight(key):
                words = delays.out_of_sight(self.world.ledger.allocations[key].delayed_by or "")
                self.world.say(m.ReleaseDelayed(allocation=key, token=token, reason=words))
                if repeat:
                    commands.remove(command)
            case m.Unprepare(allocation=key, token=token) if count > 1:
                words = f"process {count} still runs" if well else delays.of_driver("gpu", f"says: used by {count}")
                self.world.say(m.ReleaseDelayed(allocation=key, token=token, reason=words))
                if not repeat:
                    commands.append(command)
            case m.Unprepare(allocation=key, token=token):
                self.world.say(m.Unprepared(allocation=key, token=token, confirmed=well))

    @rule()
    def retry(self) -> None:
        self.world.say(m.DriverRetry(host=HOST, resource="disk"))

    # --- time, the bus, the machine ---

    @rule(worker=WORKERS, resource=st.sampled_from(["gpu", "fpga", "cuda"]), seconds=st.sampled_from([1, 5, 60]))
    def wait(self, worker: str, resource: str, seconds: int) -> None:
        """Somebody wants all devices of a resource within five seconds."""
        amounts = {resource: len(RESOURCES[resource])}
        self.register(worker, "3", amounts, None, 0, 5.0, {})
        self.world.pass_time(seconds)
        self.world.settle()

    @rule(seconds=st.sampled_from([1, 5, 60]))
    def pass_time(self, seconds: int) -> None:
        self.world.pass_time(seconds)

    @rule(seconds=st.sampled_from([-100_000, -60, -1, 100_000]))
    def set_clock(self, seconds: int) -> None:
        self.world.pass_time(seconds)

    @rule(news=st.booleans())
    def spend_quota(self, news: bool) -> None:
        """The quota of rewritten records is used up, or there is something left again."""
        self.world.rules = structs.replace(self.world.rules, news=news)
        if news:
            self.world.say(m.Reschedule(host="h"))

    @rule()
    def commit(self) -> None:
        self.world.commit()

    @rule()
    def settle(self) -> None:
        self.world.settle()

    @rule()
    def fail_commit(self) -> None:
        self.world.fail_commit()

    @rule(sees=SIGHTS)
    def crash(self, sees: delays.Sight) -> None:
        """The manager starts again, where it sees the owners' processes or not."""
        self.world.crash(structs.replace(self.world.rules, sees=sees))

    @rule(renamed=st.booleans(), names=st.one_of(st.none(), st.sets(st.sampled_from(RESOURCES["npu"]))), worker=WORKERS)
    def replace_driver(self, renamed: bool, names: set[str] | None, worker: str) -> None:
        """Another driver after a restart, which calls the devices otherwise; of the same resource, or of one that is
        renamed. It may report at once (`names`), and somebody wants one then."""
        self.renamings += 1
        specs = dict(self.world.rules.specs)
        if renamed:
            before, after = self.renamed, "tpu" if self.renamed == "npu" else "npu"
            specs[after] = structs.replace(specs.pop(before), name=after)
        self.world.crash(structs.replace(self.world.rules, specs=specs))
        if names is not None:
            self.report_and_take(names, worker, "3")

    @rule(names=st.sets(st.sampled_from(RESOURCES["npu"])), worker=WORKERS, incarnation=INCARNATIONS)
    def rename(self, names: set[str], worker: str, incarnation: str) -> None:
        """The driver calls its devices otherwise from now on, and nobody starts again."""
        self.renamings += 1
        self.report_and_take(names, worker, incarnation)

    @rule(names=st.sets(st.sampled_from(TURNED), min_size=1))
    def turn(self, names: set[str]) -> None:
        """What was shared is exclusive after a restart, and the other way round."""
        self.restart_turned(names)

    @rule(names=st.sets(st.sampled_from(RESOURCES["npu"])), worker=WORKERS, incarnation=INCARNATIONS)
    def turn_renamed(self, names: set[str], worker: str, incarnation: str) -> None:
        """The same of the resource whose devices have other ids at times. Its driver reports at once."""
        self.restart_turned({self.renamed})
        self.report_and_take(names, worker, incarnation)

    def restart_turned(self, names: set[str]) -> None:
        specs = dict(self.world.rules.specs)
        for name in names & specs.keys():
            specs[name] = structs.replace(specs[name], shared=not specs[name].shared)
        self.world.crash(structs.replace(self.world.rules, specs=specs))

    def teardown(self) -> None:
        if hasattr(self, "world") and not self.world.is_deciding:  # else the error is on its way
            self.world.settle()


TestPromises = Core.TestCase
TestPromises.settings = settings(
    max_examples=250, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
