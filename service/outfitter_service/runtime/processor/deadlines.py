"""Checks the deadlines of leases, deaths, hosts and quotas, and queues an event for each that has passed.

With many hosts or leases it checks some in each turn of the commit loop.
"""

from __future__ import annotations

from outfitter_service.core import model as m
from outfitter_service.core.decide import Rules, is_due
from outfitter_service.runtime.clock import Clock
from outfitter_service.runtime.input.lookahead import Inputs
from outfitter_service.runtime.liveness.tracker import LivenessTracker
from outfitter_service.runtime.processor.commit.batch import Batch
from outfitter_service.runtime.processor.commit.quotas import Quotas
from outfitter_service.runtime.processor.event_queue import EventQueue
from outfitter_service.runtime.processor.tenure import Tenure

TICK_S = 0.25
"""Seconds between two checks of all deadlines."""
HOSTS_AT_ONCE = 500
"""Hosts that are checked in one turn: a partition may have 10,000 of them."""


class Deadlines:
    """The deadlines of one tenure."""

    def __init__(
        self,
        tenure: Tenure,
        rules: Rules,
        inputs: Inputs,
        liveness: LivenessTracker,
        event_queue: EventQueue,
        quotas: Quotas,
        clock: Clock,
    ) -> None:
        """`inputs`: by their settled messages silence and deaths are judged. `quotas`: reset each minute."""
        self._ledger = tenure.ledger
        self._cursor = tenure.cursor
        self._rules = rules
        self._inputs = inputs
        self._liveness = liveness
        self._event_queue = event_queue
        self._quotas = quotas
        self._clock = clock
        self._checked_at = 0.0
        self._hosts: list[str] = []
        self._ticking: set[str] = set()

    @property
    def unfinished(self) -> bool:
        """Whether some hosts or leases are left for the next turns."""
        return bool(self._hosts) or (self._liveness.more_suspects and self._inputs.reader.shows_silence)

    @property
    def unjudged_deaths(self) -> int:
        """How many deaths the tracker has seen and not queued yet."""
        return self._liveness.unjudged

    def check(self, batch: Batch) -> None:
        """Queue the events that are due by the time of `batch`, and write the summaries of ended quotas into it."""
        liveness, event_queue = self._liveness, self._event_queue
        # not only when the tick is due: a worker that registers again hears by the answer whether it is watched
        event_queue.extend(liveness.take_unreported())
        if self.unfinished:
            if liveness.more_suspects:
                self._judge_silence()
            self._check_hosts(batch)
            return
        if self._clock.monotonic() - self._checked_at < TICK_S:
            return
        self._checked_at = self._clock.monotonic()
        batch.sum_up(self._quotas.letters.due())
        self._quotas.naming.due()  # starts its next minute
        event_queue.extend(m.Reschedule(host=host) for host in self._quotas.rewrites.end_windows())
        self._judge_silence()
        event_queue.queue_due_retries()
        self._hosts = list(self._ledger.hosts)
        self._ticking = {event.host for event in event_queue.queue if type(event) is m.Tick}
        self._check_hosts(batch)

    def check_deaths(self) -> None:
        """Queue the deaths whose worker cannot have deregistered before, by the settled input."""
        self._event_queue.extend(self._liveness.deaths(self._cursor.position))

    def _judge_silence(self) -> None:
        if self._inputs.reader.shows_silence:
            # by the settled input: renewals of the commit under way do not count yet
            self._event_queue.extend(self._liveness.expired(self._inputs.lookahead.decided_before))

    def _check_hosts(self, batch: Batch) -> None:
        hosts, ledger = self._hosts, self._ledger
        self._event_queue.extend(
            m.Tick(host=host)
            for host in hosts[-HOSTS_AT_ONCE:]
            if host in ledger.hosts and host not in self._ticking and is_due(ledger, self._rules, host, batch.now)
        )
        del hosts[-HOSTS_AT_ONCE:]
