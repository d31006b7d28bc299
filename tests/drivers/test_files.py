"""The files driver's devices are the files in a folder, as they come, go and change."""

import os
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import anyio
import pytest

from outfitter_drivers import files
from outfitter_drivers.api import Device, DriverParams, NotEnoughDevicesError, TemporaryDriverError, Worker
from outfitter_drivers.files import FilesDriver, FilesDriverFactory
from outfitter_proto.records import Health

Sets = AsyncIterator[Sequence[Device]]
WORKER = Worker(host="h", resource="r")


def put(folder: Path, name: str, content: str | bytes) -> None:
    """A file comes into the folder whole."""
    new = folder.parent / f"new-{name}"
    new.write_bytes(content.encode() if isinstance(content, str) else content)
    new.replace(folder / name)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "devices"
    path.mkdir()
    return path


async def next_set(sets: Sets) -> list[Device]:
    with anyio.fail_after(30):
        return list(await anext(sets))


async def look(folder: Path) -> dict[str, Device]:
    sets = FilesDriver(folder).inventory("h")
    found = await next_set(sets)
    await sets.aclose()  # type: ignore[attr-defined]  # an async generator
    return {device.properties["name"]: device for device in found}


async def test_a_look_that_was_cancelled_is_waited_for_by_the_next_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(folder, "gpu0", "")
    driver = FilesDriver(folder)
    begun, asked, back = threading.Event(), threading.Event(), threading.Event()
    well = files.read_description

    def slow(path: Path) -> dict[str, str]:
        begun.set()
        back.wait(60)
        return well(path)

    class Turn:
        """The driver's lock, which tells that somebody asks for it."""

        def __init__(self, lock: threading.Lock) -> None:
            self.acquire_it, self.release = lock.acquire, lock.release

        def acquire(self, *, timeout: float) -> bool:
            asked.set()
            return self.acquire_it(timeout=timeout)

    async def come_back() -> None:
        await anyio.to_thread.run_sync(asked.wait, 60)
        back.set()

    monkeypatch.setattr(files, "read_description", slow)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(driver.look)
        await anyio.to_thread.run_sync(begun.wait, 60)
        tasks.cancel_scope.cancel()
    driver._one_thread._busy = Turn(driver._one_thread._busy)  # type: ignore[assignment]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(come_back)
        assert [device.properties["name"] for device in await driver.look()] == ["gpu0"]


async def test_a_file_system_that_hangs_is_a_failure_and_one_thread_and_is_read_again_when_it_is_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(folder, "gpu0", "")
    driver = FilesDriver(folder, poll_interval=0.001)
    back, hung = threading.Event(), []
    well = files.read_description

    def hang(path: Path) -> dict[str, str]:
        hung.append(path)
        back.wait(60)
        return well(path)

    sets = driver.inventory("h")
    assert len(await next_set(sets)) == 1
    await sets.aclose()  # type: ignore[attr-defined]  # an async generator
    well_within, driver.call_timeout = driver.call_timeout, 0.2
    monkeypatch.setattr(files, "read_description", hang)
    while not hung:  # a look may be given up before its thread has begun
        with pytest.raises(TemporaryDriverError, match="does not answer"):
            await next_set(driver.inventory("h"))
    driver.call_timeout = well_within  # no clock refuses those that follow
    for _ in range(5):
        with pytest.raises(TemporaryDriverError, match="still does not answer"):
            await next_set(driver.inventory("h"))
    assert len(hung) == 1
    monkeypatch.setattr(files, "read_description", well)
    put(folder, "gpu1", "")
    back.set()
    with anyio.fail_after(20):
        while driver._one_thread._busy.locked():  # noqa: ASYNC110 - a thread that tells nobody
            await anyio.sleep(0.001)
    assert len(await next_set(driver.inventory("h"))) == 2


