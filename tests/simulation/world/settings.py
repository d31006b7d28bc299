"""What a seed decides about a world before anything happens."""

from __future__ import annotations

import random

from msgspec import Struct

from simulation.bulk import Bulk, bulk
from simulation.hosts.hardware import Catalogue
from simulation.model.broker import Habits
from simulation.model.client import MAX_BATCH_BYTES
from simulation.model.network import Weather

STORMS: tuple[tuple[str, ...], ...] = (
    (), (), ("EndTxn",), ("EndTxn", "AddPartitionsToTxn"), ("Produce",), ("InitProducerId", "EndTxn"), ("Fetch",),
)  # fmt: skip
"""The requests to which something happens: to all of them seldom, or to some of them often."""
FAULTS = (
    "kill",
    "kill",
    "stop",
    "stop",
    "sleep",
    "cut",
    "end",
    "down",
    "worker",
    "worker",
    "device",
    "slow",
    "compaction",
)
JUMPY = 0.3
"""How many of the worlds have machines whose wall clocks are set."""
CHANGING = 0.3
"""How many of the worlds have managers whose configuration changes."""
TENACIOUS = 0.3
"""How many of the worlds have workers with short leases that keep what they get for long."""
DEAF = 0.5
"""How many of the workers that are cut off from the broker can write again before they can read."""
PATIENT = 0.3
"""In how many of the worlds managers give leases a long grace."""
LONG_GRACE_S = 8.0
HAUNTED = 0.2
"""On how many of the hosts workers leave processes behind."""
BOOKED = 0.3
"""How many of the worlds of host scope have devices of a script with books of its own. Only the record of an ended
worker tells the next manager of its offer, so no clock jumps there, and records are kept for long."""
REFUSING = 0.5
"""In how many of its outages the broker refuses connections, and does not just keep silent."""
KEPT_S = 3600.0
WALLED = 0.3
"""In how many of the worlds of host scope managers start in another PID namespace now and then."""
UNRULY = 0.3
"""How many of the worlds have unruly workers."""
CHOOSY = 0.3
"""How many of the worlds have workers that take certain devices only."""
THROTTLED = (0.0, 0.0, 0.0, 0.05, 0.3)
"""The share of answers that throttle: in most of the worlds there are no quotas."""
PARTED = 0.3
"""How many of the worlds have parts or replicas of devices, unless devices say much of themselves there."""
SILENT = 0.5
"""In how many of these the driver that knows the parts keeps silent at times, at first or later."""
ORDERED = 0.4
"""How many of the worlds have operators who give orders."""
AILING = 0.25
"""How many of the worlds have devices that fall ill, and that are lent again after `MIN_HEALTHY_S`."""
MIN_HEALTHY_S = 12.0
ILL = 0.7
"""How many of the devices to which something happens in such a world fall ill, and are not gone."""
FLOOD = 300
SMALL_BATCH_BYTES = 6000
"""Little more than the least that one event's effects are cut to, and a checkpoint."""


class Setting(Struct, kw_only=True, frozen=True):
    """What the seed decides before anything happens."""

    replicas: int
    """Managers of cluster scope; 0: host scope, one manager a host."""
    static: bool
    session_s: float
    partitions: int
    hosts: int
    workers: int
    trouble_s: float
    faults_every_s: float
    faults: tuple[str, ...]
    """All kinds, or a few of them: what hides a bug is often another fault."""
    tenacious: bool
    """Workers have short leases, and keep what they get for long."""
    weather: Weather
    habits: Habits
    transaction_timeout_s: float
    flood: int
    """Messages with which hosts of cluster scope flood their partition, of which managers read few ahead; 0: none."""
    takes_bytes: int
    """The largest ledger batch; for some it is too small for what managers make of a flood at once."""
    bulk: Bulk | None
    catalogue: Catalogue
    silent: bool
    """Whether a driver says at times only of what its devices are parts."""
    jumps: bool
    """Whether wall clocks jump."""
    changes: bool
    """Whether managers are started with another configuration now and then."""
    walled: bool
    """Whether managers now and then start where they see no worker's process; some workers send no heartbeats then."""
    beat_s: float | None
    """How often managers say on the bus that they live; None: never."""
    lease_grace_s: float
    """The least grace that managers give leases at first: in some worlds it is so long that no clock hides it."""
    unruly: bool
    """Whether workers say what no client would, and one of them runs twice at once."""
    choosy: bool
    """Whether workers take certain devices only, now and then."""


