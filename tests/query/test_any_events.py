"""History alone has the whole ledger: random events, failed commits, crashes, with snapshots in small pieces."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from core.test_promises import Core
from outfitter_service.core import model as m
from outfitter_service.core.decide import Rules
from outfitter_service.runtime.changelog.snapshots import Pace
from support.core.recorded_writer import RecordedWriter, values


class Histories(Core):
    """The events of the promises' test, on a writer that keeps history."""

    world: Any

    @initialize(
        chunk=st.integers(1, 4),
        prepares=st.booleans(),
        confirms=st.booleans(),
        on_failure=st.sampled_from(m.OnFailure),
        disk_state=st.just(m.SpecState.OK),
        piece=st.sampled_from([1, 1500, 1 << 20]),
        between=st.sampled_from([1, 20_000, 1 << 30]),
    )
    def begin(
        self,
        chunk: int,
        prepares: bool,
        confirms: bool,
        on_failure: m.OnFailure,
        disk_state: m.SpecState,
        piece: int,
        between: int,
    ) -> None:
        specs = [
            m.ResourceSpec(name="gpu", amount=1, prepares=prepares, on_failure=on_failure),
            m.ResourceSpec(name="fpga", amount=1, confirms=confirms),
            m.ResourceSpec(name="net", amount=1, shared=True),
            m.ResourceSpec(name="disk", amount=1, on_demand=True, on_failure=on_failure, state=disk_state),
            m.ResourceSpec(name="npu", amount=1),
        ]
        rules = Rules(writer="host/h", specs={spec.name: spec for spec in specs}, chunk=chunk, retention_s=50)
        self.world = RecordedWriter(rules, Pace(piece_bytes=piece, between_bytes=between))

    @rule()
    def take_anew(self) -> None:
        self.world.take_anew()

    @precondition(lambda self: self.world.history)
    @rule()
    def switch_off(self) -> None:
        self.world.switch(history=False)

    @precondition(lambda self: not self.world.history)
    @rule()
    def switch_on(self) -> None:
        self.world.switch(history=True)

    @rule(data=st.data())
    def look_back(self, data: st.DataObject) -> None:
        """Any commit, from anywhere in the log that is far enough back."""
        world = self.world
        number = data.draw(st.sampled_from(sorted(world.ledgers)))
        start = data.draw(st.integers(0, len(world.log)))
        told = world.replayed(start=start, last=number)
        if told is not None:
            assert values(world.ledgers[number]) == values(told)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            world = self.world
            if not world.history:
                world.switch(history=True)
            world.settle()
            for _ in range(len(world.topic) + 2):
                world.commit()
            assert world.replayed() is not None, "the snapshot is never complete"


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