async def test_each_file_is_a_device_described_by_its_lines(folder: Path) -> None:
    put(folder, "gpu10", "")
    put(folder, "gpu9", "# a comment\n\nmodel = X = Y\r\nmemory.total_bytes=5\nenv.A=1\n")
    put(folder, ".hidden", "?")
    (folder / "sub").mkdir()
    first, second = (await look(folder)).values()
    assert first == Device(
        properties={"index": "0", "name": "gpu9", "model": "X = Y", "memory.total_bytes": "5"},
        id=f"file:{folder}/gpu9",
        env={"A": "1"},
    )
    assert second.properties == {"index": "1", "name": "gpu10"}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"what?", r"line 1 is 'what\?'; valid is key=value"),
        (b"a=1\n=2\n", "line 2"),
        (b"a=1\na=2\n", "line 2 sets a a second time"),
        (b"a=\xff\n", "is not UTF-8 at byte 2"),
        (b"a=\0\n", r"a is '\\x00'; valid is one line of text"),
        (b"x" * 70_000, "has more than 65536 bytes"),
        (b"health=ill", "health is 'ill'"),
        (b"health=unhealthy\nreason=fan", "^fan$"),
        (b"health=unhealthy", "described as unhealthy"),
    ],
)
async def test_what_cannot_be_read_is_unhealthy_with_its_reason_and_costs_itself_only(
    folder: Path, content: bytes, says: str
) -> None:
    put(folder, "good", "")
    put(folder, "ill", content)
    found = await look(folder)
    assert found["good"].health is Health.HEALTHY
    assert found["ill"].health is Health.UNHEALTHY
    with pytest.raises(AssertionError, match=says):
        raise AssertionError(found["ill"].reason)
    with pytest.raises(NotEnoughDevicesError, match=r"2 wanted, but .* has 1 healthy ones among 2 files"):
        await FilesDriver(folder).retrieve_resource_info(2, WORKER)


async def test_things_that_are_no_files_are_unhealthy_and_block_nothing(folder: Path) -> None:
    os.mkfifo(folder / "fifo")
    (folder / "dangling").symlink_to("nowhere")
    found = await look(folder)
    assert "is not a regular file" in (found["fifo"].reason or "")
    assert "No such file" in (found["dangling"].reason or "")


async def test_two_files_of_one_id_are_one_device_and_an_unhealthy_one(folder: Path) -> None:
    put(folder, "a", "id=X")
    put(folder, "b", "id=X")
    found = await look(folder)
    assert found["a"].id == "X"
    assert found["b"].id == f"file:{folder}/b"
    assert "has the same id as a: X" in (found["b"].reason or "")


async def test_a_name_that_is_not_utf8_can_still_go_over_the_wire(folder: Path) -> None:
    Path(os.fsdecode(os.fsencode(folder) + b"/gpu\xff")).write_text("")
    (device,) = (await look(folder)).values()
    assert (device.id or "").encode().endswith(b"gpu\\udcff")


async def test_changes_are_seen_and_a_device_keeps_its_id_while_its_file_cannot_be_read(folder: Path) -> None:
    put(folder, "a", "id=X")
    sets = FilesDriver(folder, poll_interval=0.01).inventory("h")
    assert [device.id for device in await next_set(sets)] == ["X"]
    put(folder, "a", "broken")
    (device,) = await next_set(sets)
    assert (device.id, device.health) == ("X", Health.UNHEALTHY)
    put(folder, "a", "id=X")
    (device,) = await next_set(sets)
    assert (device.id, device.health) == ("X", Health.HEALTHY)
    (folder / "a").unlink()
    assert await next_set(sets) == []
    folder.rmdir()
    with pytest.raises(TemporaryDriverError, match=r"cannot read the folder .*: No such file or directory"):
        await next_set(sets)


def test_settings_are_checked_and_a_relative_path_is_the_configurations(tmp_path: Path) -> None:
    factory = FilesDriverFactory()
    driver = factory.create_external_resource_driver(DriverParams({"path": "d"}, directory=tmp_path))
    assert driver._folder == tmp_path / "d"
    for params, says in (
        ({}, "path is missing"),
        ({"path": " "}, "path is missing"),
        ({"path": "d", "poll-interval": "-1"}, "poll-interval"),
        ({"pathh": "d"}, "did you mean 'path'"),
    ):
        with pytest.raises(ValueError, match=says):
            factory.create_external_resource_driver(DriverParams(params))
