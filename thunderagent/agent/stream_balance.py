"""Which agent takes which stream: a fleet shares them evenly, without a leader."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final
from zlib import crc32

from thunderagent.agent.poller import QueuePoller
from thunderagent.model.clock import since_boot
from thunderagent.model.rows import as_map
from thunderagent.model.task import STREAM, Candidate
from thunderagent.stores.tasks import AgentInfo, TaskStore

OTHERS_S: Final = 2.0
"""How long a stream is left to the agent whose share it is."""

AT_ONCE: Final = 50
"""Most streams that one look claims: batch tasks of the agent must not wait for hundreds of claims."""

PAGE: Final = 100
"""Least index entries that one look for streams reads."""

ABOVE_MEAN: Final = 1.2
"""An agent with so many times the mean of the fleet takes no stream that others could take, and hands some off."""

SLACK: Final = 5
"""Streams beyond that which are allowed: the rows of agents are of different moments."""

TAKE_BACK_S: Final = 5 * OTHERS_S
"""How long an agent does not take back a stream that it handed off for the balance."""

FRESH_S: Final = 1.0
"""Age of the knowledge of other agents that is good enough to share streams out."""


class Fleet:
    """The agents that hold streams, by their rows.

    Each stream belongs by a hash of its id to one of the agents that have room and not too many already. It is left to
    that agent for a moment; then any agent takes it.

    Args:
        max_streams: most streams that it holds.
        jobs: its jobs that are streams; agents without any of them do not count.
    """

    def __init__(
        self,
        store: TaskStore,
        *,
        owner: str,
        max_streams: int,
        jobs: Collection[str] = (),
        monotonic: Callable[[], float] = since_boot,
    ) -> None:
        self._store = store
        self._owner = owner
        self.max_streams = max_streams
        self._jobs = frozenset(jobs)
        self._monotonic = monotonic
        self._learnt = -FRESH_S
        self._lost: dict[str, float] = {}
        self._given: dict[str, float] = {}
        self._announced: int | None = None
        self._seen: dict[str, float] = {}
        self._others: dict[str, tuple[int, int]] = {}
        self.held = 0
        """Streams that this agent holds."""

    @property
    def size(self) -> int:
        return 1 + len(self._others)

    @property
    def mean(self) -> float:
        return (self.held + sum(held for held, _ in self._others.values())) / self.size

    def lost(self, agent: str, at: float) -> None:
        """An agent has not renewed a lease that ended at `at`: it is gone, unless its row was written later."""
        if agent == self._owner:  # its lease ended with a grant of the region
            return
        self._lost[agent] = max(at, self._lost.get(agent, at))
        if agent in self._others and self._seen.get(agent, 0.0) <= at:
            del self._others[agent]

    def learn(self, agents: Sequence[AgentInfo]) -> None:
        self._learnt = self._monotonic()
        self._seen = {agent.name: agent.seen_at for agent in agents}
        here = next((_region(agent) for agent in agents if agent.name == self._owner), None)
        self._lost = {name: at for name, at in self._lost.items() if self._seen.get(name, math.inf) <= at}
        rows = {
            agent.name: load
            for agent in agents
            if agent.name not in self._lost
            and _region(agent) == here  # the rows of a lost region stay for a while
            and (load := _load(agent, self._jobs)) is not None
        }
        self._announced = rows.pop(self._owner, (None, 0))[0]
        self._others = rows

    def refresh(self) -> None:
        """Read the rows of the agents if the knowledge is not fresh.

        Raises:
            StoreError: it did not answer.
        """
        if self._monotonic() - self._learnt >= FRESH_S:
            self.learn(self._store.agents())

    def is_ours(self, task_id: str) -> bool:
        """Whether this agent is to take the stream.

        Its own load counts as its row has it, so that all agents judge by the same numbers.
        """
        if self.held >= self.max_streams:
            return False
        held = self.held if self._announced is None else self._announced
        loads = {**self._others, self._owner: (held, self.max_streams)}
        limit = sum(held for held, _ in loads.values()) / self.size * ABOVE_MEAN + SLACK
        takers = sorted(name for name, (held, most) in loads.items() if held < most and held <= limit)
        if not takers:
            return True
        return takers[crc32(task_id.encode()) % len(takers)] == self._owner

    def gave(self, task_id: str) -> None:
        now = self._monotonic()
        self._given = {name: until for name, until in self._given.items() if until > now}
        self._given[task_id] = now + TAKE_BACK_S

    def may_take(self, task_id: str) -> bool:
        """False for a while after this agent has handed the stream off."""
        return not self._others or self._given.get(task_id, 0.0) <= self._monotonic()

    def surplus(self) -> int:
        """Streams above the mean; 0 for an agent near the mean or alone."""
        above = self.held - self.mean
        return int(above) if self._others and above >= 2 and self.held > self.mean * ABOVE_MEAN else 0


def _load(agent: AgentInfo, jobs: frozenset[str]) -> tuple[int, int] | None:
    """Streams that an agent holds, and its most; None if it takes none of these jobs now."""
    try:
        streams, health = agent.info["streams"], agent.info.get("health") or {}
        held, most = int(streams["held"]), int(streams["max"])
        can = not jobs or not jobs.isdisjoint(agent.info["jobs"])
        takes = can and not health.get("draining") and not is_paused(agent)
        return (held, most) if most > 0 and takes else None
    except (LookupError, TypeError, ValueError, AttributeError):  # of another version, or made by hand
        return None


def _region(agent: AgentInfo) -> str | None:
    return as_map(agent.info.get("region")).get("name")


def is_paused(agent: AgentInfo) -> bool:
    """Whether an agent claims nothing, as it is paused."""
    return bool(as_map(agent.info.get("health")).get("paused"))


class StreamPoller(QueuePoller):
    """Looks for streams in one queue; all queues of streams share their slots."""

    def __init__(self, *args: Any, fleet: Fleet, rng: random.Random, **options: Any) -> None:
        super().__init__(*args, kind=STREAM, rng=rng, **options)
        self._fleet = fleet

    reads_on_s = 1.0  # the batch tasks of a long queue are read past, but not as fast as the store can

    def _wanted(self) -> int:
        return min(self.free, AT_ONCE)

    def _entries(self) -> int:
        return max(2 * self._wanted(), PAGE)

    def _eligible(self, found: list[Candidate]) -> list[Candidate]:
        """Those that are ours, and those that no agent has taken for a while."""
        if not found:
            return found
        self._fleet.refresh()
        overdue = self._store.clock.earliest() - OTHERS_S
        return [
            one
            for one in found
            if self._fleet.may_take(one.task_id) and (one.created_at <= overdue or self._fleet.is_ours(one.task_id))
        ]

    def _pick(self, found: list[Candidate]) -> list[Candidate]:
        return found[: self._wanted()]
