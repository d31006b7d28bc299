"""The driver contract: how a resource's devices are found, described, made ready and taken back.

A driver finds the devices of one resource. A factory builds it from the resource's `param.*` settings
(Flink: `ExternalResourceDriverFactory`, `ExternalResourceDriver`, `ExternalResourceInfo`). What every driver
can do is `retrieve_resource_info`; what richer drivers can do on top are small interfaces of their own, which
the manager looks for with `isinstance`: `Inventory`, `Preparation`, `InUseCheck`, `KubernetesRequest`,
`YarnRequest`.

The manager bounds every call with a time limit, runs calls of different drivers concurrently, and retries
what is temporary. A driver needs no locks of its own for calls about one device: those are serial.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

from msgspec import Struct

from outfitter_proto.records import Health


class DriverError(Exception):
    """A driver's verdict. Use one of the two kinds; any other exception counts as temporary."""


class TemporaryDriverError(DriverError):
    """It may work later: the worker stays pending with this message as the reason, and the call is repeated.

    `delay` is how long to wait before the next try, in seconds or as a `timedelta`; None for the manager's own
    back-off, which also stands for whatever is no time to wait (`nan`, a text).
    """

    def __init__(self, message: str, *, delay: float | timedelta | None = None) -> None:
        super().__init__(message)
        self.delay = delay.total_seconds() if isinstance(delay, timedelta) else delay


class PermanentDriverError(DriverError):
    """It will not work until somebody changes something: what depends on it fails with this message."""


class NotEnoughDevicesError(DriverError):
    """The driver cannot name that many devices; asked for fewer it might."""


class NotOnThisMachineError(ValueError):
    """A setting that may be right where the driver is to run: what it names is not on this machine.

    For factories. A manager treats it as any wrong setting; `outfitter config check` only warns.
    """


