"""`outfitter run` and `RuntimeContext` through outages of a real broker, with a real manager."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anyio
import pytest

from outfitter import RuntimeContext
from outfitter.session.worker_session import WorkerSession
from outfitter_proto.bus import connect
from outfitter_proto.records import Register
from support.kafka.broker import Broker
from support.managers.process import Manager, serving_on

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(180), pytest.mark.slow]

LEASE_S = 3.0
OUTAGE_S = 2 * LEASE_S
PATIENCE = 60.0


@pytest.fixture
def two_gpus(tmp_path: Path, own_broker: Broker) -> Iterator[Manager]:
    with serving_on(own_broker, tmp_path / "manager", gpus=2, partitions=1) as manager:
        yield manager


def test_who_waits_through_an_outage_keeps_what_is_granted_when_it_is_over(
    two_gpus: Manager, own_broker: Broker
) -> None:
    context = RuntimeContext(
        {"gpu": 1}, bus=two_gpus.bus_url, host=two_gpus.host, worker="context", lease=LEASE_S, owner=False
    )
    arguments = ["--worker", "run", "--lease", f"{LEASE_S}s", "--", "sh", "-c", "echo got it"]
    with (
        two_gpus.popen(
            "run", "--worker", "holder", "--resource", "gpu=2", "--", "cat", stdin=subprocess.PIPE
        ) as holder,
        ThreadPoolExecutor() as pool,
    ):
        two_gpus.wait_for_state("holder", "allocated")
        entering = pool.submit(context.__enter__)
        two_gpus.wait_for_state("context", "pending")
        with two_gpus.popen("run", *arguments) as waiter:
            two_gpus.wait_for_state("run", "pending")
            own_broker.kill9()
            holder.kill()
            time.sleep(OUTAGE_S)  # it lasts so long
            anyio.run(own_broker.restarted)
            out, err = waiter.communicate(timeout=PATIENCE)
        assert (waiter.returncode, out) == (0, "got it\n"), err
        assert "lost" not in err
        assert "stop using" not in err, "who waits has nothing to stop using"
        entering.result(PATIENCE)
        try:
            assert len(context.get_external_resource_infos("gpu")) == 1
        finally:
            context.__exit__(None, None, None)
        holder.communicate(timeout=PATIENCE)


def test_a_command_that_has_just_begun_and_is_watched_survives_an_outage(two_gpus: Manager, own_broker: Broker) -> None:
    command = ["sh", "-c", "echo ready; read line; echo $line"]
    arguments = ["--worker", "young", "--lease", f"{LEASE_S}s", "--kill-after", "100ms", "--", *command]
    with two_gpus.popen("run", *arguments, stdin=subprocess.PIPE) as young:
        assert young.stdout is not None
        assert young.stdout.readline() == "ready\n"
        own_broker.pause()
        try:
            time.sleep(OUTAGE_S)  # it lasts so long
        finally:
            own_broker.resume()
        out, err = young.communicate("survived\n", timeout=PATIENCE)
    assert (young.returncode, out) == (0, "survived\n"), err
    assert "lost" not in err


async def test_a_worker_logs_one_line_at_the_beginning_of_an_outage_and_one_at_its_end(
    two_gpus: Manager, own_broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    """An empty fetch of a broker that hangs does not show that the bus works again."""
    request = Register(host=two_gpus.host, worker="w", incarnation="1", lease_s=None)
    async with connect(two_gpus.bus_url) as bus, WorkerSession(bus, request) as session:
        await session.wait()
        own_broker.pause()
        try:
            await anyio.sleep(20)  # it lasts so long: several fetches fail, and several are empty
            lines = [record.message for record in caplog.records if "the bus works again" in record.message]
            assert lines == []
        finally:
            own_broker.resume()
        with anyio.fail_after(PATIENCE):
            while "the bus works again" not in caplog.text:  # noqa: ASYNC110 - it tells nobody
                await anyio.sleep(0.05)
        assert caplog.text.count("fails and is tried again") == 1
        assert caplog.text.count("the bus works again") == 1
