"""The table of states: no step without a row, no state without a way out."""

import itertools
from pathlib import Path

import pytest

from outfitter_proto.records import FINAL_STATES, AllocationState
from outfitter_service.core.decision import DecisionBuilder
from outfitter_service.core.states import TABLE, IllegalStepError, Step, advance, diagram
from support.core.core_driver import CoreDriver

ILLEGAL = [
    pytest.param(state, step, id=f"{state or 'none'}-{step}")
    for state, step in itertools.product([None, *AllocationState], Step)
    if (state, step) not in TABLE
]


@pytest.mark.parametrize(("state", "step"), ILLEGAL)
def test_a_step_without_a_row_raises_and_changes_nothing(state: AllocationState | None, step: Step) -> None:
    core = CoreDriver()
    core.report("a")
    record = core.register("w", 1)
    builder = DecisionBuilder(core.ledger, core.rules, core.now, cause="test")
    if state is not None:
        record = type(record)(**{name: getattr(record, name) for name in record.__struct_fields__} | {"state": state})
    with pytest.raises(IllegalStepError, match=f"in state {state or '.none.'} cannot take the step {step}"):
        builder.step(step, "why", record, new=state is None)
    assert (builder.decision.changes, builder.decision.history, builder.records) == ([], [], {})


def test_a_state_of_a_later_version_takes_no_step() -> None:
    for step in Step:
        with pytest.raises(IllegalStepError):
            advance("hibernating", step)


@pytest.mark.parametrize("state", list(AllocationState))
def test_every_state_has_a_way_to_its_end(state: AllocationState) -> None:
    reached: set[str] = {state}
    while more := {after for (before, _), after in TABLE.items() if before in reached} - reached:
        reached |= more
    assert reached & FINAL_STATES


@pytest.mark.parametrize("state", sorted(FINAL_STATES))
def test_a_final_answer_is_never_taken_back(state: AllocationState) -> None:
    assert {after for (before, _), after in TABLE.items() if before == state} == {state}


@pytest.mark.parametrize("state", list(AllocationState))
def test_every_state_can_be_repeated(state: AllocationState) -> None:
    assert advance(state, Step.REFRESH) == state


def test_the_documented_diagram_is_the_table() -> None:
    page = Path(__file__).parents[2] / "service" / "promises.md"
    assert f"```mermaid\n{diagram()}\n```" in page.read_text(encoding="utf-8")