class ExternalResourceInfo(Mapping[str, str]):
    """What an operator is told of one device: immutable string properties.

    Follows Flink's `org.apache.flink.api.common.externalresource.ExternalResourceInfo`
    (`getProperty`, `getKeys`), with mapping access on top. Hashable, equal by content.
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
        """The names of the properties there are."""
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
    """For whom devices are sought. `outfitter discover` and inventories speak for no worker in particular."""

    host: str
    resource: str
    worker: str | None = None
    incarnation: str | None = None
    owner_pid: int | None = None


class Device(Struct, frozen=True, kw_only=True):
    """One device of an inventory.

    `id` is the canonical id: a UUID or serial where the hardware has one, the same in every resource that
    shows this device. Where there is only an index, leave it None: the manager then calls it
    `<resource>:<index>`. `aliases` are other ids under which the same device may be known. `properties` are
    what operators see (at least `index`). `env` is what this device adds to its worker's environment: the
    values of several devices for one variable are joined with `,`, equal ones once. A variable that decides which code
    a process runs (PATH, LD_…, PYTHON… and the like, see `outfitter_proto.environment`) makes the report an error.
    `cdi` are its CDI names.
    """

    properties: dict[str, str]
    id: str | None = None
    aliases: tuple[str, ...] = ()
    health: Health = Health.HEALTHY
    reason: str | None = None
    env: dict[str, str] = {}
    cdi: tuple[str, ...] = ()

    def info(self) -> ExternalResourceInfo:
        return ExternalResourceInfo(self.properties)


class Grant(Struct, frozen=True, kw_only=True):
    """What `prepare` and `unprepare` are about: one resource's devices of one allocation.

    `allocation` is the record's key (`host/worker/incarnation`), `token` its fencing token: a number that
    only grows, so a call with a lower one than the highest seen for a device must change nothing.
    """

    allocation: str
    token: int
    worker: Worker
    device_ids: tuple[str, ...]
    devices: tuple[Mapping[str, str], ...]


class DriverParams(Mapping[str, str]):
    """A resource's `param.*` settings, prefix stripped: all that a factory is told (as in Flink).

    `directory` is the folder of the configuration file, against which relative paths may be resolved. `warnings` are
    what the factory had to say of settings that are no errors.
    """

    __slots__ = ("_values", "directory", "warnings")

    def __init__(self, values: Mapping[str, str], *, directory: Path | None = None) -> None:
        self._values = dict(values)
        self.directory = directory
        self.warnings: list[str] = []

    def warn(self, message: str) -> None:
        """Say something of a setting that is no error, beginning with its key: `retries: 9 is a lot`."""
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
    """How many seconds one call of this driver may take before the manager gives it up. The driver says what it needs;
    where `driver-timeout` is configured, that is put in its place before the first call."""

    not_granted_hint: str | None = None
    """What to tell a worker that waits although the driver named enough devices, because all of them are held."""

    knows_holders: bool = False
    """True: it never names a device that another worker holds, so `amount` is what one worker wants, held ones
    not included."""

    looks_from_afar: bool = False
    """True: it can look at a host from another machine, so a manager of cluster scope can use it."""

    @abstractmethod
    async def retrieve_resource_info(self, amount: int, worker: Worker) -> Collection[ExternalResourceInfo]:
        """Name at least `amount` (a positive number) devices, in the order of preference.

        The manager calls it for each worker when the driver has no `Inventory`; `amount` then includes what
        others already hold, since this call knows nothing of them. `outfitter discover` calls it once. May be
        called repeatedly and concurrently; must change nothing outside.

        Raises:
            ValueError: the amount is not positive.
            NotEnoughDevicesError: not that many; the manager asks for fewer.
            TemporaryDriverError, PermanentDriverError: see there.
        """

    def device(self, info: ExternalResourceInfo) -> Device:
        """The device that an info of `retrieve_resource_info` speaks of: what it adds to a worker's environment,
        its canonical id if the info tells one. Pure; by default the properties and nothing else.
        """
        return Device(properties=dict(info))

    async def aclose(self) -> None:
        """Let go of everything. Called once, after the last call ended or was cancelled."""
        return


class Inventory(ABC):
    """A driver that knows all devices of its resource on a host, and keeps looking at them."""

    @abstractmethod
    def inventory(self, host: str) -> AsyncIterator[Sequence[Device]]:
        """Yield the full set of devices, once at first and again whenever it has changed.

        The manager keeps one such iterator open per host. The first set is due within `call_timeout`; later ones
        come when something has changed, so the driver itself limits the time of each look. Each set replaces the
        one before; a device that is missing in it is gone. When it raises or ends, the resource counts as failed
        until a new iterator, opened after a delay, has yielded.
        """


class Preparation(ABC):
    """A driver that makes devices ready for a worker, and clean again afterwards.

    Both calls are idempotent, are repeated after a restart of the manager, and come one at a time per device. A call
    with a token lower than the highest seen for a device changes nothing; nor does a `prepare` with a token that was
    taken back already: it comes from a manager that was frozen and has been replaced meanwhile. Such a `prepare`
    raises `PermanentDriverError`, such an `unprepare` returns.
    """

    @abstractmethod
    async def prepare(self, grant: Grant) -> None:
        """Make the devices ready. A failure fails the allocation after `unprepare`."""

    @abstractmethod
    async def unprepare(self, grant: Grant) -> None:
        """Take the devices back. Until it has returned they are lent to nobody; a failure is repeated."""


class InUseCheck(ABC):
    """A driver that can tell whether anybody still uses a device."""

    @abstractmethod
    async def in_use(self, grant: Grant) -> str | None:
        """Say who still uses any of the devices (for people), or None when nobody does."""


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
        """Build the driver; called once, before anything is discovered; must not block.

        Raises:
            ValueError: a setting is wrong; the message names the key (`discovery-script.path`), what was
                found, and what would be valid. The resource counts as misconfigured.
        """
