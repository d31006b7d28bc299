"""One value of every message and record type, with every field set somewhere: what the golden files are made of."""

from __future__ import annotations

from datetime import UTC, datetime

from msgspec import Raw, structs

from outfitter_proto.codec import encode
from outfitter_proto.records import (
    Allocation,
    Beat,
    Checkpoint,
    Commit,
    Condition,
    Cordon,
    CordonOrder,
    DeadLetter,
    Deregister,
    Device,
    Era,
    Growth,
    Heartbeat,
    Host,
    InputPosition,
    InventoryDevice,
    ManagerIdentity,
    MessageSource,
    Note,
    OperatorShare,
    OrdersPosition,
    Owner,
    PoolUse,
    Put,
    Refresh,
    Register,
    ResolvedRequest,
    ResourceChoice,
    ResourceInventory,
    ResourceRequest,
    Snapshot,
    Source,
    Survivors,
    Transition,
    Unavailable,
)

AT = datetime(2026, 11, 21, 15, 0, 0, 250_000, tzinfo=UTC)
LATER = datetime(2026, 11, 21, 16, 0, tzinfo=UTC)
ME = {"host": "gpu-3", "worker": "tm-17", "incarnation": "0192f0c1-7d3e"}
OWNER = Owner(pid=4711, start_ticks=88_213, pid_ns=4_026_531_836, boot_id="0b5c1f9e-6c1c-4b62-9d7c-1f6cf3a1b0aa")
TWO = {"gpu": ResourceRequest(amount=2)}
SPLIT = {"infer": {"gpu": ResourceRequest(amount=1)}}
REQUEST = ResolvedRequest(
    amounts={"gpu": 2},
    resources=TWO,
    operators=SPLIT,
    owner=OWNER,
    lease_s=30.0,
    wait_s=60.0,
    priority=5,
    labels={"job": "mnist", "stage": "prüfung"},
)
GPUS = [
    {"id": "GPU-8a56", "index": "0", "local_index": "0", "uuid": "GPU-8a56", "memory.total_bytes": "85899345920"},
    {"id": "GPU-9b67", "index": "3", "local_index": "1", "uuid": "GPU-9b67", "memory.total_bytes": "85899345920"},
]
PENDING = Allocation(
    **ME,
    state="pending",
    request=REQUEST,
    since=AT,
    writer="host/gpu-3",
    commit=9_070,
    source=Source(partition=3, offset=1_042),
    reason="2 of gpu wanted, 1 of 4 is free",
    reason_code="busy",
    queue_position=2,
    wait_until=LATER,
)


