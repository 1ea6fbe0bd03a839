"""What an agent makes of rings: claims by id that need no reading of the index, and looks at the right moment.

Nothing is believed. A task that a ring tells of is claimed with the conditions of every claim: the status value, the
due time and the job must be those of the row. So a forged ring wins nothing, a late or doubled one nothing more; and
one for which there is no room, or that came while the store did not answer, is left to the pollers.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from typing import Final
from zlib import crc32

from thunderagent.agent.poller import QueuePoller, Served, SlotPool
from thunderagent.jobs.registry import Registry
from thunderagent.model.task import STREAM, Candidate
from thunderagent.queue.doorbell.message import DoorbellMessage, Verb
from thunderagent.stores.tasks import TaskStore, Wanted

SHY_S: Final = 0.05
"""How long an agent leaves a task to the one whose share it is, when all have heard the same ring."""

MISSED_S: Final = 1.0
"""A poller whose ring could not be followed looks again within this time."""


HEARD: Final = 1000
"""Rings that wait for the agent's loop at most; of what comes on top, only that there was something is kept."""

HELD: Final = 1000
"""Rings that wait for their due time at most; those due last go first."""

STALE_S: Final = 300.0
"""A task that has been due for longer is looked for in the index: rings of yesterday would be claimed in vain."""

AT_ONCE: Final = 100
"""Claims of one round at most."""


class Rung:
    """The rings that one agent has heard. `hear` and `has_room` in any thread, the rest in the agent's loop."""

    def __init__(
        self, pollers: Mapping[Served, QueuePoller], jobs: Registry, *, store: TaskStore, rng: random.Random
    ) -> None:
        self._pollers = pollers
        self._jobs = jobs.by_value
        self.store = store
        self._rng = rng
        self._heard: deque[DoorbellMessage] = deque()
        self._overflowed = False
        self._held: list[tuple[float, int, DoorbellMessage]] = []
        self._looks: set[tuple[str, float]] = set()
        self._number = 0
        self._ready: dict[str, DoorbellMessage] = {}
        self._accepted: Counter[SlotPool] = Counter()
        self.is_shared = False
        """True when every agent hears every ring: each leaves the others their share."""
        self.is_deaf = False
        """True while the store does not answer: rings are not to hurry an agent that waits for it."""

    def has_room(self, ring: DoorbellMessage) -> bool:
        """Whether the agent could follow a ring now, beside those that it has accepted; an agent that serves the queue
        alone takes all, as nobody else would."""
        if ring.verb is Verb.LOOK:
            return any(self._may_take(poller) for (queue, _), poller in self._pollers.items() if queue == ring.queue)
        poller = self._poller(ring)
        if poller is None or not self._may_take(poller):
            return False
        self._accepted[poller.pool] += 1
        return True

    def hear(self, ring: DoorbellMessage) -> None:
        """Take a ring; the agent's loop is to be woken afterwards."""
        if len(self._heard) < HEARD:
            self._heard.append(ring)
        else:
            self._overflowed = True

    def idle_s(self) -> float:
        """Seconds until there is something to do; infinity for nothing."""
        if self._heard or self._overflowed:
            return 0.0
        return max(0.0, self._held[0][0] - self.store.clock.latest()) if self._held else math.inf

    def arrive(self) -> None:
        """Look through what was heard and what has become due: wake pollers, note tasks to claim."""
        now = self.store.clock.latest()
        heard = [self._heard.popleft() for _ in range(len(self._heard))]
        while self._held and self._held[0][0] <= now:
            at, _, ring = heapq.heappop(self._held)
            self._looks.discard((ring.queue, at))
            heard.append(ring)
        self._accepted.clear()
        if self.is_deaf:
            return
        if self._overflowed:
            self._overflowed = False
            for poller in self._pollers.values():
                poller.wake()
        for ring in heard:
            if ring.at > now:
                self._hold(ring)
            elif ring.verb is Verb.LOOK:
                self._look(ring.queue)
            else:
                self._task_is_due(ring, now)

    def claims(self, room: Callable[[Candidate], float | None], chosen: Collection[str]) -> list[Wanted]:
        """The tasks to claim in this round.

        Args:
            room: the length of the lease a candidate gets here, whose room is promised then; None: not here or now.
            chosen: ids that are claimed in this round anyway; a second claim would be paid for in vain.
        """
        wanted: list[Wanted] = []
        for task_id, ring in self._ready.items():
            poller = self._poller(ring)
            if poller is None or task_id in chosen or self.store.unread.is_left_alone(task_id):
                continue
            candidate = ring.candidate._replace(kind=poller.kind)
            lease_s = room(candidate) if len(wanted) < AT_ONCE else None
            if lease_s is None:
                poller.look_within(MISSED_S)
            else:
                wanted.append(Wanted(candidate, lease_s))
        self._ready.clear()
        return wanted

    def _task_is_due(self, ring: DoorbellMessage, now: float) -> None:
        poller = self._poller(ring)
        if poller is None:
            return
        if poller.kind == STREAM or ring.at < now - STALE_S:  # who takes a stream is decided where they are shared out
            poller.wake()
        elif self.is_shared and not _is_ours(poller, ring.task_id):
            self._hold(DoorbellMessage.look(ring.queue, math.ceil((now + SHY_S) / SHY_S) * SHY_S))
        else:
            self._ready[ring.task_id] = ring

    def _hold(self, ring: DoorbellMessage) -> None:
        if ring.verb is Verb.LOOK:
            if (ring.queue, ring.at) in self._looks:
                return
            self._looks.add((ring.queue, ring.at))
        self._number += 1
        heapq.heappush(self._held, (ring.at, self._number, ring))
        if len(self._held) > HELD:
            last = max(self._held)
            self._held.remove(last)
            heapq.heapify(self._held)
            self._looks.discard((last[2].queue, last[0]))

    def _look(self, queue: str) -> None:
        for (name, _), poller in self._pollers.items():
            if name == queue:
                poller.wake()

    def _poller(self, ring: DoorbellMessage) -> QueuePoller | None:
        return self._pollers.get((ring.queue, self._jobs[ring.job].kind)) if ring.job in self._jobs else None

    def _may_take(self, poller: QueuePoller) -> bool:
        return poller.share[1] == 1 or poller.free > self._accepted[poller.pool]


def _is_ours(poller: QueuePoller, task_id: str) -> bool:
    rank, agents = poller.share
    return crc32(task_id.encode()) % agents == rank
