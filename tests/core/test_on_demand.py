"""Drivers without an inventory: asked for each worker, for what it wants and what others hold."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outfitter_service.core import model as m
from outfitter_service.core.decide import decide
from outfitter_service.core.state.ledger import Ledger, PutAllocation
from support.core.core_driver import HOST, CoreDriver, asks, device
from support.core.decided import apply, decision_of, touched

HINT = "the script prints fixed devices; see param.discovery-script.inventory-amount"
SCRIPT = m.ResourceSpec(name="gpu", amount=1, on_demand=True, hint=HINT)

Script = Callable[[int], list[str] | None]
"""Asked for an amount: the devices it prints, or None for "not that many"."""


def first_of(*devices: str) -> Script:
    return lambda amount: list(devices[:amount]) if amount <= len(devices) else None


def always(*devices: str) -> Script:
    return lambda _amount: list(devices)


class ScriptedCore(CoreDriver):
    """A core whose driver is a script, asked as the manager asks one: for the amount, then for less."""

    def __init__(self, script: Script, *specs: m.ResourceSpec, ledger: Ledger | None = None) -> None:
        super().__init__(*(specs or (SCRIPT,)), ledger=ledger)
        self.script = script
        self.asked: list[int] = []

    def answer(self) -> None:
        """Carry out all questions that were put, and those that follow from the answers."""
        for _ in range(100):
            commands = [one for said in self.decisions for one in said.commands if isinstance(one, m.Discover)]
            self.decisions.clear()
            if not commands:
                return
            for command in commands:
                self._carry_out(command)
        raise AssertionError("questions do not end")

    def _carry_out(self, command: m.Discover) -> None:
        self.asked.append(command.amount)
        for amount in range(command.amount, command.least - 1, -1):
            printed = self.script(amount)
            if printed is not None:
                self.report(*printed, resource=command.resource, asked=command.amount)
                return
        self.fail("not that many", permanent=True, resource=command.resource, at_least=command.least)


def test_a_worker_waits_until_the_driver_was_asked_for_it() -> None:
    core = ScriptedCore(first_of("0", "1"))
    assert core.register("w", 2).reason_code == "not-reported"
    assert core.decisions[-1].commands == [m.Discover(host="h", resource="gpu", amount=2, least=2, allocation="h/w/1")]
    core.answer()
    assert core.has("w") == ["0", "1"]


@pytest.mark.parametrize("script", [first_of("0", "1", "2", "3"), always("0", "1", "2", "3")])
@pytest.mark.parametrize("at_once", [True, False])
def test_two_workers_that_ask_for_two_of_four_both_get_theirs(script: Script, at_once: bool) -> None:
    core = ScriptedCore(script)
    for worker in ("one", "two"):
        core.register(worker, 2)
        if not at_once:
            core.answer()
    core.answer()
    assert core.has("one") == ["0", "1"]
    assert core.has("two") == ["2", "3"]


def test_a_script_that_prints_its_fixed_first_devices_makes_the_next_worker_wait_with_the_hint() -> None:
    core = ScriptedCore(always("0", "1"))
    core.register("one", 2)
    core.answer()
    core.register("two", 2)
    core.answer()
    assert (core.state("two"), core["two"].reason_code) == ("pending", "busy")
    assert core["two"].reason == f"waits for 2 gpu: 0 of 2 free; {HINT}"
    core.deregister("one")
    assert core.has("two") == ["0", "1"]


def test_fewer_than_the_amount_fails_with_both_numbers() -> None:
    core = ScriptedCore(always("0"))
    core.register("w", 2)
    core.answer()
    assert (core.state("w"), core["w"].reason) == ("failed", "2 gpu requested, 1 discovered")


def test_a_worker_that_wants_more_than_another_was_asked_for_is_asked_for_itself() -> None:
    core = ScriptedCore(first_of(*"01234567"))
    core.register("small", 1)
    core.register("big", 5)
    core.answer()
    assert (core.has("small"), core.has("big")) == (["0"], ["1", "2", "3", "4", "5"])


def test_a_request_that_is_too_large_fails_alone() -> None:
    core = ScriptedCore(first_of("0", "1"))
    core.register("holder", 2)
    core.answer()
    core.register("waits", 1)
    core.answer()
    core.register("huge", 8)
    core.answer()
    assert (core.state("huge"), core["huge"].reason_code) == ("failed", "driver-failed")
    assert (core.state("waits"), core["waits"].reason_code) == ("pending", "busy")
    assert "health" not in core["holder"].resources["gpu"][0]
    core.deregister("holder")
    assert core.state("waits") == "allocated"


def test_requests_too_large_that_wait_all_the_same_are_not_asked_for_again_and_again() -> None:
    spec = m.ResourceSpec(name="gpu", amount=1, on_demand=True, on_failure=m.OnFailure.WAIT)
    core = ScriptedCore(first_of("0", "1"), spec)
    core.register("eight", 8)
    core.register("seven", 7)
    core.register("one", 1)
    core.answer()
    assert [core.state(worker) for worker in ("eight", "seven", "one")] == ["pending", "pending", "allocated"]
    assert len(core.asked) < 10


def test_a_holder_is_told_nothing_of_a_device_that_a_later_answer_does_not_name() -> None:
    core = ScriptedCore(first_of("0", "1"))
    core.register("w", 1)
    core.answer()
    core.report("1", asked=2)
    assert "health" not in core["w"].resources["gpu"][0]


def test_a_driver_that_failed_for_now_is_asked_again_after_its_delay() -> None:
    core = ScriptedCore(first_of("0", "1"))
    core.register("w", 1)
    core.decisions.clear()
    core.fail("timed out")
    assert core["w"].reason_code == "driver-failed"
    assert [one for said in core.decisions for one in said.commands] == []
    core.say(m.DriverRetry(host="h", resource="gpu"))
    core.answer()
    assert core.state("w") == "allocated"


def test_nobody_is_asked_again_for_when_nobody_waits() -> None:
    core = ScriptedCore(first_of("0"))
    assert core.say(m.DriverRetry(host="h", resource="gpu")).commands == []


def test_a_question_that_a_crash_lost_is_put_again() -> None:
    core = ScriptedCore(first_of("0", "1", "2", "3"))
    core.register("one", 2)
    core.answer()
    core.register("two", 2)
    ledger = Ledger()
    for record in core.ledger.allocations.values():
        ledger.restore(PutAllocation(record.key, record))
    ledger.resume(commit=core.ledger.commits, token=core.ledger.token)
    again = ScriptedCore(core.script, ledger=ledger)
    again.say(m.Reschedule(host="h"))
    again.answer()
    assert again.has("two") == ["2", "3"]
    assert again.asked == [4]


def test_waiters_keep_their_reason_while_the_driver_is_asked_for_another() -> None:
    core = ScriptedCore(always("0"))
    core.register("holder", 1)
    core.answer()
    core.register("one", 1)
    core.answer()
    core.ledger.begin_commit()
    core.ledger.end_commit()
    core.register("two", 1)
    assert [key for key, _ in touched(core.ledger)] == ["h/two/1"]


def test_an_on_demand_resource_beside_another_one_is_all_or_none() -> None:
    core = ScriptedCore(first_of("0"), SCRIPT, m.ResourceSpec(name="fpga"))
    core.report("f", resource="fpga")
    core.register("w", resources=asks(gpu=1, fpga=1))
    assert core["w"].resources == {}
    core.answer()
    assert (core.has("w"), core.has("w", "fpga")) == (["0"], ["f"])


def test_a_driver_that_named_fewer_than_it_was_asked_for_is_not_asked_for_more() -> None:
    spec = m.ResourceSpec(name="gpu", amount=1, on_demand=True, on_failure=m.OnFailure.WAIT)
    core = ScriptedCore(always("0", "1"), spec)
    core.register("three", 3)
    core.register("five", 5)
    core.answer()
    assert core.asked == [3]
    assert [core[worker].reason_code for worker in ("three", "five")] == ["infeasible", "infeasible"]


def test_what_a_driver_says_of_a_host_that_was_forgotten_meanwhile_leaves_nothing_behind() -> None:
    core = CoreDriver(SCRIPT, forgets_hosts=True, retention_s=10)
    core.register("w", 1)
    core.deregister("w")
    core.pass_time(60)
    core.pass_time(60)
    core.ledger.forget(HOST)  # as a manager does once that is committed
    assert core.ledger.hosts == {}
    event = m.DriverReport(host=HOST, resource="gpu", devices=(device("d0"),), asked=1)
    decided = decision_of(decide(core.ledger, core.rules, event, core.now))
    apply(decided, core.ledger)
    assert (decided.changes, decided.follow_ups) == ([], [])
    assert core.ledger.hosts == {}


def questions(core: CoreDriver) -> list[m.Discover]:
    return [one for said in core.decisions for one in said.commands if isinstance(one, m.Discover)]


def answered(core: CoreDriver, fails: Callable[[int], m.DriverFailure | None], *, most: int = 100) -> int:
    """Answer all questions, with a failure for what the worker wants or with devices; how many there were."""
    for count in range(most):
        put = questions(core)
        core.decisions.clear()
        if not put:
            return count
        assert len(put) == 1, "one question at a time"
        failure = fails(put[0].least)
        if failure is None:
            core.report(*[str(index) for index in range(put[0].amount)], asked=put[0].amount)
        else:
            core.fail(failure.reason, permanent=failure.permanent)
    raise AssertionError("questions do not end")


def above(limit: int, *, permanent: bool = False) -> Callable[[int], m.DriverFailure | None]:
    """A driver that fails for those who want more than `limit`."""
    failure = m.DriverFailure(reason="did not end within 10 s", permanent=permanent)
    return lambda least: failure if least > limit else None


ON_DEMAND = m.ResourceSpec(name="gpu", on_demand=True)


@pytest.mark.parametrize("priority", [0, 5])
def test_a_worker_whose_questions_fail_for_now_starves_nobody_who_wants_fewer(priority: int) -> None:
    core = CoreDriver(ON_DEMAND)
    core.register("big", 1000, priority=priority)
    for index in range(6):
        core.register(f"w{index}", 1)
    assert answered(core, above(100)) == 7
    assert {core.state(f"w{index}") for index in range(6)} == {"allocated"}
    assert (core.state("big"), core["big"].reason_code) == ("pending", "driver-failed")
    for index in range(3):
        core.say(m.DriverRetry(host=HOST, resource="gpu"))
        core.register(f"late{index}", 1)
        assert answered(core, above(100)) == 2
        assert core.state(f"late{index}") == "allocated"
    core.say(m.DriverRetry(host=HOST, resource="gpu"))
    answered(core, above(1000))
    assert core.state("big") == "allocated"


def test_a_success_serves_whom_it_serves_before_anybody_is_asked_again() -> None:
    core = CoreDriver(ON_DEMAND)
    core.register("big", 5)
    core.fail("did not end within 10 s")
    core.register("one", 1)
    core.report("gpu:0", asked=1)
    assert (core.state("big"), core.state("one")) == ("pending", "allocated")
    core.register("first", 1)
    core.register("bigger", 6)
    core.register("other", 1)
    core.say(m.DriverRetry(host=HOST, resource="gpu"))  # while `first` is asked for
    core.decisions.clear()
    core.report("gpu:0", "gpu:1", "gpu:2", asked=2)
    assert (core.state("first"), core.state("other")) == ("allocated", "allocated")
    assert [(one.allocation, one.least) for one in questions(core)] == [("h/big/1", 5)]


@pytest.mark.parametrize("amount", [2, 10**6])
def test_a_failure_for_good_fails_those_who_want_as_many(amount: int) -> None:
    core = CoreDriver(ON_DEMAND)
    core.register("evil", amount)
    core.register("more", amount + 1)
    core.register("w", 1)
    answered(core, above(1, permanent=True))
    assert [core.state(worker) for worker in ("evil", "more", "w")] == ["failed", "failed", "allocated"]


def test_a_failure_for_one_device_counts_for_all() -> None:
    core = CoreDriver(ON_DEMAND)
    core.register("w", 1)
    core.register("more", 5)
    assert answered(core, above(0, permanent=True)) == 1
    assert [core.state(worker) for worker in ("w", "more")] == ["failed", "failed"]


def test_a_driver_that_is_broken_is_asked_for_few_of_many_amounts() -> None:
    core = CoreDriver(ON_DEMAND)
    for amount in range(40, 0, -1):
        core.register(f"w{amount}", amount)
    assert answered(core, above(0)) == 2
    assert {core[f"w{amount}"].reason_code for amount in range(1, 41)} == {"driver-failed"}
    for _ in range(3):
        core.say(m.DriverRetry(host=HOST, resource="gpu"))
        assert answered(core, above(0)) == 1


def test_those_who_want_many_different_amounts_wait_for_few_failures() -> None:
    core = CoreDriver(ON_DEMAND)
    for amount in range(200, 100, -1):
        core.register(f"evil{amount}", amount)
    core.register("five", 5)
    core.register("one", 1)
    assert answered(core, above(100)) == 4
    assert (core.state("five"), core.state("one")) == ("allocated", "allocated")


def test_retries_take_turns_over_what_is_wanted() -> None:
    core = CoreDriver(ON_DEMAND)
    core.register("odd", 300)
    core.register("good", 500)
    fails = {300: m.DriverFailure(reason="did not end within 10 s")}
    answered(core, fails.get)
    assert {core[worker].reason_code for worker in ("odd", "good")} == {"driver-failed"}
    for _ in range(2):
        core.say(m.DriverRetry(host=HOST, resource="gpu"))
        answered(core, fails.get)
    # what was named for one of them serves the other, too
    assert (core.state("odd"), core.state("good")) == ("allocated", "allocated")


def test_a_retry_that_is_due_while_the_driver_is_asked_is_not_lost() -> None:
    core = CoreDriver(ON_DEMAND)
    core.register("two", 2)
    core.fail("did not end within 10 s")
    core.decisions.clear()
    core.register("one", 1)
    core.say(m.DriverRetry(host=HOST, resource="gpu"))
    assert answered(core, above(9)) == 2
    assert (core.state("two"), core.state("one")) == ("allocated", "allocated")


def test_a_failure_that_concerns_nobody_any_more_is_forgotten_with_its_delay() -> None:
    core = CoreDriver(ON_DEMAND)
    core.register("two", 2)
    core.fail("did not end within 10 s")
    core.deregister("two")
    core.say(m.DriverRetry(host=HOST, resource="gpu"))
    assert core.host_state.devices.inventory("gpu").failure is None


def test_one_that_wants_its_devices_now_waits_for_the_answer_to_its_own_question() -> None:
    core = CoreDriver(ON_DEMAND)
    core.register("big", 1000, wait_s=0)
    core.register("w", 1, wait_s=0)
    core.pass_time(1)
    assert core.state("w") == "pending"
    assert answered(core, above(100)) == 2
    core.pass_time(1)
    assert (core.state("big"), core.state("w")) == ("failed", "allocated")


@settings(max_examples=200, deadline=None)
@given(
    amounts=st.lists(st.integers(1, 6), min_size=1, max_size=10),
    fails=st.sets(st.integers(1, 6)),
    waits=st.sampled_from(m.OnFailure),
    permanent=st.booleans(),
    chunk=st.integers(1, 4),
    data=st.data(),
)
def test_nobody_starves_behind_those_whose_amounts_fail(
    amounts: list[int], fails: set[int], waits: m.OnFailure, permanent: bool, chunk: int, data: st.DataObject
) -> None:
    core = CoreDriver(m.ResourceSpec(name="gpu", on_demand=True, on_failure=waits), chunk=chunk)
    failure = m.DriverFailure(reason="no", permanent=permanent)
    due = False  # as in the manager: a retry is due after each failure that may pass
    left = list(enumerate(amounts))
    for _ in range(200):
        put = questions(core)
        choices = [*(["register"] if left else []), *(["answer"] if put else []), *(["retry"] if due else [])]
        if not choices:
            break
        match data.draw(st.sampled_from(choices)):
            case "register":
                index, amount = left.pop(0)
                core.register(f"w{index}", amount)
            case "answer":
                core.decisions.clear()
                (question,) = put
                if question.least in fails:
                    core.fail(failure.reason, permanent=permanent)
                    due = due or not permanent or waits == m.OnFailure.WAIT
                else:
                    core.report(*[str(index) for index in range(question.amount)], asked=question.amount)
            case "retry":
                due = False
                core.say(m.DriverRetry(host=HOST, resource="gpu"))
    for _ in range(20):
        answered(core, lambda least: failure if least in fails else None)
        core.say(m.DriverRetry(host=HOST, resource="gpu"))
    answered(core, lambda least: failure if least in fails else None)
    lasts = not permanent or waits == m.OnFailure.WAIT
    for index, amount in enumerate(amounts[: len(amounts) - len(left)]):
        may_fail = not lasts and any(other <= amount for other in fails)
        if amount not in fails and not may_fail:
            assert core.has(f"w{index}"), core[f"w{index}"]
        assert core[f"w{index}"].reason_code != "not-reported"


def test_an_answer_that_names_what_was_named_before_still_counts_for_whom_a_failure_made_wait() -> None:
    core = CoreDriver(ON_DEMAND)
    for worker in ("first", "second"):
        core.register(worker, 1)
        core.fail("did not end within 10 s")
    core.register("third", 1)
    core.report("gpu:0", asked=1)
    core.report("gpu:0", asked=2)  # to the question for `second`
    assert [core[worker].reason_code for worker in ("first", "second", "third")] == [None, "busy", "busy"]
    core.deregister("first")
    assert core.state("second") == "allocated"


FEW = 2


@settings(max_examples=200, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["come", "go", "answer", "fail", "retry"]), st.integers(0, 5), st.integers(1, FEW)),
        min_size=5,
        max_size=30,
    ),
    chunk=st.integers(1, 4),
)
def test_all_have_theirs_in_the_end_where_a_driver_has_few_devices_and_fails_at_times(
    steps: list[tuple[str, int, int]], chunk: int
) -> None:
    core = CoreDriver(ON_DEMAND, chunk=chunk)
    here: list[str] = []

    def answer(*, fails: bool = False) -> bool:
        put = questions(core)
        core.decisions.clear()
        for question in put:
            if fails:
                core.fail("did not end within 10 s")
            else:
                core.report(*[str(index) for index in range(min(question.amount, FEW))], asked=question.amount)
        return bool(put)

    for number, (what, who, amount) in enumerate(steps):
        match what:
            case "come":
                here.append(f"w{number}")
                core.register(here[-1], amount)
            case "go" if here:
                core.deregister(here.pop(who % len(here)))
            case "answer" | "fail":
                answer(fails=what == "fail")
            case "retry":
                core.say(m.DriverRetry(host=HOST, resource="gpu"))
    for _ in range(len(steps)):
        core.say(m.DriverRetry(host=HOST, resource="gpu"))  # as in the manager, after each failure
        while answer():
            pass
        for worker in [worker for worker in here if core.state(worker) == "allocated"]:
            here.remove(worker)
            core.deregister(worker)
    assert here == []


# --- drivers that answer for one worker ---

BOOKS = m.ResourceSpec(name="gpu", amount=1, on_demand=True, per_worker=True)
GPUS = 4


class BookedCore(CoreDriver):
    """A core whose driver is a script with books: it sets devices aside for the worker that it is asked for."""

    def __init__(self) -> None:
        super().__init__(BOOKS)
        self.books: dict[str, list[str]] = {}
        self.questions: list[m.Discover] = []

    def only(self, event: m.Event) -> Any:
        decision = super().only(event)
        self.questions += [one for one in decision.commands if isinstance(one, m.Discover)]
        return decision

    def answer(self) -> None:
        """Answer the next question, as the manager does."""
        question = self.questions.pop(0)
        taken = {gpu for own in self.books.values() for gpu in own}
        free = [str(number) for number in range(GPUS) if str(number) not in taken]
        own = self.books.get(question.allocation, [])
        if len(own) < question.least:
            self.books.pop(question.allocation, None)
            own = sorted([*own, *free])[: question.least]
        if len(own) < question.least:
            # offers of others may be given back, so this is for now
            self.fail("too few", permanent=False, at_least=question.least)
            return
        self.books[question.allocation] = own
        self.report(*own, asked=question.amount)
        if self.ledger.allocations[question.allocation].state in {"ended", "failed"}:
            del self.books[question.allocation]  # given back

    def answer_all(self) -> None:
        for _ in range(1000):
            if not self.questions:
                return
            self.answer()
        raise AssertionError("questions do not end")

    def retry(self) -> None:
        self.say(m.DriverRetry(host=HOST, resource="gpu"))

    def leave(self, worker: str) -> None:
        self.deregister(worker)
        self.books.pop(f"{HOST}/{worker}/1", None)

    def check(self) -> None:
        for key, record in self.ledger.allocations.items():
            assert record.state != "failed", record
            if record.state == "allocated":
                assert set(self.has(record.worker)) <= set(self.books.get(key, ())), (
                    "it has what was set aside for others"
                )


def test_a_worker_that_wants_more_than_was_named_for_others_is_asked_for_itself() -> None:
    core = BookedCore()
    for worker, amount in (("a", 1), ("b", 3), ("c", 1), ("d", 2)):
        core.register(worker, amount)
    core.answer_all()
    core.check()
    assert [core.state(worker) for worker in "abcd"] == ["allocated", "allocated", "pending", "pending"]
    core.leave("a")
    core.retry()
    core.answer_all()
    core.leave("b")
    core.retry()
    core.answer_all()
    core.check()
    assert [core.state(worker) for worker in "cd"] == ["allocated", "allocated"]


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["come", "go", "answer", "retry"]), st.integers(1, 4))))
def test_each_gets_only_what_was_named_for_it_and_in_the_end_all_had_theirs(
    steps: list[tuple[int, str, int]],
) -> None:
    core = BookedCore()
    here: dict[str, int] = {}
    for number, (who, what, amount) in enumerate(steps):
        worker = f"w{who}" if what != "come" else f"w{who}-{number}"
        match what:
            case "come":
                here[worker] = amount
                core.register(worker, amount)
            case "go" if here:
                gone = sorted(here)[who % len(here)]
                del here[gone]
                core.leave(gone)
            case "answer" if core.questions:
                core.answer()
            case "retry":
                core.retry()
        core.check()
    for _ in range(2 * len(here) + 2):
        for _ in range(GPUS + 1):  # each amount has its turn
            core.answer_all()
            core.retry()
        core.answer_all()
        core.check()
        for worker in [worker for worker in here if core.state(worker) == "allocated"]:
            del here[worker]
            core.leave(worker)
    assert here == {}
