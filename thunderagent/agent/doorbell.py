"""Listens at the doorbell for an agent, in a thread of its own, and sees to it that polling fits what is heard.

A doorbell that works lets the pollers pause for longer; one that fails puts them back to their usual pace until it
works again. Both are decided here and nowhere else.
"""

from __future__ import annotations

import heapq
import math
import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Final
from zlib import crc32

from thunderagent.agent.heartbeat import Heartbeat
from thunderagent.agent.poller import QueuePoller, Served, SlotPool
from thunderagent.jobs.registry import Registry
from thunderagent.model import events
from thunderagent.model.bus import EventBus
from thunderagent.model.errors import DoorbellError
from thunderagent.model.events import Event
from thunderagent.model.pacing import outage_delays
from thunderagent.model.task import BATCH, STREAM, Candidate
from thunderagent.queue.doorbell.message import DoorbellMessage, Verb
from thunderagent.queue.doorbell.port import Doorbell
from thunderagent.stores.tasks import TaskStore, Wanted

LISTEN_S: Final = 20.0
"""Longest wait for a message before the listener looks around."""

SHY_S: Final = 0.05
"""How long an agent leaves a task to the agent whose share it is, when all have got the same message."""

MISSED_S: Final = 1.0
"""A poller whose message could not be followed looks again within this time."""

RELAY_S: Final = 1.0
"""Shortest time between two messages by which a busy agent passes tasks on."""

JOIN_S: Final = 0.5
"""Longest wait for the listener to end: a long poll under way cannot be broken off."""

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


THREAD: Final = "doorbell"


class Listener:
    """The ears of one agent. Without a doorbell it only remembers when tasks of this agent are due again."""

    def __init__(
        self,
        bell: Doorbell | None,
        rung: Rung,
        heartbeat: Heartbeat,
        bus: EventBus,
        *,
        owner: str,
        pollers: Mapping[Served, QueuePoller],
        stretch_s: float,
        wake: Callable[[], None],
        rng: random.Random | None = None,
    ) -> None:
        """Make one; nothing is opened before `start`.

        Args:
            bell: None: nobody rings.
            rung: gets what is heard of tasks.
            heartbeat: gets what is heard of leases.
            bus: tells of what ends here, and is told of failures.
            owner: the agent; a beat for another is not for it.
            pollers: pause for longer while the doorbell works.
            stretch_s: for how long at most.
            wake: wakes the agent's loop.
            rng: source of jitter.
        """
        self._bell = bell
        self._rung = rung
        self._heartbeat = heartbeat
        self._bus = bus
        self._store = rung.store
        self._owner = owner
        self._pollers = [poller for poller in pollers.values() if poller.kind == BATCH]
        self._queues = {queue for queue, _ in pollers}
        self._stretch_s = 0.0 if bell is None or bell.is_local else stretch_s
        self._wake = wake
        self._rng = rng or random.Random()
        self._monotonic = rung.store.monotonic
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._works = False
        self._was_tried = False
        self._failing_since: float | None = None
        self._delays: Iterator[float] = iter(())
        self._released: set[str] = set()
        self._told: dict[str, float] = {}
        rung.is_shared = bell is not None and bell.is_local
        bus.subscribe(self._notice)

    @property
    def is_healthy(self) -> bool:
        """True while rings can be heard."""
        return self._works and self._thread is not None and self._thread.is_alive()

    @property
    def is_heard(self) -> bool | None:
        """Whether rings can be heard; None: there is no doorbell, or it has not been tried yet."""
        if self._bell is None or not (self._was_tried or self.is_dead):
            return None
        return self.is_healthy

    @property
    def has_bell(self) -> bool:
        """False for an agent without a doorbell, which polls."""
        return self._bell is not None

    @property
    def is_dead(self) -> bool:
        """True when the thread has ended before its time."""
        return self._thread is not None and not self._thread.is_alive() and not self._stop.is_set()

    @property
    def may_stretch(self) -> bool:
        """Whether pollers pause for longer while the doorbell works."""
        return self._stretch_s > 0

    def start(self) -> None:
        """Begin to listen."""
        if self._bell is not None:
            self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)
            self._thread.start()

    def look_after(self) -> None:
        """Start a thread that has died again, and give the pollers the pace that fits; in each round of the loop."""
        if self.is_dead:
            self._works = False
            self.start()
            self._bus.emit(events.ThreadDied(thread=THREAD, restarted=True))
        seconds = self._stretch_s if self.is_healthy else 0.0
        for poller in self._pollers:
            poller.stretch(seconds)

    def stop(self) -> None:
        """Hear nothing more; what comes is for other agents."""
        self._stop.set()

    def close(self) -> None:
        """Tell others of the tasks that were given back, and let go of the doorbell. Takes seconds at worst."""
        self._stop.set()
        if self._bell is None:
            return
        if self._released:
            self._bell.ring([DoorbellMessage.look(queue) for queue in sorted(self._released)])
        self._bell.close()
        if self._thread is not None:
            self._thread.join(JOIN_S)

    def _run(self) -> None:
        bell = self._bell
        while bell is not None and not self._stop.is_set():
            try:
                # The first time, and after a failure, only to see whether it works.
                rings = bell.listen(LISTEN_S if self._works else 0.0, self._wants)
            except DoorbellError as error:
                if not self._stop.is_set():
                    self._stop.wait(self._failed(error))
                continue
            self._worked()
            for ring in rings:
                if ring.verb is Verb.BEAT:
                    self._heartbeat.hurry(ring.task_id)
                else:
                    self._rung.hear(ring)
            if rings:
                self._wake()

    def _wants(self, ring: DoorbellMessage) -> bool:
        if self._stop.is_set():
            return False
        return ring.owner == self._owner if ring.verb is Verb.BEAT else self._rung.has_room(ring)

    def _failed(self, error: DoorbellError) -> float:
        self._was_tried = True
        if self._failing_since is None:
            self._failing_since, self._delays = self._monotonic(), outage_delays(self._rng)
        delay = next(self._delays)
        self._bus.emit(events.DoorbellFailed(error=str(error), next_try_s=delay))
        if self._works:
            self._works = False
            self._wake()
        return delay

    def _worked(self) -> None:
        if self._failing_since is not None:
            self._bus.emit(events.DoorbellRecovered(seconds=self._monotonic() - self._failing_since))
            self._failing_since = None
        if not self._works:
            self._works = self._was_tried = True
            self._wake()

    def _notice(self, event: Event) -> None:
        """Nobody rings for what an agent itself puts back: it remembers when, and tells others what is not for it."""
        match event:
            case events.TaskRetried(queue=queue, delay_s=delay_s) | events.TaskSnoozed(queue=queue, delay_s=delay_s):
                self._rung.hear(DoorbellMessage.look(queue, self._store.clock.now() + delay_s))
            case events.TaskReleased(queue=queue):
                self._released.add(queue)
            case events.ChildUnparked(queue=queue) | events.TaskLetOut(queue=queue) if queue and self._bell is not None:
                if not self._stop.is_set() and not self._rung.has_room(DoorbellMessage.look(queue)):
                    self._relay(queue)
            case _:
                return

    def _relay(self, queue: str) -> None:
        now = self._monotonic()
        if self._bell is not None and now - self._told.get(queue, -RELAY_S) >= RELAY_S:
            self._told[queue] = now
            self._bell.ring([DoorbellMessage.look(queue)])
