"""The driver contract: finding, describing, preparing and taking back the devices of a resource.

A factory builds a driver from the resource's `param.*` settings (Flink: `ExternalResourceDriverFactory`,
`ExternalResourceDriver`, `ExternalResourceInfo`). Every driver has `retrieve_resource_info`. A driver can implement
more interfaces, which the manager detects with `isinstance`: `Inventory`, `Preparation`, `Offers`,
`InUseCheck`, `Remarks`, `KubernetesRequest`, `YarnRequest`.

The manager gives every call a time limit, calls different drivers concurrently, and retries temporary errors. Calls
about one device are serial, so a driver needs no locks for them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

from msgspec import Struct

from outfitter_proto.records import Health


class DriverError(Exception):
    """Base of a driver's errors. Raise a subclass; the manager treats any other exception as temporary."""


class TemporaryDriverError(DriverError):
    """The call may work later. The worker stays pending with this message as the reason, and the manager repeats the
    call.

    `delay` is the time until the next try, in seconds or as a `timedelta`. If it is None or no valid time (`nan`, a
    text), the manager uses its own back-off.
    """

    def __init__(self, message: str, *, delay: float | timedelta | None = None) -> None:
        super().__init__(message)
        self.delay = delay.total_seconds() if isinstance(delay, timedelta) else delay


class PermanentDriverError(DriverError):
    """The call cannot work until a person changes something. Allocations that need it fail with this message."""


class NotEnoughDevicesError(DriverError):
    """The driver cannot name the requested number of devices, but perhaps fewer."""


class NotOnThisMachineError(ValueError):
    """For factories: a setting names something that is missing on this machine but may exist where the driver runs.

    A manager treats it as a wrong setting; `outfitter config check` only warns.
    """


class ExternalResourceInfo(Mapping[str, str]):
    """The properties of one device for operators: immutable strings. Hashable, equal by content.

    It has the methods of Flink's `org.apache.flink.api.common.externalresource.ExternalResourceInfo`
    (`getProperty`, `getKeys`) and those of a mapping.
    """

    __slots__ = ("_hash", "_properties")

    def __init__(self, properties: Mapping[str, str]) -> None:
        for key, value in properties.items():
            if not isinstance(key, str) or not isinstance(value, str):
                raise TypeError(f"an info's properties are strings; {key!r} is {value!r}")
        self._properties = dict(properties)
        self._hash: int | None = None

    def get_property(self, key: str) -> str | None:
        """The property's value, or None if the device has no such property."""
        return self._properties.get(key)

    def get_keys(self) -> Collection[str]:
        """The names of the properties."""
        return self._properties.keys()

    def __getitem__(self, key: str) -> str:
        return self._properties[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._properties)

    def __len__(self) -> int:
        return len(self._properties)

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(frozenset(self._properties.items()))
        return self._hash

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ExternalResourceInfo):
            return self._properties == other._properties
        return NotImplemented

    def __repr__(self) -> str:
        return f"ExternalResourceInfo({self._properties!r})"


class Worker(Struct, frozen=True, kw_only=True):
    """The worker that needs devices."""

    host: str
    resource: str
    """The resource whose devices it needs."""
    worker: str | None = None
    """None for `outfitter discover`, which calls for no worker."""
    incarnation: str | None = None
    """As `worker`."""
    owner_pid: int | None = None
    """The process whose death ends the allocation. None: there is none."""


class DeviceUser(Struct, frozen=True, kw_only=True):
    """A process that uses a device."""

    pid: int | None = None
    """As the kernel numbers it for the driver's process. None: somebody uses the device, and cannot be named."""
    program: str | None = None
    """The name of its program, without folders and arguments."""
    user: str | None = None
    """Its user's name. A driver need not know it: the manager looks it up."""


class CannotTell(Struct, frozen=True):
    """Nobody can tell who uses a device. `reason`: why, for people."""

    reason: str


Users = tuple[DeviceUser, ...] | CannotTell
"""Who uses a device: these processes, nobody (none of them), or nobody can tell."""


