"""Drivers that call a user's script for devices, as Flink's GPU plugin does.

`ScriptDriver` calls `<script> <amount> <args>`. `AllocateReleaseDriver` uses the older form of FLIP-108,
`<script> allocate|release <amount> <args>`, in which the script decides who gets which devices.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

import anyio

from outfitter_drivers import settings
from outfitter_drivers.api import (
    Device,
    ExternalResourceDriver,
    ExternalResourceInfo,
    Grant,
    NotEnoughDevicesError,
    Offers,
    PermanentDriverError,
    Preparation,
    TemporaryDriverError,
    Worker,
)
from outfitter_drivers.gpu.names import UUID, gpu_names, is_number
from outfitter_drivers.gpu.nvidia import NO_GPU, cuda_environment
from outfitter_drivers.program import inherited
from outfitter_drivers.script import ScriptOutcome, logger, parse_indexes, run_script

DEFAULT_TIMEOUT = 10.0
"""Time limit of a script in seconds, as fixed in Flink."""

_MOST_GIVEN_BACK = 2
"""Offers that one call gives back, each by two calls of the script."""
_VARIABLES = (
    "OUTFITTER_WORKER",
    "OUTFITTER_INCARNATION",
    "OUTFITTER_OWNER_PID",
    "OUTFITTER_TOKEN",
    "OUTFITTER_DEVICES",
)


class ScriptDriver(ExternalResourceDriver):
    """Names the devices that a script prints. It does not know the held devices, so the amount must include them."""

    not_granted_hint: str | None = (
        "the script named only devices that others hold: if it always prints its first ones, set "
        "param.discovery-script.inventory-amount to how many this host has"
    )

    def __init__(
        self,
        script: str,
        arguments: Sequence[str] = (),
        *,
        timeout: float = DEFAULT_TIMEOUT,
        inventory_amount: int | None = None,
        environment: Collection[str] = (),
    ) -> None:
        """`timeout`: seconds. `inventory_amount`: always call the script with this number; None: with the requested
        one. `environment`: more variables for the script; see `program.inherited`."""
        self._script = script
        self._environment = tuple(environment)
        self._arguments = tuple(arguments)
        self._timeout = timeout
        self._inventory_amount = inventory_amount
        self.call_timeout = timeout + 5

    async def retrieve_resource_info(self, amount: int, worker: Worker) -> Collection[ExternalResourceInfo]:
        settings.require_amount(amount)
        # `outfitter discover` calls for no worker: then make Flink's own call, with the given amount.
        requested = amount if self._inventory_amount is None or worker.worker is None else self._inventory_amount
        env = inherited(os.environ, self._environment)
        outcome = await run_script([self._script, str(requested), *self._arguments], timeout=self._timeout, env=env)
        message = f"{self._script} {requested} {outcome}"
        if outcome.code < 0 or (outcome.code > 0 and requested != amount):
            # Killed, or called for the whole inventory: a smaller amount would not help.
            raise TemporaryDriverError(message)
        if outcome.code > 0:
            raise NotEnoughDevicesError(message)
        indexes = gpu_names(parse_indexes(outcome.stdout))
        if len(indexes) < amount:
            raise NotEnoughDevicesError(f"{amount} devices wanted, but {self._script} {requested} names {len(indexes)}")
        return [ExternalResourceInfo({"index": index}) for index in indexes]

    def device(self, info: ExternalResourceInfo) -> Device:
        return named_gpu(info["index"])


class AllocateReleaseDriver(ScriptDriver, Preparation, Offers):
    """Lets a script in FLIP-108's older form allocate and release devices for one worker.

    The script chooses, so the driver calls it before the grant, without a fencing token. `prepare` calls it again, with
    the token, only if the driver does not know the answer: after a restart, or if other devices were granted. So a
    script must answer a repeated `allocate` of one worker and incarnation with the same devices, and a repeated
    `release` with success.

    Devices that the script has allocated for a worker are an offer until they are granted. An offer is given back when
    its worker goes, at the end, or after `offer_stands` if another worker finds too few. The driver may not know which
    devices an offer has: the manager or the script was killed, or the script printed a message. Then it calls
    `allocate` again to learn them. Too few devices are a temporary failure while any offer may be outstanding.
    """

    knows_holders = True
    not_granted_hint = None
    offer_stands: float = 10.0
    """Seconds for which the devices of an offer wait for its grant. Until then no other worker gets them."""

    def __init__(
        self,
        script: str,
        arguments: Sequence[str] = (),
        *,
        timeout: float = DEFAULT_TIMEOUT,
        environment: Collection[str] = (),
    ) -> None:
        super().__init__(script, arguments, timeout=timeout, environment=environment)
        # A call may give back `_MOST_GIVEN_BACK` offers and allocate again, and wait for another call that does so.
        self.call_timeout = 2 * (2 + 2 * _MOST_GIVEN_BACK) * timeout + 5
        self._allocated: dict[Worker, tuple[str, ...]] = {}
        self._offered_at: dict[Worker, float] = {}
        self._granted: set[Worker] = set()
        # Workers for whom the script may have allocated devices, and how many, where nobody knows which.
        self._unknown: dict[Worker, int] = {}
        self._highest_token: dict[str, int] = {}
        self._taken_back: dict[str, int] = {}
        self._choosing = anyio.Lock()

    async def retrieve_resource_info(self, amount: int, worker: Worker) -> Collection[ExternalResourceInfo]:
        settings.require_amount(amount)
        async with self._choosing:
            indexes = await self._choose(amount, worker)
        return [ExternalResourceInfo({"index": index}) for index in indexes]

    def assume_offer(self, worker: Worker, amount: int) -> None:
        if worker not in self._allocated:
            self._unknown.setdefault(worker, amount)

    async def withdraw_offer(self, worker: Worker) -> None:
        async with self._choosing:
            if worker not in self._granted:
                await self._give_back(worker)

    async def prepare(self, grant: Grant) -> None:
        self._refuse_stale(grant)
        for device in grant.device_ids:
            if grant.token <= self._taken_back.get(device, 0):
                raise PermanentDriverError(f"grant {grant.token} of {device} was taken back already")
        granted = _indexes(grant)
        async with self._choosing:
            if set(self._allocated.get(grant.worker, ())) != set(granted):
                for worker, offered in list(self._allocated.items()):
                    if worker not in {grant.worker, *self._granted} and not set(offered).isdisjoint(granted):
                        await self._release(offered, worker)  # a worker before it in the queue got them
                try:
                    indexes = await self._allocate(len(granted), grant.worker, token=grant.token)
                except NotEnoughDevicesError:
                    if not await self._give_back_old(but=grant.worker):
                        raise
                    indexes = await self._allocate(len(granted), grant.worker, token=grant.token)
                if set(indexes) != set(granted):
                    raise TemporaryDriverError(
                        f"{self._script} allocated {', '.join(indexes)} where {', '.join(granted)} were granted"
                    )
            self._granted.add(grant.worker)

    async def unprepare(self, grant: Grant) -> None:
        for device in grant.device_ids:
            if grant.token < self._highest_token.get(device, 0) or grant.token == self._taken_back.get(device):
                return  # perhaps another worker's by now
        self._refuse_stale(grant)
        async with self._choosing:
            # Release the devices that the script allocated. Other granted devices are another worker's.
            indexes = self._allocated.get(grant.worker) or _indexes(grant)
            await self._release(indexes, grant.worker, token=grant.token)
            self._taken_back.update(dict.fromkeys(grant.device_ids, grant.token))

    async def aclose(self) -> None:
        async with self._choosing:
            for worker in self._offers():
                await self._try_to_give_back(worker)

    async def _choose(self, amount: int, worker: Worker) -> tuple[str, ...]:
        allocated = self._allocated.get(worker)
        if allocated is not None and len(allocated) >= amount:
            return allocated
        if allocated is not None and worker not in self._granted:
            await self._release(allocated, worker)
        try:
            indexes = await self._allocate(amount, worker)
        except NotEnoughDevicesError as error:
            if not await self._give_back_old(but=worker):
                self._raise_if_outstanding(error, worker)
                raise
            try:
                indexes = await self._allocate(amount, worker)
            except NotEnoughDevicesError as still:
                self._raise_if_outstanding(still, worker)
                raise
        # `outfitter discover` calls for no worker, so release the devices at once.
        if worker.worker is None or len(indexes) < amount:
            await self._release(indexes, worker)
        if len(indexes) < amount:
            raise NotEnoughDevicesError(f"{amount} devices wanted, but {self._script} allocated {len(indexes)}")
        return indexes

    async def _allocate(self, amount: int, worker: Worker, *, token: int | None = None) -> tuple[str, ...]:
        was_unknown = worker in self._unknown
        self._unknown.setdefault(worker, amount)  # until its answer is known
        outcome = await self._call("allocate", amount, worker, token=token)
        if outcome.code > 0 and not was_unknown:
            del self._unknown[worker]
        if outcome.code != 0:
            kind = TemporaryDriverError if outcome.code < 0 else NotEnoughDevicesError
            raise kind(f"{self._script} allocate {amount} {outcome}")
        indexes = tuple(gpu_names(parse_indexes(outcome.stdout)))
        del self._unknown[worker]
        self._allocated[worker] = indexes
        self._offered_at[worker] = anyio.current_time()
        return indexes

    async def _release(self, indexes: Sequence[str], worker: Worker, *, token: int | None = None) -> None:
        outcome = await self._call("release", len(indexes), worker, token=token, devices=indexes)
        if outcome.code != 0:
            raise TemporaryDriverError(f"{self._script} release {len(indexes)} {outcome}")
        for known in (self._allocated, self._offered_at, self._unknown):
            known.pop(worker, None)
        self._granted.discard(worker)

    # --- offers ---

    def _offers(self) -> list[Worker]:
        """The workers that may have an offer, the known ones first."""
        return [worker for worker in {**self._allocated, **self._unknown} if worker not in self._granted]

    def _raise_if_outstanding(self, error: NotEnoughDevicesError, worker: Worker) -> None:
        """Raise a temporary error if other workers may have an offer."""
        if others := [other.worker for other in self._offers() if other != worker]:
            raise TemporaryDriverError(f"{error}; worker {others[0]} is about to get some, or has not given them back")

    async def _give_back_old(self, *, but: Worker) -> bool:
        """Give back some offers that others have had for longer than `offer_stands`. Returns whether there were any."""
        since = anyio.current_time() - self.offer_stands
        old = [worker for worker in self._offers() if worker != but and self._offered_at.get(worker, 0.0) <= since]
        given_back = [await self._try_to_give_back(worker) for worker in old[:_MOST_GIVEN_BACK]]
        return any(given_back)

    async def _try_to_give_back(self, worker: Worker) -> bool:
        try:
            await self._give_back(worker)
        except (TemporaryDriverError, PermanentDriverError) as error:
            logger.warning("devices of worker %s stay allocated: %s", worker.worker, error)
            return False
        return True

    async def _give_back(self, worker: Worker) -> None:
        """Give back a worker's offer, if it has any."""
        if worker in self._unknown:
            try:
                await self._allocate(self._unknown[worker], worker)
            except NotEnoughDevicesError:
                # The script has no devices for this worker: it would have named them again.
                del self._unknown[worker]
        if worker in self._allocated:
            await self._release(self._allocated[worker], worker)

    async def _call(
        self, verb: str, amount: int, worker: Worker, *, token: int | None, devices: Sequence[str] | None = None
    ) -> ScriptOutcome:
        env = inherited(os.environ, self._environment)
        for name in _VARIABLES:
            env.pop(name, None)
        values = (
            worker.worker,
            worker.incarnation,
            worker.owner_pid,
            token,
            None if devices is None else ",".join(devices),
        )
        env.update({name: str(value) for name, value in zip(_VARIABLES, values, strict=True) if value is not None})
        return await run_script([self._script, verb, str(amount), *self._arguments], timeout=self._timeout, env=env)

    def _refuse_stale(self, grant: Grant) -> None:
        for device in grant.device_ids:
            highest = self._highest_token.get(device, 0)
            if grant.token < highest:
                raise PermanentDriverError(f"grant {grant.token} of {device} is older than {highest}")
        self._highest_token.update(dict.fromkeys(grant.device_ids, grant.token))


def named_gpu(index: str) -> Device:
    """The device that a script calls `index`: a GPU's UUID or number, or a name only known to the script. The variables
    of such a name show CUDA no GPU: without any, it would see those of other workers, too."""
    if UUID.fullmatch(index):
        return Device(
            properties={"index": index}, id=index, env=cuda_environment(index), cdi=(f"nvidia.com/gpu={index}",)
        )
    return Device(properties={"index": index}, env=cuda_environment(index) if is_number(index) else dict(NO_GPU))


def _indexes(grant: Grant) -> tuple[str, ...]:
    return tuple(device["index"] for device in grant.devices)