def _granted(state: str, **more: object) -> Allocation:
    return Allocation(
        **ME,
        state=state,
        request=REQUEST,
        since=AT,
        writer="host/gpu-3",
        commit=9_071,
        source=Source(partition=3, offset=1_042),
        token=412,
        resources={"gpu": GPUS},
        operators={
            "infer": OperatorShare(
                resources={"gpu": ["GPU-8a56"]},
                env={"CUDA_VISIBLE_DEVICES": "GPU-8a56"},
                cdi=["nvidia.com/gpu=GPU-8a56"],
            )
        },
        env={"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "GPU-8a56,GPU-9b67"},
        cdi=["nvidia.com/gpu=GPU-8a56", "nvidia.com/gpu=GPU-9b67"],
        unavailable={"fpga": Unavailable(code="no-driver", reason="no driver is configured")},
        **more,
    )


ALLOCATED = _granted("allocated")
SHARED = structs.replace(
    ALLOCATED,
    resources={"gpu": GPUS, "nic": [{"id": "mlx5_0", "index": "0", "local_index": "0"}]},
    shared=["nic"],
    operators={
        "infer": structs.replace(ALLOCATED.operators["infer"], shared=["nic"]),
        "load": OperatorShare(resources={}, shared=["nic"]),
    },
    common={
        "nic": OperatorShare(
            resources={"nic": ["mlx5_0"]}, env={"UCX_NET_DEVICES": "mlx5_0"}, cdi=["mellanox.com/nic=mlx5_0"]
        )
    },
)
HOST = Host(
    host="gpu-3",
    manager=ManagerIdentity(
        instance="1f6c", version="0.1.0", since=AT, machine_id="m-1", boot_id="b-1", stopped_at=LATER
    ),
    since=AT,
    resources={
        "gpu": ResourceInventory(
            state="reported",
            amount=2,
            devices=[
                InventoryDevice(id="GPU-8a56", properties={"index": "0"}),
                InventoryDevice(id="GPU-9b67", health="unhealthy", reason="XID 79", properties={"index": "3"}),
            ],
            total=2,
            healthy=1,
        ),
        "fpga": ResourceInventory(state="no-driver", reason="no driver is configured", sharing="shared"),
    },
)
CHECKPOINT = Checkpoint(
    writer="host/gpu-3",
    instance="1f6c",
    cluster="outfitter",
    scope="host",
    commit=9_071,
    token=412,
    input=InputPosition(topic_id="AAAAAAAAAAAAAAAAAAAAAQ", partition=3, from_=1_042, to=1_043),
    at=AT,
    machine_id="m-1",
    boot_id="b-1",
)
NAMED = ResourceInventory(
    state="reported",
    devices=[InventoryDevice(id="GPU-8a56")],
    total=1,
    healthy=1,
    names=[["GPU-8a56", "0000:3b:00.0"]],
    known=["GPU-8a56"],
)

WHERE = {
    "memory.total_bytes": Condition(min="40Gi", max=85_899_345_920),
    "model": ("*H100*", "*H200*"),
    "mig.mode.current": Condition(is_="Disabled", exists=True),
    "pci.bus_id": Condition(not_="0000:3b:00.0"),
    "numa_node": 1,
}

SAMPLES = {
    "register-minimal": Register(**ME),
    "register-full": Register(
        **ME,
        resources=TWO,
        operators=SPLIT,
        owner=OWNER,
        lease_s=30.0,
        wait_s=60.0,
        priority=5,
        labels={"job": "mnist", "stage": "prüfung"},
    ),
    "register-with-survivors": Register(**ME, owner=OWNER, survivors=Survivors(uid=1000, kill_after_s=10.0)),
    "register-in-a-user-namespace": Register(**ME, owner=OWNER, survivors=Survivors(uid=1000, user_ns=4_026_532_180)),
    "register-in-a-time-namespace": Register(**ME, owner=structs.replace(OWNER, time_ns=4_026_531_834)),
    "register-without-heartbeats": Register(**ME, owner=OWNER, heartbeats=False),
    "register-no-lease": Register(**ME, resources=TWO, lease_s=None),
    "register-that-chooses": Register(
        **ME, resources={"gpu": ResourceRequest(amount=2, where=WHERE, same=("nvlink.group",))}
    ),
    "heartbeat": Heartbeat(**ME),
    "deregister": Deregister(**ME, reason="finished"),
    "deregister-current": Deregister(host="gpu-3", worker="tm-17"),
    "allocation-with-survivors": structs.replace(
        ALLOCATED, request=structs.replace(REQUEST, survivors=Survivors(uid=1000))
    ),
    "allocation-without-heartbeats": structs.replace(ALLOCATED, request=structs.replace(REQUEST, heartbeats=False)),
    "allocation-that-chose": structs.replace(
        ALLOCATED,
        request=structs.replace(REQUEST, choices={"gpu": ResourceChoice(where=WHERE, same=["nvlink.group"])}),
    ),
    "allocation-pending": PENDING,
    "allocation-with-warnings": structs.replace(
        PENDING,
        unwatched="pid-namespace",
        warnings=["unknown field $.resorces was ignored; did you mean resources?"],
    ),
    "allocation-preparing": _granted("preparing"),
    "allocation-allocated": ALLOCATED,
    "allocation-with-shared-devices": SHARED,
    "allocation-releasing": _granted(
        "releasing", outcome="ended", reason="deregistered: finished", reason_code="deregistered"
    ),
    "allocation-releasing-late": _granted(
        "releasing",
        outcome="ended",
        prepared=["gpu"],
        aliases={"GPU-8a56": ["0000:3b:00.0"]},
        reason="deregistered: finished; process 4711 still uses GPU-8a56",
        reason_code="deregistered",
        delayed_by="process 4711 still uses GPU-8a56",
    ),
    "allocation-ended": Allocation(
        **ME,
        state="ended",
        request=REQUEST,
        since=LATER,
        writer="host/gpu-3",
        commit=9_080,
        source=Source(partition=3, offset=1_042),
        token=412,
        reason="its lease ended at 15:59:30",
        reason_code="lease-expired",
    ),
    "allocation-failed": Allocation(
        **ME,
        state="failed",
        request=ResolvedRequest(amounts={"gpu": 9}),
        since=AT,
        writer="host/gpu-3",
        commit=9_072,
        source=Source(partition=3, offset=1_050),
        reason="9 of gpu wanted, gpu-3 has 4",
        reason_code="infeasible",
    ),
    "host": HOST,
    "host-with-names": structs.replace(HOST, resources={"gpu": NAMED}),
    "host-with-a-device-that-was-ill": structs.replace(
        HOST, resources={"gpu": structs.replace(NAMED, unwell={"GPU-8a56": LATER, "GPU-9b67": None})}
    ),
    "host-with-names-left-out": structs.replace(HOST, resources={"gpu": structs.replace(NAMED, names_left_out=40)}),
    "host-with-a-digest-of-its-names": structs.replace(
        HOST, resources={"gpu": structs.replace(NAMED, names_left_out=40, names_digest="4cc1e8ae8b0d9c05")}
    ),
    "host-of-a-manager-in-namespaces": structs.replace(
        HOST,
        manager=structs.replace(HOST.manager, pid_ns=4_026_531_836, time_ns=4_026_531_834),
        resources={"fpga": ResourceInventory(state="reported", on_demand=True)},
    ),
    "host-of-a-manager-that-obeys-clauses": structs.replace(
        HOST, manager=structs.replace(HOST.manager, obeys=["where", "same"])
    ),
    "device": Device(host="gpu-3", id="pci/0000:3b:00.0", since=AT, state="quarantined", reason="XID 79"),
    "checkpoint": CHECKPOINT,
    "checkpoint-with-a-snapshot": structs.replace(CHECKPOINT, snapshot=AT),
    "checkpoint-with-its-topic": structs.replace(
        CHECKPOINT,
        partitions=12,
        ledger_id="AAAAAAAAAAAAAAAAAAAAAg",
        ledger_start=31_007,
        grown=Growth(partitions=6, until=2_000),
    ),
    "checkpoint-of-an-input-that-began-anew": structs.replace(
        CHECKPOINT,
        pid_ns=4_026_531_836,
        time_ns=4_026_531_834,
        input=structs.replace(CHECKPOINT.input, base=5_000, begin=1_000, claimed=1_050),
    ),
    "checkpoint-of-a-partition-that-is-grown-again": structs.replace(
        CHECKPOINT, grown=Growth(partitions=6, since=1_900, earlier=[Era(partitions=3, until=20)])
    ),
    "checkpoint-with-hosts-ahead": structs.replace(
        CHECKPOINT,
        writer="partition/3",
        scope="cluster",
        input=structs.replace(CHECKPOINT.input, ahead={"gpu-3": 21_042, "gpu-7": 1_044}),
    ),
    "checkpoint-of-a-writer-that-beats": structs.replace(CHECKPOINT, beat_s=20.0),
    "checkpoint-with-the-grace-of-leases": structs.replace(CHECKPOINT, beat_s=20.0, lease_grace_s=2.0),
    "checkpoint-that-needs-something": structs.replace(CHECKPOINT, format=2, needs=["orders"]),
    "checkpoint-of-a-writer-that-read-orders": structs.replace(
        CHECKPOINT,
        format=2,
        needs=["orders"],
        orders=OrdersPosition(topic_id="AAAAAAAAAAAAAAAAAAAAAw", to=17),
    ),
    "checkpoint-of-a-writer-that-reads-no-orders": structs.replace(
        CHECKPOINT, orders_unread="there is no topic outfitter.control"
    ),
    "cordon": Cordon(host="gpu-3", order="k3v9-01", author="ada@ops-1", reason="rebooted tonight", since=AT),
    "cordon-of-a-device": Cordon(
        host="gpu-3",
        order="k3v9-02",
        author="ada@ops-1",
        reason="XID 79",
        since=AT,
        resource="gpu",
        device="GPU-1",
        until=AT,
    ),
    "cordon-order": CordonOrder(id="k3v9-01", host="gpu-3", author="ada@ops-1", reason="rebooted tonight", at=AT),
    "cordon-order-that-ended": CordonOrder(
        id="k3v9-02",
        host="gpu-3",
        author="ada@ops-1",
        reason="XID 79",
        at=AT,
        resource="gpu",
        device="GPU-1",
        until=AT,
        ended_at=AT,
        ended_by="bob@ops-2",
    ),
    "host-with-a-cordoned-device": structs.replace(
        HOST,
        resources={"gpu": structs.replace(NAMED, devices=[InventoryDevice(id="GPU-1", cordon="k3v9-02")], cordoned=1)},
    ),
    "host-with-parts": structs.replace(
        HOST,
        resources={"gpu": structs.replace(NAMED, parts={"GPU-8a56": ["MIG-1", "MIG-2"]}, replicas=2)},
    ),
    "allocation-of-a-part": structs.replace(
        ALLOCATED, uses={"GPU-8a56": PoolUse(1, 720_720, "parts"), "MIG-1": PoolUse(360_360, 720_720, "replicas")}
    ),
    "host-with-a-device-that-a-stranger-uses": structs.replace(
        HOST,
        resources={
            "gpu": structs.replace(NAMED, devices=[InventoryDevice(id="GPU-1", used_by="process 4711 (python) of ada")])
        },
    ),
    "beat": Beat(writer="host/gpu-3", instance="19a8c-4f6d2b10", version="0.3.0"),
    "beat-of-a-sweeper-that-stopped": Beat(
        writer="partition/3", instance="19a8c-4f6d2b10", version="0.3.0", sweeps=True, stopped_at=AT
    ),
    "beat-of-a-process": Beat(writer="host/gpu-3", instance="19a8c-4f6d2b10", version="0.3.0", process=OWNER),
    "transition": Transition(
        **ME,
        at=AT,
        event="register",
        from_="pending",
        to="allocated",
        explanation="gpu: 2 of the 3 that are free and healthy",
        record=ALLOCATED,
        source=Source(partition=3, offset=1_042),
        confirmed=True,
    ),
    "note": Note(at=AT, writer="host/gpu-3", event="input-lost", explanation="offsets 10 to 20 are gone"),
    "note-about-a-device": Note(
        at=AT, writer="partition/3", event="cordoned", explanation="XID 79", host="gpu-3", device="GPU-1"
    ),
    "refresh": Refresh(
        **ME,
        at=AT,
        writer="host/gpu-3",
        event="tick",
        explanation="2 of gpu wanted, 1 of 4 is free",
        changed={"reason": "2 of gpu wanted, 1 of 4 is free", "commit": 9_071},
        source=Source(partition=3, offset=1_042),
    ),
    "put": Put(writer="host/gpu-3", key="@host/gpu-3", record=HOST),
    "snapshot": Snapshot(
        writer="host/gpu-3",
        begun=9_071,
        part=1,
        records={ALLOCATED.key: Raw(encode(ALLOCATED)), HOST.key: Raw(encode(HOST))},
        last=True,
    ),
    "commit": Commit(
        writer="host/gpu-3",
        checkpoint=CHECKPOINT,
        positions={PENDING.key: 2},
        dropped=["gpu-3/tm-1/0192f0c1-0001"],
    ),
    "commit-shortest": Commit(writer="host/gpu-3", checkpoint=CHECKPOINT),
    "dead-letter": DeadLetter(
        at=AT,
        writer="host/gpu-3",
        source=MessageSource(topic="outfitter.registrations", partition=3, offset=1_044),
        reason="Expected `int` >= 1; found -1",
        length=3,
        sha256="a" * 64,
        body=b"\x00{\xff",
        message_key="gpu-3",
        field="$.resources.gpu.amount",
    ),
    "dead-letter-of-a-batch": DeadLetter(
        at=AT,
        writer="sweeper/3",
        source=MessageSource(topic="outfitter.registrations", partition=3, offset=1_049),
        reason="the record batch at offset 1045 is not of format 2, which Kafka has written since 0.11",
        length=3,
        sha256="b" * 64,
        body=b"abc",
        code="unreadable",
        first=1_045,
    ),
    "dead-letter-for-several": DeadLetter(
        at=AT,
        writer="host/gpu-3",
        source=MessageSource(topic="outfitter.registrations", partition=3, offset=1_060),
        reason="the message has no body; a JSON object is needed",
        length=0,
        sha256="c" * 64,
        body=b"",
        message_key="gpu-3",
        count=12,
        until=1_080,
    ),
}
KEYS = {
    "allocation-pending": b"gpu-3/tm-17/0192f0c1-7d3e",
    "host": b"@host/gpu-3",
    "device": b"@device/gpu-3/pci%2F0000%3A3b%3A00.0",
    "checkpoint": b"@checkpoint/host/gpu-3",
    "beat": b"host/gpu-3",
    "cordon": b"@cordon/gpu-3/k3v9-01",
    "cordon-order": b"k3v9-01",
    "dead-letter": b"outfitter.registrations/3/1044",
}
"""The keys of ARCHITECTURE.md, spelled out."""
