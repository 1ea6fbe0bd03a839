"""What an agent makes of doorbell messages: claims by id, looks at the right moment, and slower polls.

Nothing is believed. A task that a message names is claimed with the conditions of every claim: the status value, the
due time and the job must be those of the row. A forged message wins nothing, and one that comes late or twice does no
harm. Messages without room for their task, or from a time in which the store did not answer, are left to the pollers.

A doorbell that works lets the pollers pause for longer; one that fails puts them back to their usual pace.
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

from thunderagent.agent.core import Core
from thunderagent.agent.heartbeat import Heartbeat
from thunderagent.agent.poller import QueuePoller, Served, SlotPool
from thunderagent.jobs.registry import Registry
from thunderagent.model import events, queue_events
from thunderagent.model.bus import Event
from thunderagent.model.errors import DoorbellError
from thunderagent.model.pacing import outage_delays
from thunderagent.model.task import BATCH, STREAM, Candidate
from thunderagent.queue.doorbell.message import DoorbellMessage, Verb
from thunderagent.queue.doorbell.port import Doorbell
from thunderagent.stores.tasks import TaskStore, Wanted

THREAD: Final = "doorbell"

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

MOST_RECEIVED: Final = 1000
"""Messages that wait for the agent's loop at most; more wake all pollers."""

MOST_HELD: Final = 1000
"""Messages that wait for their due time at most; those due last are dropped first."""

STALE_S: Final = 300.0
"""A task that has been due for longer is looked for in the index: an old message is claimed in vain."""

AT_ONCE: Final = 100
"""Most claims of one round."""


class DoorbellInbox:
    """The messages that one agent has received. `receive` and `has_room` in any thread, the rest in its loop."""

    def __init__(self, pollers: Mapping[Served, QueuePoller], jobs: Registry, *, store: TaskStore) -> None:
        self.pollers = pollers
        self._jobs = jobs.by_value
        self.store = store
        self._received: deque[DoorbellMessage] = deque()
        self._overflowed = False
        self._held: list[tuple[float, int, DoorbellMessage]] = []
        self._looks: set[tuple[str, float]] = set()
        self._number = 0
        self._ready: dict[str, DoorbellMessage] = {}
        self._accepted: Counter[SlotPool] = Counter()
        self.is_shared = False
        """True when every agent gets every message: each leaves the others their share."""
        self.is_muted = False
        """True while the store does not answer: messages must not hurry an agent that waits for it."""

    def has_room(self, message: DoorbellMessage) -> bool:
        """Whether the agent has a slot for a message, beside those that it has accepted.

        An agent that serves the queue alone takes all, as no other would.
        """
        if message.verb is Verb.LOOK:
            return any(self._may_take(poller) for (queue, _), poller in self.pollers.items() if queue == message.queue)
        poller = self._poller(message)
        if poller is None or not self._may_take(poller):
            return False
        self._accepted[poller.pool] += 1
        return True

    def receive(self, message: DoorbellMessage) -> None:
        """Take a message; the caller wakes the agent's loop."""
        if len(self._received) < MOST_RECEIVED:
            self._received.append(message)
        else:
            self._overflowed = True

    def idle_s(self) -> float:
        """Seconds until there is something to do; infinity for nothing."""
        if self._received or self._overflowed:
            return 0.0
        return max(0.0, self._held[0][0] - self.store.clock.latest()) if self._held else math.inf

    def process(self) -> None:
        """Go through messages that have come or become due: wake pollers, note tasks to claim."""
        now = self.store.clock.latest()
        due = [self._received.popleft() for _ in range(len(self._received))]
        while self._held and self._held[0][0] <= now:
            at, _, message = heapq.heappop(self._held)
            self._looks.discard((message.queue, at))
            due.append(message)
        self._accepted.clear()
        if self.is_muted:
            return
        if self._overflowed:
            self._overflowed = False
            for poller in self.pollers.values():
                poller.wake()
        for message in due:
            if message.at > now:
                self._hold(message)
            elif message.verb is Verb.LOOK:
                self._look(message.queue)
            else:
                self._task_is_due(message, now)

    def claims(self, room: Callable[[Candidate], float | None], chosen: Collection[str]) -> list[Wanted]:
        """The tasks to claim in this round.

        Args:
            room: promises a slot to a candidate and gives the length of its lease; None: there is no slot.
            chosen: ids that are claimed in this round anyway.
        """
        wanted: list[Wanted] = []
        for task_id, message in self._ready.items():
            poller = self._poller(message)
            if poller is None or task_id in chosen or self.store.unread.is_left_alone(task_id):
                continue
            candidate = message.candidate._replace(kind=poller.kind)
            lease_s = room(candidate) if len(wanted) < AT_ONCE else None
            if lease_s is None:
                poller.look_within(MISSED_S)
            else:
                wanted.append(Wanted(candidate, lease_s))
        self._ready.clear()
        return wanted

    def _task_is_due(self, message: DoorbellMessage, now: float) -> None:
        poller = self._poller(message)
        if poller is None:
            return
        if poller.kind == STREAM or message.at < now - STALE_S:  # streams are shared out elsewhere
            poller.wake()
        elif self.is_shared and not _is_ours(poller, message.task_id):
            self._hold(DoorbellMessage.look(message.queue, math.ceil((now + SHY_S) / SHY_S) * SHY_S))
        else:
            self._ready[message.task_id] = message

    def _hold(self, message: DoorbellMessage) -> None:
        if message.verb is Verb.LOOK:
            if (message.queue, message.at) in self._looks:
                return
            self._looks.add((message.queue, message.at))
        self._number += 1
        heapq.heappush(self._held, (message.at, self._number, message))
        if len(self._held) > MOST_HELD:
            last = max(self._held)
            self._held.remove(last)
            heapq.heapify(self._held)
            self._looks.discard((last[2].queue, last[0]))

    def _look(self, queue: str) -> None:
        for (name, _), poller in self.pollers.items():
            if name == queue:
                poller.wake()

    def _poller(self, message: DoorbellMessage) -> QueuePoller | None:
        return self.pollers.get((message.queue, self._jobs[message.job].kind)) if message.job in self._jobs else None

    def _may_take(self, poller: QueuePoller) -> bool:
        return poller.share[1] == 1 or poller.free > self._accepted[poller.pool]