def setting(seed: int) -> Setting:
    """The setting of a seed."""
    dice = random.Random(f"{seed}/setting")
    requests = dice.choice(STORMS)
    bad = dice.choice((0.0, 0.01, 0.03, 0.06)) * (5 if requests else 1)
    replicas = dice.choice((0, 0, 0, 2, 3))
    flooded = bool(replicas) and random.Random(f"{seed}/flooded").random() < 0.5
    takes_bytes = SMALL_BATCH_BYTES if flooded and random.Random(f"{seed}/bytes").random() < 0.5 else MAX_BATCH_BYTES
    large = bulk(seed) if takes_bytes == MAX_BATCH_BYTES else None
    jumps = random.Random(f"{seed}/jumps").random() < JUMPY
    parts = random.Random(f"{seed}/parts")
    booked = not replicas and not jumps and random.Random(f"{seed}/books").random() < BOOKED
    return Setting(
        replicas=replicas,
        static=dice.random() < 0.5,
        session_s=dice.choice((3.0, 6.0, 10.0)),
        partitions=(1 if flooded else dice.choice((2, 3))) if replicas else dice.choice((1, 1, 2)),
        hosts=dice.choice((2, 3, 4)) if replicas else dice.choice((1, 1, 2, 3)),
        workers=dice.choice((2, 3, 4)),
        trouble_s=dice.choice((20.0, 40.0, 60.0)),
        faults_every_s=dice.choice((2.0, 4.0, 8.0)),
        faults=FAULTS if dice.random() < 0.5 else tuple(dice.sample(sorted(set(FAULTS)), 3)),
        tenacious=dice.random() < TENACIOUS,
        weather=Weather(
            latency_s=dice.choice((0.001, 0.005, 0.05)),
            request_lost=bad * dice.random(),
            answer_lost=bad * dice.random(),
            late=bad * dice.random(),
            refused=bad * dice.random() * 0.5,
            throttled=random.Random(f"{seed}/throttled").choice(THROTTLED),
            requests=requests,
        ),
        habits=Habits(
            marker_s=dice.choice((0.002, 0.05, 0.5)),
            scan_s=dice.choice((1.0, 5.0)),
            clean_s=dice.choice((None, 3.0, 10.0)),
        ),
        transaction_timeout_s=dice.choice((1.0, 5.0, 15.0)),
        flood=FLOOD if flooded else 0,
        catalogue=_parted(
            _catalogue(random.Random(f"{seed}/catalogue"))._replace(
                books=booked,
                min_healthy_s=MIN_HEALTHY_S if random.Random(f"{seed}/ailing").random() < AILING else 0.0,
            ),
            parts,
            bulky=large is not None,
        ),
        silent=parts.random() < SILENT,
        jumps=jumps,
        changes=random.Random(f"{seed}/changes").random() < CHANGING,
        walled=not replicas and random.Random(f"{seed}/walls").random() < WALLED,
        beat_s=random.Random(f"{seed}/beats").choice((None, None, 5.0)),
        lease_grace_s=LONG_GRACE_S if random.Random(f"{seed}/grace").random() < PATIENT else 0.0,
        unruly=random.Random(f"{seed}/unruly").random() < UNRULY,
        choosy=large is None and random.Random(f"{seed}/choosy").random() < CHOOSY,
        takes_bytes=large.takes_bytes if large is not None else takes_bytes,
        bulk=large,
    )


def _catalogue(dice: random.Random) -> Catalogue:
    """Half of the worlds have resources beside the first one."""
    if dice.random() < 0.5:
        return Catalogue()
    cards = dice.random() < 0.8
    return Catalogue(
        cards=cards, mapped=cards and dice.random() < 0.5, maps=dice.random() < 0.4, ports=dice.random() < 0.3
    )


def _parted(catalogue: Catalogue, dice: random.Random, *, bulky: bool) -> Catalogue:
    """The catalogue, in some of the worlds with parts, with replicas, or both. A driver that knows the names of others'
    devices is enough to be silent in one world."""
    chances = [dice.random() for _ in range(6)]
    if chances[0] >= PARTED or bulky or catalogue.mapped:
        return catalogue
    parts = chances[1] < 0.85
    return catalogue._replace(
        parts=parts,
        slices=parts and chances[2] < 0.5,
        by_card=parts and catalogue.cards and chances[3] < 0.5,
        halves=not parts or chances[4] < 0.4,
        repeats=chances[5] < 0.5,
    )
