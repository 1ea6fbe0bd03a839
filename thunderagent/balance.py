"""Which agent takes which stream, so that a fleet shares them evenly without anybody who decides."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any, Final
from zlib import crc32

from thunderagent.pacing import OTHERS_S
from thunderagent.poller import QueuePoller
from thunderagent.store import AgentInfo, TaskStore
from thunderagent.task import STREAM, Candidate

AT_ONCE: Final = 50
"""Streams that one look claims at most: batch tasks of the same agent are not to wait for hundreds of claims."""

PAGE: Final = 100
"""Index entries that one look for streams reads at least."""

ABOVE_MEAN: Final = 1.2
"""An agent with so many times the mean of the fleet takes no stream that another could take, and hands some off."""

FRESH_S: Final = 1.0
"""How old the knowledge of the other agents may be when streams are to be shared out."""


class Fleet:
    """The agents that hold streams, as their rows tell.

    Each stream belongs by a hash of its id to one of the agents that have room and not too many already. For a moment
    it is left to that one; then anybody takes it.
    """

    def __init__(
        self, store: TaskStore, *, owner: str, max_streams: int, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._owner = owner
        self._max_streams = max_streams
        self._monotonic = monotonic
        self._learnt = -FRESH_S
        self._lost: set[str] = set()
        self._others: dict[str, tuple[int, int]] = {}
        self.held = 0
        """Streams that this agent holds."""

    @property
    def size(self) -> int:
        """Agents that hold streams, this one included."""
        return 1 + len(self._others)

    @property
    def mean(self) -> float:
        """Streams for each agent."""
        return (self.held + sum(held for held, _ in self._others.values())) / self.size

    def lost(self, agent: str) -> None:
        """This agent is gone, though its row is still there."""
        self._lost.add(agent)
        self._others.pop(agent, None)

    def learn(self, agents: Sequence[AgentInfo]) -> None:
        """Take what the agents tell of themselves."""
        self._learnt = self._monotonic()
        self._lost &= {agent.name for agent in agents}
        self._others = {
            agent.name: (int(told["held"]), int(told["max"]))
            for agent in agents
            if agent.name != self._owner and agent.name not in self._lost and (told := _told(agent)) is not None
        }

    def refresh(self) -> None:
        """Ask the store if what is known is not fresh.

        Raises:
            StoreError: it did not answer.
        """
        if self._monotonic() - self._learnt >= FRESH_S:
            self.learn(self._store.agents())

    def is_ours(self, task_id: str) -> bool:
        """True when this agent is the one to take the stream."""
        loads = {**self._others, self._owner: (self.held, self._max_streams)}
        limit = self.mean * ABOVE_MEAN + 1
        takers = sorted(name for name, (held, most) in loads.items() if held < most and held <= limit)
        if not takers:
            return True
        return takers[crc32(task_id.encode()) % len(takers)] == self._owner

    def surplus(self) -> int:
        """How many streams this agent holds above the mean, 0 while it is near it or alone."""
        above = self.held - self.mean
        return int(above) if self._others and above >= 2 and self.held > self.mean * ABOVE_MEAN else 0


def _told(agent: AgentInfo) -> dict[str, Any] | None:
    """What an agent tells of its streams; None if it takes none now."""
    told = agent.info.get("streams")
    if not isinstance(told, dict) or agent.info.get("health", {}).get("draining"):
        return None
    return told if told.get("max") else None


class StreamPoller(QueuePoller):
    """Looks for streams in one queue; its slots are shared with the other queues of streams."""

    def __init__(self, *args: Any, fleet: Fleet, rng: random.Random, **options: Any) -> None:
        super().__init__(*args, kind=STREAM, rng=rng, **options)
        self._fleet = fleet

    def _wanted(self) -> int:
        return min(self.free, AT_ONCE)

    def _entries(self) -> int:
        return max(2 * self._wanted(), PAGE)

    def _eligible(self, found: list[Candidate]) -> list[Candidate]:
        """Those that are ours, and those that nobody has taken for a while."""
        if not found:
            return found
        self._fleet.refresh()
        overdue = self._store.clock.earliest() - OTHERS_S
        return [one for one in found if one.created_at <= overdue or self._fleet.is_ours(one.task_id)]

    def _pick(self, found: list[Candidate]) -> list[Candidate]:
        return found[: self._wanted()]