def _is_ours(poller: QueuePoller, task_id: str) -> bool:
    rank, agents = poller.share
    return crc32(task_id.encode()) % agents == rank


class DoorbellListener:
    """The thread that listens for one agent. Without a doorbell it remembers when the tasks of the agent are due again.

    Args:
        core: of the agent; messages about the leases of other agents are ignored.
        bell: opened by `start`; None: there is none.
        inbox: gets the messages about tasks.
        heartbeat: gets the messages about leases.
    """

    def __init__(
        self,
        core: Core,
        bell: Doorbell | None,
        inbox: DoorbellInbox,
        heartbeat: Heartbeat,
        *,
        rng: random.Random | None = None,
    ) -> None:
        self._bell = bell
        self._inbox = inbox
        self._heartbeat = heartbeat
        self._bus = core.bus
        self._store = core.store
        self._owner = core.name
        self._pollers = [poller for poller in inbox.pollers.values() if poller.kind == BATCH]
        self._stretch_s = 0.0 if bell is None or bell.is_local else core.settings.poll_wake_s
        self._wake = core.inbox.wake
        self._rng = rng or random.Random()
        self._monotonic = core.store.monotonic
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._works = False
        self._was_tried = False
        self._failing_since: float | None = None
        self._delays: Iterator[float] = iter(())
        self._released: set[str] = set()
        self._relayed_at: dict[str, float] = {}
        inbox.is_shared = bell is not None and bell.is_local
        core.bus.subscribe(self._on_event)

    @property
    def is_healthy(self) -> bool:
        """Whether messages can be received."""
        return self._works and self._thread is not None and self._thread.is_alive()

    @property
    def is_reachable(self) -> bool | None:
        """The same; None: there is no doorbell, or it has not been tried yet."""
        if self._bell is None or not (self._was_tried or self.is_dead):
            return None
        return self.is_healthy

    @property
    def is_dead(self) -> bool:
        """True when the thread has ended before its time."""
        return self._thread is not None and not self._thread.is_alive() and not self._stop.is_set()

    @property
    def may_stretch(self) -> bool:
        """Whether pollers pause for longer while the doorbell works."""
        return self._stretch_s > 0

    def start(self) -> None:
        if self._bell is not None:
            self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)
            self._thread.start()

    def look_after(self) -> None:
        """Restart a thread that has died, and set the pace of the pollers. In each round of the loop."""
        if self.is_dead:
            self._works = False
            self.start()
            self._bus.emit(events.ThreadDied(thread=THREAD, restarted=True))
        seconds = self._stretch_s if self.is_healthy else 0.0
        for poller in self._pollers:
            poller.stretch(seconds)

    def stop(self) -> None:
        """Accept no more messages: they are for other agents."""
        self._stop.set()

    def close(self) -> None:
        """Notify other agents of the tasks that were given back, and close the doorbell. Takes seconds at worst."""
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
                messages = bell.listen(LISTEN_S if self._works else 0.0, self._wants)
            except DoorbellError as error:
                if not self._stop.is_set():
                    self._stop.wait(self._failed(error))
                continue
            self._worked()
            for message in messages:
                if message.verb is Verb.BEAT:
                    self._heartbeat.hurry(message.task_id)
                else:
                    self._inbox.receive(message)
            if messages:
                self._wake()

    def _wants(self, message: DoorbellMessage) -> bool:
        if self._stop.is_set():
            return False
        return message.owner == self._owner if message.verb is Verb.BEAT else self._inbox.has_room(message)

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

    def _on_event(self, event: Event) -> None:
        """Remember when a task that this agent puts back is due, and pass on what it has no slot for."""
        match event:
            case events.TaskRetried(queue=queue, delay_s=delay_s) | events.TaskSnoozed(queue=queue, delay_s=delay_s):
                self._inbox.receive(DoorbellMessage.look(queue, self._store.clock.now() + delay_s))
            case events.TaskReleased(queue=queue):
                self._released.add(queue)
            case queue_events.ChildUnparked(queue=queue) | events.TaskLetOut(queue=queue) if (
                queue and self._bell is not None
            ):
                if not self._stop.is_set() and not self._inbox.has_room(DoorbellMessage.look(queue)):
                    self._relay(queue)
            case _:
                return

    def _relay(self, queue: str) -> None:
        now = self._monotonic()
        if self._bell is not None and now - self._relayed_at.get(queue, -RELAY_S) >= RELAY_S:
            self._relayed_at[queue] = now
            self._bell.ring([DoorbellMessage.look(queue)])
