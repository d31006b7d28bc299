"""`outfitter cordon`, `uncordon` and `orders`, from outside: orders.txt has what people do with them."""

from __future__ import annotations

import json
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import anyio.to_thread
import pytest
from msgspec import UNSET, structs

from outfitter_proto import names, topics
from outfitter_proto.bus import Entry, TopicSpec, connect
from outfitter_proto.records import CordonOrder, OrdersPosition
from support import orders
from support.managers.process import Manager
from support.processes import command_line
from support.transcripts import Scene, scenes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def bus(tmp_path: Path) -> str:
    url = f"sqlite://{tmp_path}/bus.db?synchronous=NORMAL"
    orders.prepare(url, orders.host(), orders.holder("GPU-1"))
    return url


@pytest.mark.parametrize("scene", scenes(Path(__file__).with_name("orders.txt")), ids=str)
def test_orders(bus: str, scene: Scene, tmp_path: Path) -> None:
    with orders.taking(bus):
        scene.play(tmp_path, {"OUTFITTER_BUS": bus})


def order(name: str = "1", **more: Any) -> CordonOrder:
    values = {"host": orders.HOST, "author": "ada@ops-1", "reason": "XID 79", "at": orders.AT} | more
    return CordonOrder(id=name, **values)


class Shell(NamedTuple):
    """Commands on one bus."""

    folder: Path
    bus: str

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        variables = {"OUTFITTER_BUS": self.bus, "OUTFITTER_AUTHOR": "ada@ops-1"}
        return command_line.outfitter(*words, cwd=self.folder, environment=variables)

    def states(self, *words: str) -> dict[str, str]:
        """The state of each order that is shown."""
        return {line["id"]: line["state"] for line in json.loads(self("orders", "--json", *words).stdout)}

    def write(self, *records: Any) -> None:
        async def run() -> None:
            async with connect(self.bus) as bus:
                await orders.write(bus, *records)

        anyio.run(run)


@pytest.fixture
def shell(bus: str, tmp_path: Path) -> Shell:
    return Shell(tmp_path, bus)


# --- no manager takes it ------------------------------------------------------------------------------------


def test_an_order_that_no_manager_takes_stands_and_the_exit_code_says_it(shell: Shell) -> None:
    done = shell("cordon", "gpu-3", "--device", "GPU-1", "--reason", "XID 79", "--wait", "100ms")
    name = done.stdout.strip()
    assert done.returncode == 75
    assert f"no manager has taken order {name} within 0.1 s: the manager of gpu-3 has never read orders" in done.stderr
    assert "the order stands, and `outfitter orders gpu-3` shows whether one has" in done.stderr
    assert shell.states() == {name: "not-taken"}
    assert "not taken yet" in shell("orders").stdout
    [written] = orders.orders_in(shell.bus)
    assert written is not None
    assert (written.id, written.device, written.resource, written.until) == (name, "GPU-1", UNSET, UNSET)


def test_nobody_waits_longer_than_until_the_order_ends_by_itself(shell: Shell) -> None:
    done = shell("cordon", "gpu-3", "--reason", "x", "--until", "1ms", "--wait", "600s")
    assert (done.returncode, "it has ended by itself" in done.stderr, "the order stands" in done.stderr) == (
        75, True, False
    )  # fmt: skip


def test_who_does_not_wait_is_told_nothing_of_managers(shell: Shell) -> None:
    done = shell("cordon", "gpu-3", "--reason", "x", "--wait", "0")
    assert (done.returncode, done.stderr) == (0, "")
    done = shell("uncordon", "gpu-3", "--wait", "0")
    assert (done.returncode, done.stderr) == (0, "")
    assert [each.ended_by if each else None for each in orders.orders_in(shell.bus)] == [UNSET, "ada@ops-1"]
    assert shell.states() == {}


@pytest.mark.parametrize(
    ("to", "of_topic", "says"),
    [
        (0, None, "the manager of gpu-3 has not said yet that it has read it"),
        (1, "another", "the manager of gpu-3 has not said yet that it has read it"),
        (1, None, "the manager of gpu-3 has read it: its log may say more"),
    ],
)
async def test_how_far_the_manager_has_read_is_told(shell: Shell, to: int, of_topic: str | None, says: str) -> None:
    async with connect(shell.bus) as bus:
        topic_id = of_topic or (await bus.topic(names.control_topic())).id
        await orders.write(bus, orders.checkpoint(orders=OrdersPosition(topic_id=topic_id, to=to)))
    done = await anyio.to_thread.run_sync(shell, "cordon", "gpu-3", "--reason", "x", "--wait", "100ms")
    assert (done.returncode, says in done.stderr) == (75, True), done.stderr


