"""The conformance kit: the driver contract in `api` as tests to inherit.

    class TestMyDriver(DriverContract):
        def make_driver(self):
            return MyDriverFactory().create_external_resource_driver(DriverParams({"path": "…"}))

It works with any test runner that collects `test_*` methods and needs only anyio. Where the tests run, the driver
should find at least `amount` devices and fewer than `too_many`.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

import anyio

from outfitter_drivers import properties
from outfitter_drivers.api import (
    CannotTell,
    Device,
    DeviceUser,
    DriverError,
    ExternalResourceDriver,
    ExternalResourceInfo,
    Grant,
    InUseCheck,
    Inventory,
    KubernetesRequest,
    Offers,
    PermanentDriverError,
    Preparation,
    Remarks,
    Worker,
    YarnRequest,
)
from outfitter_proto import environment
from outfitter_proto.records import Health

_PCI_NAME = re.compile(r"pci:[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


def _checked(check: Callable[[DriverContract, ExternalResourceDriver], Awaitable[None]]) -> Callable[[Any], None]:
    """A test that builds a driver, checks it and closes it."""

    def test(self: DriverContract) -> None:
        async def main() -> None:
            driver = self.make_driver()
            try:
                await check(self, driver)
            finally:
                with anyio.fail_after(driver.call_timeout, shield=True):
                    await driver.aclose()

        anyio.run(main)

    test.__name__ = check.__name__
    return test


class DriverContract:
    """Subclass it and implement `make_driver`: each promise of the contract becomes a test."""

    amount: int = 1
    """The least number of devices that the driver finds."""

    too_many: int = 9_999
    """More devices than the driver finds."""

    host: str = "host-under-test"

    @abstractmethod
    def make_driver(self) -> ExternalResourceDriver:
        """A new driver from its factory."""

    def make_whole_driver(self) -> ExternalResourceDriver | None:
        """A new driver of the devices of which this driver's devices are parts. None: this one reports these, too."""
        return None

    def worker(self, name: str = "worker") -> Worker:
        return Worker(host=self.host, resource="thing", worker=name, incarnation=f"{name}-1")

    @_checked
    async def test_it_names_as_many_distinct_devices_as_are_wanted(self, driver: ExternalResourceDriver) -> None:
        infos = await self._retrieve(driver)
        assert len(infos) >= self.amount
        assert len(set(infos)) == len(infos)
        for info in infos:
            assert isinstance(info, ExternalResourceInfo)
            _assert_device(driver.device(info))

    @_checked
    async def test_asking_again_and_at_once_changes_nothing(self, driver: ExternalResourceDriver) -> None:
        first = set(await self._retrieve(driver))
        answers: list[set[ExternalResourceInfo]] = []

        async def ask() -> None:
            answers.append(set(await self._retrieve(driver)))

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(ask)
        assert answers == [first] * 3

    @_checked
    async def test_wanting_too_many_is_a_verdict_that_says_why(self, driver: ExternalResourceDriver) -> None:
        try:
            infos = await driver.retrieve_resource_info(self.too_many, self.worker())
        except DriverError as error:
            assert str(error), "a driver's error needs a message"
        else:
            raise AssertionError(f"{len(infos)} devices where {self.too_many} were wanted")

    @_checked
    async def test_an_amount_that_is_not_positive_is_refused(self, driver: ExternalResourceDriver) -> None:
        for amount in (0, -1):
            try:
                await driver.retrieve_resource_info(amount, self.worker())
            except ValueError:
                continue
            raise AssertionError(f"amount {amount} was answered")

    @_checked
    async def test_a_cancelled_call_leaves_the_driver_usable(self, driver: ExternalResourceDriver) -> None:
        for delay in (0, 0.001, 0.01):
            with anyio.move_on_after(delay):
                await self._retrieve(driver)
        assert len(await self._retrieve(driver)) >= self.amount

    @_checked
    async def test_it_can_be_closed_unused(self, driver: ExternalResourceDriver) -> None:
        assert isinstance(driver, ExternalResourceDriver)

    @_checked
    async def test_its_inventory_lists_whole_devices_and_agrees_with_what_it_names(
        self, driver: ExternalResourceDriver
    ) -> None:
        if not isinstance(driver, Inventory):
            return
        devices = await self._first_set(driver)
        for device in devices:
            _assert_device(device)
        names = [device.id or device.name or f"index {device.properties['index']}" for device in devices]
        assert len(set(names)) == len(names), f"one device twice: {names}"
        healthy = {device.info() for device in devices if device.health is Health.HEALTHY}
        assert len(healthy) >= self.amount
        assert set(await self._retrieve(driver)) <= healthy

    @_checked
    async def test_its_parts_are_of_devices_that_their_own_driver_reports(self, driver: ExternalResourceDriver) -> None:
        if not isinstance(driver, Inventory):
            return
        devices = await self._first_set(driver)
        whole_driver = self.make_whole_driver()
        try:
            wholes = devices if whole_driver is None else await self._first_set(whole_driver)
        finally:
            if whole_driver is not None:
                await whole_driver.aclose()
        names = {name for whole in wholes for name in (whole.id, *whole.aliases)}
        for device in devices:
            whole = device.part_of
            if whole is None:
                continue
            assert whole not in (device.id, *device.aliases), f"part of itself: {device}"
            assert whole in names or _PCI_NAME.fullmatch(whole), (
                f"{device} is part of no reported device ({names}), nor of one with a name such as pci:0000:83:00.0"
            )

    @_checked
    async def test_two_inventories_at_once_see_the_same(self, driver: ExternalResourceDriver) -> None:
        if isinstance(driver, Inventory):
            assert list(await self._first_set(driver)) == list(await self._first_set(driver))

    @_checked
    async def test_preparing_and_taking_back_can_be_repeated(self, driver: ExternalResourceDriver) -> None:
        if not isinstance(driver, Preparation):
            return
        grant = await self._grant(driver, token=5)
        for act in (driver.prepare, driver.prepare, driver.unprepare, driver.unprepare):
            with anyio.fail_after(driver.call_timeout):
                await act(grant)

    @_checked
    async def test_a_grant_with_an_older_token_is_not_prepared(self, driver: ExternalResourceDriver) -> None:
        if not isinstance(driver, Preparation):
            return
        newer = await self._grant(driver, token=5)
        await driver.prepare(newer)
        older = Grant(
            allocation="older", token=4, worker=newer.worker, device_ids=newer.device_ids, devices=newer.devices
        )
        try:
            await driver.prepare(older)
        except PermanentDriverError:
            pass
        else:
            raise AssertionError("an older grant was prepared")
        await driver.unprepare(older)
        await driver.prepare(newer)
        await driver.unprepare(newer)

    @_checked
    async def test_a_grant_that_was_taken_back_is_not_prepared_again(self, driver: ExternalResourceDriver) -> None:
        if not isinstance(driver, Preparation):
            return
        grant = await self._grant(driver, token=5)
        await driver.prepare(grant)
        await driver.unprepare(grant)
        try:
            await driver.prepare(grant)
        except PermanentDriverError:
            pass
        else:
            raise AssertionError("a grant that was taken back was prepared again")
        later = await self._grant(driver, token=6)
        await driver.prepare(later)
        await driver.unprepare(later)

    @_checked
    async def test_an_offer_can_be_withdrawn_again_and_where_there_is_none(
        self, driver: ExternalResourceDriver
    ) -> None:
        if not isinstance(driver, Offers):
            return
        gone, unasked = self.worker("gone"), self.worker("unasked")
        driver.assume_offer(unasked, self.amount)
        with anyio.fail_after(driver.call_timeout):
            await driver.retrieve_resource_info(self.amount, gone)
        for worker in (gone, gone, unasked, unasked):
            with anyio.fail_after(driver.call_timeout):
                await driver.withdraw_offer(worker)
        assert len(await self._retrieve(driver)) >= self.amount

    @_checked
    async def test_it_says_who_uses_a_device_in_words_or_nothing(self, driver: ExternalResourceDriver) -> None:
        if isinstance(driver, InUseCheck):
            user = await driver.in_use(await self._grant(driver, token=1))
            assert user is None or (user.reason if isinstance(user, CannotTell) else user)

    @_checked
    async def test_its_remarks_are_words(self, driver: ExternalResourceDriver) -> None:
        if isinstance(driver, Remarks):
            assert all(isinstance(remark, str) and remark for remark in await driver.remarks())

    @_checked
    async def test_its_deployment_requests_are_names_with_amounts(self, driver: ExternalResourceDriver) -> None:
        if isinstance(driver, KubernetesRequest):
            request: Mapping[str, object] = driver.kubernetes_resources(2)
            assert all(isinstance(name, str) and isinstance(value, str) for name, value in request.items())
        if isinstance(driver, YarnRequest):
            request = driver.yarn_resources(2)
            assert all(isinstance(name, str) and isinstance(value, int) for name, value in request.items())

    # --- helpers ---

    async def _retrieve(self, driver: ExternalResourceDriver) -> Collection[ExternalResourceInfo]:
        with anyio.fail_after(driver.call_timeout):
            return await driver.retrieve_resource_info(self.amount, self.worker())

    async def _first_set(self, driver: ExternalResourceDriver) -> Sequence[Device]:
        if not isinstance(driver, Inventory):
            raise TypeError("the driver has no inventory")
        sets = driver.inventory(self.host)
        try:
            with anyio.fail_after(driver.call_timeout):
                return await anext(sets)
        finally:
            if isinstance(sets, AsyncGenerator):
                await sets.aclose()

    async def _grant(self, driver: ExternalResourceDriver, *, token: int) -> Grant:
        infos = list(await self._retrieve(driver))[: self.amount]
        devices = [driver.device(info) for info in infos]
        return Grant(
            allocation=f"{self.host}/worker/worker-1",
            token=token,
            worker=self.worker(),
            device_ids=tuple(device.id or f"thing:{device.name or device.properties['index']}" for device in devices),
            devices=tuple(device.properties for device in devices),
        )


def _assert_device(device: Device) -> None:
    assert isinstance(device, Device)
    assert device.id or device.name or device.properties.get("index"), f"neither an id, a name nor an index: {device}"
    for text in (*device.properties.items(), *device.env.items()):
        assert all(isinstance(part, str) for part in text), f"not strings: {text}"
    for name, value in device.properties.items():
        assert properties.fault(name, value) is None, properties.fault(name, value)
    for name, value in device.env.items():
        assert environment.refusal(name, value) is None, f"no driver may set {name}: {environment.refusal(name, value)}"
    assert device.health is Health.HEALTHY or device.reason, f"unhealthy without a reason: {device}"
    if isinstance(device.users, CannotTell):
        assert device.users.reason, f"nobody can tell who uses it, without a reason: {device}"
    for user in () if device.users is None or isinstance(device.users, CannotTell) else device.users:
        assert isinstance(user, DeviceUser), f"no process: {user!r}"
        assert user.pid is None or user.pid > 0, f"no pid: {user}"
