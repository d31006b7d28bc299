"""What can be asked of the metrics: which resource people wait for, and how long, of whom, and why."""

from __future__ import annotations

import re
from itertools import pairwise

from outfitter_service.metrics import ALLOCATION_BUCKETS, Metrics
from runtime.conftest import Serve
from support.managers.in_process import deregister, register, static
from support.managers.process import StartManager


def test_the_page_has_the_process_and_who_it_is_and_no_times_of_creation(start_manager: StartManager) -> None:
    manager = start_manager()
    page = manager.metrics()
    assert "_created" not in page
    for name in ("process_resident_memory_bytes", "process_open_fds", "process_cpu_seconds_total"):
        assert manager.metric(name) is not None, name
    started = manager.metric("process_start_time_seconds")
    assert started is not None
    assert manager.metric("outfitter_info", host=manager.host, cluster="outfitter", scope="host") == 1


def test_every_label_that_says_why_is_called_reason() -> None:
    metrics = Metrics(["gpu"])
    metrics.show(lambda: None)
    labels = {label for family in metrics.registry.collect() for sample in family.samples for label in sample.labels}
    assert labels.isdisjoint({"why", "cause"})
    for name in ("outfitter_swept_total", "outfitter_releases_total", "outfitter_failures_total", "outfitter_pending"):
        family = name.removesuffix("_total")
        found = next(each for each in metrics.registry.collect() if each.name == family)
        assert all("reason" in sample.labels for sample in found.samples)


def test_the_waits_of_minutes_are_told_apart() -> None:
    long = [bucket for bucket in ALLOCATION_BUCKETS if 10 <= bucket <= 7200]
    assert (long[0], long[-1]) == (10, 7200)
    assert all(later <= 2 * sooner for sooner, later in pairwise(long))


async def test_waits_and_grants_are_counted_by_resource(serve: Serve) -> None:
    config = static(2) + static(1, name="fpga").replace('external-resources = ["fpga"]', "")
    config = re.sub(r'external-resources = \["gpu"\]', 'external-resources = ["gpu", "fpga"]', config)
    async with serve(config) as in_process:
        await in_process.say(register("a", gpu=1), register("both", gpu=1, fpga=1), register("nothing", resources={}))
        for worker in ("a", "both", "nothing"):
            await in_process.state(worker, "allocated")
        await in_process.say(register("w", fpga=1), register("x", gpu=1, fpga=1), register("y", gpu=1))
        for worker in ("w", "x", "y"):
            await in_process.state(worker, "pending")
        await in_process.reported()
        # whoever wants several counts for each of them, as with allocations and grants
        assert in_process.processor.state_counts().pending == {("fpga", "busy"): 2, ("gpu", "busy"): 2}
        for resource, count in (("gpu", 2), ("fpga", 1), ("(none)", 1)):
            assert in_process.metric("outfitter_allocation_seconds_count", resource=resource) == count
        await in_process.say(deregister("both"))
        await in_process.state("w", "allocated")
        await in_process.reported()
        assert in_process.metric("outfitter_allocation_seconds_count", resource="fpga") == 2
        assert in_process.metric("outfitter_releases_total", reason="deregistered") == 1
