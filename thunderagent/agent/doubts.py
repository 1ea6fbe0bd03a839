"""Claims of an agent that had no answer, and their resolution.

Each keeps its slot until a look at its row shows whether the claim was carried out. A doubt ends with its lease at the
latest. A claim that is carried out later is a stray: RUNNING by us, and it never ran here. The sweep releases it at
once, and counts no crash.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from thunderagent.agent.core import Core
from thunderagent.agent.poller import QueuePoller, Served
from thunderagent.model import events
from thunderagent.model.errors import StoreError
from thunderagent.model.pacing import outage_delays
from thunderagent.model.task import Candidate, Lane, Lease, StatusValue, Task
from thunderagent.settings import LEASE_MARGIN
from thunderagent.stores.tasks import Doubt

REMEMBERED: Final = 10_000
"""Most tasks that are remembered as run here with a lost lease; the oldest are forgotten."""


class Doubts:
    """The claims and takeovers of one agent without an answer. Called in the agent's loop."""

    def __init__(
        self,
        core: Core,
        rng: random.Random,
        *,
        pollers: Mapping[Served, QueuePoller],
        on_lost: Callable[[Candidate], None],
    ) -> None:
        """Make one.

        Args:
            core: of the agent.
            rng: source of jitter.
            pollers: of the agent; each doubt takes a slot.
            on_lost: called for each claim that was not carried out.
        """
        self._store = core.store
        self._bus = core.bus
        self._rng = rng
        self._owner = core.name
        self._jobs = core.jobs.by_value
        self._pollers = pollers
        self._on_lost = on_lost
        self._open: list[Doubt] = []
        self._due = 0.0
        self._delays = outage_delays(rng)
        self._ran: dict[str, int] = {}
        self.ids: frozenset[str] = frozenset()
        """Ids of the tasks in doubt."""

    def add(self, doubts: Sequence[Doubt]) -> None:
        """Keep a slot for each of these until it is resolved."""
        for one in doubts:
            self._poller(one.wanted.candidate).reserve()
        self._leave([*self._open, *doubts])

    def idle_s(self) -> float:
        """Seconds until the next look; infinity without a doubt."""
        return self._due - self._store.monotonic() if self._open else math.inf

    def resolve(self) -> list[Lease]:
        """Look at the rows of the claims, if it is time; returns the leases that are ours and have not run here."""
        now = self._store.monotonic()
        if not self._open or now < self._due:
            return []
        try:
            leases = self._store.resolve(self._open, owner=self._owner)
        except StoreError as error:
            delay = next(self._delays)
            self._due = now + delay
            self._bus.emit(events.StoreFailed(during="claims in doubt", error=str(error), next_try_s=delay))
            self._end([one for one in self._open if now >= one.sent + one.wanted.lease_s], ())
            return []
        self._due, self._delays = 0.0, outage_delays(self._rng)
        ours = [lease for lease in leases if not self.has_run(lease.task) and now < lease.deadline(LEASE_MARGIN)]
        self._end(self._open, ours)
        return ours

    def forget(self) -> None:
        """Leave the tasks to other agents."""
        self._end(self._open, ())

    def ran(self, lease: Lease) -> None:
        """Note that a task ran here and lost its lease: it is no stray while its row is ours."""
        self._ran.pop(lease.task_id, None)
        self._ran[lease.task_id] = lease.fence
        if len(self._ran) > REMEMBERED:
            del self._ran[next(iter(self._ran))]

    def has_run(self, task: Task) -> bool:
        """Whether a task ran here under its present fence and lost its lease."""
        return self._ran.get(task.task_id) == task.fence

    def _end(self, doubts: Sequence[Doubt], ours: Sequence[Lease]) -> None:
        won = {lease.task_id for lease in ours}
        self._leave([one for one in self._open if one not in doubts])
        for one in doubts:
            self._poller(one.wanted.candidate).freed()
        for candidate in dict.fromkeys(one.wanted.candidate for one in doubts):
            if candidate.task_id not in won:
                self._on_lost(candidate)

    def _leave(self, still: list[Doubt]) -> None:
        self._open, self.ids = still, frozenset(one.wanted.candidate.task_id for one in still)

    def _poller(self, candidate: Candidate) -> QueuePoller:
        queue = Lane.parse(StatusValue.parse(candidate.status_value).suffix).queue
        return self._pollers[queue, self._jobs[candidate.job].kind]
