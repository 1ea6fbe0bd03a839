"""What an agent tries to claim next: tasks from the index, from waitlists of limits, and from doorbell messages.

Candidates may be stale or gone: the claim alone decides.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace

from thunderagent.agent.admission import Admission
from thunderagent.agent.core import Core
from thunderagent.agent.doorbell import DoorbellInbox
from thunderagent.agent.pauses import PauseWatcher
from thunderagent.agent.poller import QueuePoller, Served, SlotPool
from thunderagent.agent.stream_balance import is_paused
from thunderagent.model.task import Candidate, Lane, StatusValue
from thunderagent.stores.tasks import AgentInfo, Wanted


@dataclass(slots=True)
class Selection:
    """The candidates of one round: those of each poller that looked, and those found without a poller."""

    looked: dict[Served, list[Wanted]] = field(default_factory=dict)
    beside: list[Wanted] = field(default_factory=list)

    @property
    def all(self) -> list[Wanted]:
        return [*self.beside, *(one for several in self.looked.values() for one in several)]


class CandidateSelector:
    """Selects for one agent, within its free slots. Called in the agent's loop."""

    def __init__(
        self, core: Core, pollers: Mapping[Served, QueuePoller], pauses: PauseWatcher, admission: Admission
    ) -> None:
        self._pollers = pollers
        self._jobs = core.jobs.by_value
        self._pauses = pauses
        self._admission = admission
        self._lease_s = core.lease_s
        self._monotonic = core.store.monotonic
        self._rng = core.rng
        self._served: set[tuple[str, str]] | None = None
        self.inbox = DoorbellInbox(pollers, core.jobs, store=core.store)
        """Doorbell messages about tasks that could be claimed."""

    def choose(self, here: Container[str]) -> Selection:
        """The candidates of this round.

        Args:
            here: ids of tasks whose handlers still run here: other agents are to claim them.

        Raises:
            StoreError: the store did not answer.
        """
        chosen, promised = Selection(), Counter[SlotPool]()
        self.inbox.process()
        chosen.beside = self._waitlisted(here, promised)
        waitlisted = {one.candidate.task_id for one in chosen.beside}
        now = self._monotonic()
        due = [(served, poller) for served, poller in self._pollers.items() if poller.due <= now]
        due = [(served, poller) for served, poller in due if self._pauses.admits(poller)]
        for served, poller in self._rng.sample(due, len(due)) if len(due) > 1 else due:
            if 0 < poller.free <= promised[poller.pool]:
                continue  # others of its pool may take all that is left: it looks in the next round
            look = [one for one in poller.look() if one.candidate.task_id not in here]
            look, is_more = self._admission.claimable(look)
            if is_more or any(one.candidate.task_id in waitlisted for one in look):
                poller.wake()  # a task of a waitlist may have just left it
            look = [one for one in look if one.candidate.task_id not in waitlisted]
            chosen.looked[served] = look[: max(0, poller.free - promised[poller.pool])]
            promised[poller.pool] += len(chosen.looked[served])
        ids = {one.candidate.task_id for one in chosen.all}
        chosen.beside += self.inbox.claims(lambda one: self._reserve(one, here, promised), ids)
        return chosen

    def idle_s(self) -> float:
        """Seconds until the next look; 0 or less: at once."""
        due = min((poller.due for poller in self._pollers.values()), default=math.inf)
        return min(min(due, self._admission.due) - self._monotonic(), self.inbox.idle_s())

    def postpone(self, seconds: float) -> None:
        """Look for nothing for so many seconds, as the store does not answer."""
        self._admission.postpone(seconds)
        for poller in self._pollers.values():
            poller.postpone(seconds)

    def _waitlisted(self, here: Container[str], promised: Counter[SlotPool]) -> list[Wanted]:
        """Tasks that wait for permits which were released here."""
        found = self._admission.look(lambda one: self._reserve(one, here, promised), self._runs_nowhere)
        kinds = {name: job.kind for name, job in self._jobs.items()}  # the client may not have known
        return [replace(one, candidate=one.candidate._replace(kind=kinds[one.candidate.job])) for one in found]

    def learn(self, agents: Sequence[AgentInfo]) -> None:
        """Learn from the rows of the agents which jobs they serve."""
        able = [agent.info for agent in agents if not is_paused(agent)]
        known = [(info["queues"], jobs) for info in able if isinstance(jobs := info.get("jobs"), (list, tuple))]
        self._served = {(queue, job) for queues, jobs in known for queue in queues for job in jobs}

    def _runs_nowhere(self, one: Candidate) -> bool:
        """Whether no agent can start a task now: it is paused, or no known agent has its job."""
        queue = Lane.parse(StatusValue.parse(one.status_value).suffix).queue
        if one.job in self._jobs and (queue, self._jobs[one.job].kind) in self._pollers:
            # while this agent alone is paused, another may start it
            return not self._pauses.is_agent_paused and self._pauses.is_paused(queue, self._jobs[one.job].name)
        return self._served is not None and (queue, one.job) not in self._served

    def _reserve(self, one: Candidate, here: Container[str], promised: Counter[SlotPool]) -> float | None:
        """Reserve a slot for a candidate; returns the length of its lease. None: not here, or not now."""
        if one.job not in self._jobs or one.task_id in here:
            return None
        queue = Lane.parse(StatusValue.parse(one.status_value).suffix).queue
        poller = self._pollers.get((queue, self._jobs[one.job].kind))
        if poller is None or poller.free <= promised[poller.pool]:
            return None
        if self._pauses.is_paused(queue, self._jobs[one.job].name):
            return None
        promised[poller.pool] += 1
        return self._lease_s(one.job)
