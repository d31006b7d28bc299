"""Operators who take devices out by orders: new ones, changed, ended, doubled and late ones, and a topic that is lost.

The topic is what they want, whatever anybody remembers: the last record of each order in it counts. `stand` is that.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import anyio

from outfitter_proto.bus import Entry
from outfitter_proto.names import control_topic
from simulation.hosts.hardware import CARD, RESOURCE
from simulation.hosts.managers import CLUSTER, EPOCH, TOPICS, Host
from simulation.world import settings

if TYPE_CHECKING:
    from simulation.world.world import World

CONTROL = control_topic(CLUSTER)
EVERY_S = 3.0
AUTHORS = ("ada@ops-1", "bob@ops-2")
LOSING = 0.3
"""In how many of these worlds the topic is lost."""
RESTARTING = 0.5
"""In how many of them managers are killed between the last orders and their effect."""

Order = dict[str, Any]


class Operators:
    """Give orders, change and end them."""

    def __init__(self, world: World, dice: random.Random) -> None:
        self._world = world
        self._dice = dice
        self._parts_dice = random.Random(f"{world.seed}/parts/orders")
        self._number = 0
        self._given: dict[str, Order] = {}
        """The last version of each order that anybody gave, whatever became of it."""
        world.broker.add_topic(CONTROL, compact=True)

    async def run(self, is_over: Callable[[], bool]) -> None:
        """Give orders until the world is at rest."""
        acts = (
            self._give, self._give, self._give, self._change, self._end, self._end, self._say_again, self._say_late,
            self._say_nonsense, self._delete,
        )  # fmt: skip
        for _ in range(self._dice.choice((0, 0, 3))):
            self._give()  # to hosts that no ledger knows yet
        while True:
            await anyio.sleep(self._dice.expovariate(1 / EVERY_S))
            if is_over():
                return
            if CONTROL in self._world.broker.topics:
                self._dice.choice(acts)()

    async def lose_topic(self, is_over: Callable[[], bool]) -> None:
        """Delete the topic once, and make it anew some time later."""
        if self._dice.random() >= LOSING:
            return
        await anyio.sleep(self._dice.random() * self._world.setting.trouble_s)
        if is_over():
            return
        self._world.broker.lose(CONTROL)
        self._world.note("operators", "the topic of orders is gone")
        await anyio.sleep(self._dice.choice((0.0, 1.0, 15.0)) * self._dice.random())
        self._make_topic()

    def _make_topic(self) -> None:
        if CONTROL not in self._world.broker.topics:
            self._world.broker.add_topic(CONTROL, compact=True)
            self._world.note("operators", "the topic of orders is there again")

    # --- one after the other ---

    def _give(self) -> None:
        dice = self._dice
        self._number += 1
        order = {
            "type": "cordon-order", "id": f"o{self._number}", "host": self._any_host().name,
            "author": dice.choice(AUTHORS), "reason": f"reason {self._number}", "at": self._time(0.0),
        }  # fmt: skip
        host = next(host for host in self._world.hosts if host.name == order["host"])
        standing = [each for each in self._standing() if each["host"] == host.name]
        if standing and dice.random() < 0.4:  # somebody else orders the same
            like = dice.choice(standing)
            order |= {name: like[name] for name in ("resource", "device") if name in like}
        else:
            order |= self._what(host)
        if dice.random() < 0.05:
            order["host"] = "nobody"
        if dice.random() < 0.3:
            order["until"] = self._time(dice.uniform(-2.0, 15.0))
        self._say(order)

    def _what(self, host: Host) -> Order:
        """A device by one of its names (perhaps of none), a resource, or the whole host."""
        dice, bench = self._dice, host.bench
        if bench.parts and self._parts_dice.random() < 0.4:
            return {"device": self._parts_dice.choice(bench.parts)}
        number = dice.randrange(len(bench.ids))
        return dice.choice((
            {"device": bench.ids[number]},
            {"device": bench.ids[number], "resource": RESOURCE},
            {"device": f"{host.name}-{CARD}-{number}"},
            {"resource": dice.choice(self._world.setting.catalogue.names)},
            {"resource": None, "device": None},
        ))  # fmt: skip

    def _change(self) -> None:
        for order in self._chosen():
            host = next((host for host in self._world.hosts if host.name == order["host"]), None)
            new = {name: value for name, value in order.items() if name not in ("device", "resource", "until")}
            new["reason"] = f"{order['reason']}, changed"
            if host is not None and self._dice.random() < 0.5:
                new |= self._what(host)
            else:
                new |= {name: order[name] for name in ("device", "resource") if name in order}
            if self._dice.random() < 0.5:
                new["until"] = self._time(self._dice.uniform(-2.0, 15.0))
            self._say(new)

    def _end(self) -> None:
        for order in self._chosen():
            self._say(order | {"ended_at": self._time(0.0), "ended_by": self._dice.choice(AUTHORS)})

    def _say_again(self) -> None:
        """The same record once more, as after an answer that was lost."""
        if self._given:
            self._say(self._given[self._dice.choice(sorted(self._given))])

    def _say_late(self) -> None:
        """A record that arrives when others have been said."""
        for order in self._chosen():
            ended = order | {"ended_at": self._time(0.0), "ended_by": order["author"]}
            self._world.later(self._dice.random() * 20, self._say_in_time, self._dice.choice((order, ended)))

    def _say_in_time(self, order: Order) -> None:
        if not self._world.over:
            self._say(order)

    def _say_nonsense(self) -> None:
        """What managers do not understand."""
        self._publish("odd", self._dice.choice((b"odd", b"{}", b'{"type":"cordon-order","id":"other","host":"h0"}')))

    def _delete(self) -> None:
        """Delete an order that was ended, as a command does after 30 days: all managers have taken its end."""
        in_effect = self._in_effect()
        ended = [name for name, order in sorted(self._given.items()) if order.get("ended_at")]
        ended = [name for name in ended if name not in in_effect]
        if ended:
            self._publish(self._dice.choice(ended), None)

    def _in_effect(self) -> set[str]:
        """The orders that the ledgers have."""
        keys: set[str] = set()
        for (topic, _), log in self._world.broker.logs.items():
            for record, _ in log.committed() if topic == TOPICS.allocations else ():
                key = (record.key or b"").decode()
                (keys.discard if record.value is None else keys.add)(key)
        return {key.rpartition("/")[2] for key in keys if key.startswith("@cordon/")}

    def _chosen(self) -> list[Order]:
        standing = self._standing()
        return [self._dice.choice(standing)] if standing else []

    def _standing(self) -> list[Order]:
        return [order for _, order in sorted(self._given.items()) if not order.get("ended_at")]

    def _any_host(self) -> Host:
        return self._dice.choice(self._world.hosts)

    def _time(self, seconds: float) -> str:
        """So many seconds from now, by a clock that is right."""
        moment = EPOCH + timedelta(seconds=self._world.loop.time() + seconds)
        return moment.isoformat().replace("+00:00", "Z")

    def _say(self, order: Order) -> None:
        self._given[order["id"]] = order
        self._publish(order["id"], json.dumps(order).encode())

    def _publish(self, order: str, value: bytes | None) -> None:
        broker = self._world.broker
        if CONTROL in broker.topics:
            self._world.note("operators", f"say {order}: {(value or b'nothing').decode()}")
            broker.publish(broker.logs[CONTROL, 0], Entry(order.encode(), value))

    # --- at rest ---

    def end_all(self) -> None:
        """End every order, so that everybody can be served: also those whose end, or all of them, the topic lost."""
        self._make_topic()
        for _, order in sorted(self._given.items()):
            self._say(order | {"ended_at": self._time(0.0), "ended_by": AUTHORS[0]})

    def give_last(self) -> None:
        """Give orders that stand at the end: in some worlds, managers are killed before these can be in effect."""
        for host in self._world.hosts:
            for what in ({"device": host.bench.ids[0]}, {"resource": RESOURCE}, {}):
                self._number += 1
                common = {"host": host.name, "author": AUTHORS[1], "reason": "the end", "at": self._time(0.0)}
                self._say({"type": "cordon-order", "id": f"o{self._number}", **common, **what})
                if self._dice.random() < 0.5:
                    self._end()
        if self._dice.random() < RESTARTING:
            for manager in self._world.managers:
                self._world.later(self._dice.random(), self._world.loop.kill, manager.process)


def operators(world: World) -> Operators | None:
    """The operators of a world, if it has any. In the others there is no topic of orders."""
    dice = random.Random(f"{world.seed}/operators")
    return Operators(world, dice) if dice.random() < settings.ORDERED else None