class Device(Struct, frozen=True, kw_only=True):
    """One device of an inventory."""

    properties: dict[str, str]
    """The infos for operators, at least `index`."""
    id: str | None = None
    """The canonical id, such as the hardware's UUID or serial. It must be the same in every resource that has this
    device. None: there is none. Then the manager uses `<resource>:<name>`, or without a name `<resource>:<index>`. A
    name that is a number gives `<resource>:name:<name>`, which is no index's."""
    name: str | None = None
    """Its name among its resource's devices on its host. It must stay with the device when others come or go."""
    aliases: tuple[str, ...] = ()
    """Other ids of the same device."""
    part_of: str | None = None
    """The id or an alias of the device that this one is a part of, as that device's own driver reports it; such as the
    GPU of a MIG instance. Whoever has the part keeps the whole from others, and the reverse. None: it is whole."""
    health: Health = Health.HEALTHY
    """Only healthy devices are granted."""
    reason: str | None = None
    """Why it is not healthy, for people."""
    env: dict[str, str] = {}
    """Variables for the worker's environment. The manager joins the values of several devices with `,`, equal ones
    once. A variable that decides which code a process runs (PATH, LD_…, PYTHON…, see `outfitter_proto.environment`)
    makes the report an error."""
    cdi: tuple[str, ...] = ()
    """Its names in the Container Device Interface, such as `nvidia.com/gpu=0`."""
    users: Users | None = None
    """Who uses it at this moment; it counts of an `InUseCheck`. A process to which the manager did not lend it keeps it
    from being lent. None: this driver does not look."""

    def info(self) -> ExternalResourceInfo:
        return ExternalResourceInfo(self.properties)


class Grant(Struct, frozen=True, kw_only=True):
    """One resource's devices of one allocation, for `prepare` and `unprepare`."""

    allocation: str
    """The record's key (`host/worker/incarnation`)."""
    token: int
    """Its fencing token, a number that only grows. A call with a lower token than the highest one seen for a device
    must change nothing."""
    worker: Worker
    device_ids: tuple[str, ...]
    """The canonical ids."""
    devices: tuple[Mapping[str, str], ...]
    """The properties of each, in the same order."""
    is_given_back: bool = False
    """The worker has deregistered, so its owner, if it lives, does not use the devices any more."""


class DriverParams(Mapping[str, str]):
    """A resource's `param.*` settings without the prefix, for a factory (as in Flink).

    `directory`: the folder of the configuration file, for relative paths. `warnings`: those that the factory gave.
    """

    __slots__ = ("_values", "directory", "warnings")

    def __init__(self, values: Mapping[str, str], *, directory: Path | None = None) -> None:
        self._values = dict(values)
        self.directory = directory
        self.warnings: list[str] = []

    def warn(self, message: str) -> None:
        """Warn about a setting. The message begins with its key: `retries: 9 is a lot`."""
        self.warnings.append(message)

    def __getitem__(self, key: str) -> str:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"DriverParams({self._values!r})"


class ExternalResourceDriver(ABC):
    """Finds the devices of one resource."""

    call_timeout: float = 30.0
    """Time limit of one call of this driver in seconds. If `driver-timeout` is configured, the manager sets it here
    before the first call."""

    not_granted_hint: str | None = None
    """A hint for a worker that waits because other workers hold all devices that the driver named."""

    knows_holders: bool = False
    """True: the driver never names a device that another worker holds. Then `amount` does not include held devices, and
    `NotEnoughDevicesError` is a temporary failure while other workers hold devices of the resource."""

    looks_from_afar: bool = False
    """True: the driver can see a host's devices from another machine. A manager in cluster scope needs that."""

    @abstractmethod
    async def retrieve_resource_info(self, amount: int, worker: Worker) -> Collection[ExternalResourceInfo]:
        """Name at least `amount` (1 or more) devices, in the order of preference.

        If the driver has no `Inventory`, the manager calls this for each worker. `amount` then includes the devices
        that others hold, because the driver does not know them. `outfitter discover` calls it once. Calls may be
        repeated and concurrent, and must have no outside effect.

        Raises:
            ValueError: the amount is not positive.
            NotEnoughDevicesError: there are fewer devices; the manager tries again with a smaller amount.
            TemporaryDriverError, PermanentDriverError: see these classes.
        """

    def device(self, info: ExternalResourceInfo) -> Device:
        """The device of an info from `retrieve_resource_info`, with environment and id if the info has them.

        Pure. The default has the properties only.
        """
        return Device(properties=dict(info))

    async def aclose(self) -> None:
        """Release the driver's own resources. Called once, after the last call has ended or was cancelled."""
        return