def test_why_the_manager_cannot_read_orders_is_told(shell: Shell) -> None:
    shell.write(orders.checkpoint(orders_unread="Read on topic 'outfitter.control' is not granted"))
    done = shell("cordon", "gpu-3", "--reason", "x", "--wait", "100ms")
    assert done.returncode == 75
    assert "the manager of gpu-3 cannot read orders: Read on topic 'outfitter.control' is not granted" in done.stderr


def test_a_manager_that_was_stopped_is_named(shell: Shell) -> None:
    host = orders.host()
    shell.write(structs.replace(host, manager=structs.replace(host.manager, stopped_at=orders.AT)))
    done = shell("cordon", "gpu-3", "--reason", "x", "--wait", "100ms")
    assert done.returncode == 75
    assert "within 0.1 s: the manager of gpu-3 was stopped " in done.stderr


def test_an_end_that_no_manager_takes_is_waited_for_again(shell: Shell) -> None:
    given = order()
    shell.write(given, orders.cordon(given))
    assert shell.states() == {"1": "in-effect"}
    for printed in ("1  ended\n", ""):
        done = shell("uncordon", "gpu-3", "--wait", "100ms")
        assert (done.returncode, done.stdout) == (75, printed)
        assert "no manager has taken the end of 1 within 0.1 s" in done.stderr
        assert "until one does, the devices stay out" in done.stderr
        assert shell.states() == {"1": "ending"}
    assert len(orders.orders_in(shell.bus)) == 2
    with orders.taking(shell.bus):
        assert shell("uncordon", "gpu-3").returncode == 0
    assert shell.states() == {}


# --- whose order, and about what ---------------------------------------------------------------------------


def test_an_order_about_a_part_is_ended_only_by_who_names_the_part_or_everything(shell: Shell) -> None:
    parts = order("gpu", resource="gpu"), order("one", device="GPU-1"), order("other", device="GPU-2")
    shell.write(order("host"), *parts)
    ended = shell("uncordon", "gpu-3", "--wait", "0")
    assert (ended.returncode, ended.stdout) == (0, "host  ended\n")
    assert all(f"{one.id} (" in ended.stderr for one in parts)
    nothing = shell("uncordon", "gpu-3", "--wait", "0")
    assert (nothing.returncode, "orders about more or less than this" in nothing.stderr) == (1, True)
    assert shell("uncordon", "gpu-3", "--resource", "gpu", "--wait", "0").stdout == "gpu  ended\n"
    assert shell("uncordon", "gpu-3", "--device", "GPU-1", "--wait", "0").stdout == "one  ended\n"
    none = shell("uncordon", "gpu-3", "--device", "GPU-1", "--wait", "0")
    assert (none.returncode, none.stderr.splitlines()[-1]) == (
        0, "outfitter: no such order stands; those that do: other (GPU-2) by ada@ops-1: XID 79"
    )  # fmt: skip
    assert shell("uncordon", "gpu-3", "--all", "--wait", "0").stdout == "other  ended\n"


def test_under_sudo_the_author_is_who_called_it(bus: str, tmp_path: Path) -> None:
    variables = {"OUTFITTER_BUS": bus, "SUDO_USER": "ada", "USER": "root", "LOGNAME": "root"}
    words = ("cordon", "gpu-3", "--reason", "XID 79", "--wait", "0")
    assert command_line.outfitter(*words, cwd=tmp_path, environment=variables).returncode == 0
    [written] = orders.orders_in(bus)
    assert written is not None
    assert written.author.startswith("ada@")


def test_where_the_record_does_not_list_all_devices_a_wrong_name_is_not_taken_for_a_right_one(tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path}/bus.db"
    orders.prepare(url, orders.host(gpu=structs.replace(orders.inventory("GPU-0"), total=300)))
    with orders.taking(url):
        done = Shell(tmp_path, url)("cordon", "gpu-3", "--device", "gpu-7", "--reason", "XID 79")
    assert done.returncode == 0
    assert "no device that the host's record lists: as many are cordoned as before. Is the name right?" in done.stderr


# --- what the topic does not have ---------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["--order", "1"], ["--all"], ["--device", "GPU-1"]], ids=str)
def test_an_order_that_the_topic_has_lost_can_be_ended(shell: Shell, words: list[str]) -> None:
    shell.write(orders.cordon(order(resource="gpu", device="GPU-1")))
    assert shell.states() == {"1": "lost"}
    with orders.taking(shell.bus):
        done = shell("uncordon", "gpu-3", *words)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1  ended\n", "")
    [written] = orders.orders_in(shell.bus)
    assert written is not None
    assert (written.resource, written.device, written.ended_by) == ("gpu", "GPU-1", "ada@ops-1")


def test_what_cannot_be_understood_is_counted_and_hides_nothing(shell: Shell) -> None:
    shell.write(order("1"), order("2"))

    async def damage() -> None:
        async with connect(shell.bus) as bus:
            for key, value in ((b"1", b"{"), (b"3", b'{"type":"of-tomorrow"}'), (b"\xff", b"\xff")):
                await bus.publish(names.control_topic(), 0, Entry(key, value))
            await bus.publish(names.control_topic(), 0, Entry(b"2", None))

    anyio.run(damage)
    assert shell.states() == {"1": "not-taken", "2": "not-taken"}
    done = shell("orders")
    assert "orders that cannot be understood, damaged or of a later version: 3" in done.stderr


@pytest.mark.parametrize(
    "words", [["cordon", "gpu-3", "--reason", "x"], ["uncordon", "gpu-3"], ["orders"]], ids=lambda words: words[0]
)
def test_a_missing_topic_is_refused_with_the_command_that_makes_it(tmp_path: Path, words: list[str]) -> None:
    url = f"sqlite://{tmp_path}/bus.db"

    async def prepare() -> None:
        async with connect(url) as bus:
            specs = topics.required(names.DEFAULT_CLUSTER)
            await bus.create_topics([TopicSpec(name, 1, {}) for name in specs])
            await orders.write(bus, orders.host())

    anyio.run(prepare)
    shell = Shell(tmp_path, url)
    done = shell(*words)
    assert (done.returncode, done.stdout) == (1, "")
    assert "topic 'outfitter.control' is not on the bus" in done.stderr
    assert "`outfitter topics create`" in done.stderr
    shell.write(orders.cordon(order()))
    in_effect = shell("orders")
    assert (in_effect.returncode, " in effect " in in_effect.stdout) == (1, True)
    assert "topic 'outfitter.control' is not on the bus" in in_effect.stderr
    assert shell("topics", "create").returncode == 0
    assert shell(*words, *(["--wait", "0"] if words[0] != "orders" else [])).returncode == 0


def test_orders_that_ended_long_ago_are_deleted_by_whoever_writes_next(shell: Shell) -> None:
    now = datetime.now(UTC)
    long_ago, lately = now - timedelta(days=31), now - timedelta(days=29)
    in_effect = order("in-effect", ended_at=long_ago)
    shell.write(
        order("ended", ended_at=long_ago, ended_by="bob@ops-2"), order("over", until=long_ago), in_effect,
        orders.cordon(in_effect), order("lately", until=lately), order("standing", at=long_ago),
        order("elsewhere", host="gone", ended_at=long_ago),
    )  # fmt: skip
    shell("orders")
    assert None not in orders.orders_in(shell.bus)
    assert shell("cordon", "gpu-3", "--reason", "x", "--wait", "0").returncode == 0
    assert orders.orders_in(shell.bus).count(None) == 3
    left = {"in-effect", "lately", "standing"}
    assert {name for name in shell.states("--ended") if "-" not in name or name in left} == left
    shell("uncordon", "gpu-3", "--wait", "0")
    assert orders.orders_in(shell.bus).count(None) == 3


# --- with a manager -----------------------------------------------------------------------------------------


def test_a_manager_lends_what_is_out_to_nobody_until_the_order_has_ended(manager: Manager) -> None:
    given = manager.outfitter(
        "cordon", manager.host, "--device", "GPU-0", "--reason", "XID 79", "--author", "ada@ops-1"
    )
    assert (given.returncode, given.stderr) == (0, f"in effect on {manager.host}: nobody gets 1 gpu there now\n")
    done = manager.outfitter("register", "--worker", "w", "--resource", "gpu=2", "--lease", "none")
    assert done.returncode == 0
    waiting = manager.wait_for_state("w", "pending")
    assert (waiting["reason_code"], "ada@ops-1" in waiting["reason"]) == ("cordoned", True)
    ended = manager.outfitter("uncordon", manager.host, "--device", "GPU-0", "--author", "ada@ops-1")
    assert (ended.returncode, ended.stdout) == (0, f"{given.stdout.strip()}  ended\n")
    manager.wait_for_state("w", "allocated")


def test_an_order_ends_by_itself_when_its_time_is_over(manager: Manager) -> None:
    done = manager.outfitter("cordon", manager.host, "--reason", "for a moment", "--until", "1s")
    assert done.returncode in {0, 75}  # 75: its time was over before the manager read it
    manager.wait_for(lambda: json.loads(manager.outfitter("orders", "--json").stdout) == [])