class Inventory(ABC):
    """A driver that knows all devices of its resource on a host and reports changes."""

    @abstractmethod
    def inventory(self, host: str) -> AsyncIterator[Sequence[Device]]:
        """Yield all devices at once, and again after each change.

        The manager keeps one iterator open per host. It waits `call_timeout` for the first set and without limit for
        later ones, so the driver limits the time of each poll. Each set replaces the one before: a missing device is
        gone. If the iterator raises or ends, the resource fails until a new iterator, opened after a delay, yields. If
        that fails again and again, the devices' health is unknown until then.
        """


class Preparation(ABC):
    """A driver that prepares devices for a worker and cleans them afterwards.

    Both calls must be idempotent: a restarted manager repeats them. Calls about one device are serial.

    Stale calls must change nothing. They come from a manager that was frozen and has been replaced. A call is stale
    if its token is lower than the highest one seen for a device, or was taken back already: the device may be another
    worker's by now, under another resource's name for it. A stale `prepare` raises `PermanentDriverError`, a stale
    `unprepare` returns.
    """

    @abstractmethod
    async def prepare(self, grant: Grant) -> None:
        """Prepare the devices. After a failure the manager calls `unprepare` and fails the allocation."""

    @abstractmethod
    async def unprepare(self, grant: Grant) -> None:
        """Take the devices back. The manager grants them again only after it returns, and repeats a failed call."""


class InUseCheck(ABC):
    """A driver that can check whether a device is in use: when a worker has given it back, and, by `Device.users` of
    its inventory, before a grant. No call is made on the way of a grant: what the last look said counts."""

    @abstractmethod
    async def in_use(self, grant: Grant) -> str | CannotTell | None:
        """Describe for people who uses any of the devices; None if they are unused.

        The manager asks again while somebody uses them, and after an error. `CannotTell`: there is no way to know. Then
        the devices are free, and history says `unconfirmed`.

        Raises:
            TemporaryDriverError, PermanentDriverError: nobody knows now, but may later.
        """


class Remarks(ABC):
    """A driver that knows what operators should change about hardware that it reports as healthy."""

    @abstractmethod
    async def remarks(self) -> Collection[str]:
        """A sentence for people about each such thing. `outfitter config check` and `doctor` show them.

        Raises:
            TemporaryDriverError, PermanentDriverError: see these classes.
        """


class Offers(ABC):
    """A driver that sets devices aside for a worker when it is asked for devices, before the grant.

    The worker may go before it is granted any, and the manager may be killed at any moment in between. So the manager
    tells the driver which workers may have an offer.
    """

    @abstractmethod
    def assume_offer(self, worker: Worker, amount: int) -> None:
        """After a restart: `amount` devices may have been set aside for a worker that was granted none. Called for each
        such worker, before other calls. It must be quick, and must have no outside effect."""

    @abstractmethod
    async def withdraw_offer(self, worker: Worker) -> None:
        """Give back what was set aside for a worker that went without a grant, if anything was. Idempotent. The manager
        calls it after the last `retrieve_resource_info` for that worker has ended, and repeats a failed call."""


class KubernetesRequest(ABC):
    """A driver that knows its resource's Kubernetes name (a configured `kubernetes.config-key` wins)."""

    @abstractmethod
    def kubernetes_resources(self, amount: int) -> Mapping[str, str]:
        """Extended-resource name → quantity, for `resources.requests` and `resources.limits`."""


class YarnRequest(ABC):
    """A driver that knows its resource's YARN name (a configured `yarn.config-key` wins)."""

    @abstractmethod
    def yarn_resources(self, amount: int) -> Mapping[str, int]:
        """Resource-information name → amount."""


class ExternalResourceDriverFactory(ABC):
    """Builds a driver from `param.*`. Flink's `ExternalResourceDriverFactory.createExternalResourceDriver`."""

    @abstractmethod
    def create_external_resource_driver(self, config: DriverParams) -> ExternalResourceDriver:
        """Build the driver. Called once, before any discovery; must not block.

        Raises:
            ValueError: a setting is wrong. The message has the key (`discovery-script.path`), the value and the valid
                values. The resource is then misconfigured.
        """
