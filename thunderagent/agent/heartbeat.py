"""The heartbeat: keeps all leases of an agent alive, with threads and a client of its own.

One thread renews the leases that are due and acts on the replies (a cancel, a lost lease). The other watches: it stops
handlers whose lease was not renewed in time or whose time limit is over, even while a renewal hangs on a dead network.
User code runs in other threads and cannot block them. They start before the first claim and stop after the last
release.

No answer (a throttle, a 5xx, no network) is not a loss: the renewal is tried again each second until the deadline of
the lease. The deadline counts from before the last good renewal was sent. After it, the handler is asked to stop.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from thunderagent.jobs.outcome import about
from thunderagent.jobs.running import Running
from thunderagent.model import events, queue_events
from thunderagent.model.bus import EventBus
from thunderagent.model.clock import since_boot
from thunderagent.model.errors import (
    LeaseLost,
    StoreError,
    StoreRejected,
    StreamStopped,
    StreamWedged,
    TaskCancelled,
    TaskStopped,
    TimeLimitExceeded,
)
from thunderagent.model.task import Desired
from thunderagent.regions.gate import Gate
from thunderagent.stores.tasks import Beat, Renewal, TaskStore

HEARTBEAT_RETRY_S: Final = 1.0
"""Pause after a renewal without an answer."""

HEARTBEAT_JOIN_S: Final = 1.0
"""Longest wait for the heartbeat to end: it holds nothing then, and needs no reply any more."""

BEAT_AGAIN_S: Final = 1.0
"""Shortest time between two renewals of one lease that doorbell messages asked for."""

STUCK_WAIT_S: Final = 60.0
"""Pause between warnings about a handler that goes on after its time limit or its lost lease."""

CANCELLED: Final = "cancelled"

QUIET_S: Final = 30.0
"""A failed renewal begins a new outage after so long without one."""

OVERRUN_S: Final = 1.0
"""A handler that ends so long after its time limit is reported, although it has ended."""

SPREAD: Final = 0.5
"""Share of the interval by which the first beat of a stream may come early."""


class Heartbeat:
    """Renews the leases of everything that runs. `watch` and `forget` may be called from any thread."""

    def __init__(
        self,
        store: TaskStore,
        bus: EventBus,
        *,
        tick_s: float,
        rng: random.Random | None = None,
        monotonic: Callable[[], float] = since_boot,
        gate: Gate | None = None,
    ) -> None:
        self.store = store
        self._gate = gate or Gate()
        self._bus = bus
        self._tick_s = tick_s
        self._rng = rng or random.Random()
        self._monotonic = monotonic
        self._held: dict[str, Running] = {}
        self._hurries: dict[str, float] = {}
        self._hurried: dict[str, float] = {}
        self._stop = threading.Event()
        self._early = threading.Event()
        self._threads: list[threading.Thread] = []
        self._changing = threading.RLock()
        self.last_round = monotonic()
        """Monotonic second of the last complete round."""
        self.last_error = ""
        """Error of the last renewal without an answer."""
        self._failing_since = self._failed_at = -math.inf

    def start(self) -> None:
        """Start the threads, or restart those that have died."""
        if not self._threads:
            self.last_round = self._monotonic()
            with suppress(StoreError):  # connect before newer code brings the store to a schema that we cannot open
                self.store.engine.check()
        alive = {thread.name for thread in self._threads if thread.is_alive()}
        for name, work in (("heartbeat", self._beat), ("lease-watch", self._watch)):
            if name not in alive:
                self._threads = [thread for thread in self._threads if thread.name != name]
                thread = threading.Thread(target=work, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()

    @property
    def is_alive(self) -> bool:
        """False before `start`, after `stop`, and when a thread has died."""
        return bool(self._threads) and all(thread.is_alive() for thread in self._threads)

    @property
    def dead(self) -> tuple[str, ...]:
        """Names of the threads that have died."""
        return () if self._stop.is_set() else tuple(one.name for one in self._threads if not one.is_alive())

    @property
    def failing_s(self) -> float | None:
        """Seconds for which no renewal has had an answer; None: the last one had."""
        now = self._monotonic()
        return now - self._failing_since if now - self._failed_at <= QUIET_S else None

    def watch(self, running: Running) -> None:
        """Keep this lease alive. The first beat of a stream comes early, as hundreds are claimed together."""
        early = SPREAD * self._rng.random() if running.job.is_stream else 0.0
        running.next_beat = running.lease.held_from + running.beat_s * (1.0 - early)
        self._held[running.lease.task_id] = running

    def watch_until(self, running: Running, deadline: float) -> None:
        """Stop renewing this lease, and stop its handler at this monotonic second: another agent goes on then."""
        lease = running.lease
        running.lease = replace(lease, held_from=lease.held_from + deadline - running.deadline)
        running.context.extended(deadline)
        running.next_beat = math.inf
        self._held[lease.task_id] = running

    def forget(self, running: Running) -> None:
        """Forget this lease: it is settled or lost. The reply to a beat under way is ignored."""
        with self._changing:
            self._held.pop(running.lease.task_id, None)
            self._hurries.pop(running.lease.task_id, None)
            self._hurried.pop(running.lease.task_id, None)

    def ended(self, running: Running) -> None:
        """Note that the handler has ended. One that ran past its time limit is reported, if it was not before."""
        running.settling, why, now = True, running.context.stop_reason, self._monotonic()
        is_reported = running.warned != running.stop_seen_at
        if isinstance(why, TimeLimitExceeded) and not is_reported and 0 < running.stop_seen_at < now - OVERRUN_S:
            self._overran(running, why, now)

    def hurry(self, task_id: str) -> None:
        """Renew the lease of a task now, if it is held here, as its row has news. At most once a second."""
        with self._changing:
            running = self._held.get(task_id)
            if running is None or running.next_beat == math.inf:
                return
            again = self._hurried.get(task_id, -math.inf) + BEAT_AGAIN_S
            self._hurries[task_id] = max(self._monotonic(), again)
        self._early.set()

    def stop(self) -> None:
        """End the threads, after all other parts of the agent."""
        self._stop.set()
        self._early.set()
        until = since_boot() + HEARTBEAT_JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, until - since_boot()))

    @property
    def has_ended(self) -> bool:
        """False while a thread lives, such as one that waits for a reply."""
        return not any(thread.is_alive() for thread in self._threads)

    def round(self) -> None:
        """One tick of both threads."""
        self.renew_due()
        self.judge_all()

    def renew_due(self) -> None:
        """Renew the leases that are due, in one call to the store."""
        now = self._monotonic()
        hurried = self._take_hurries(now)
        due = [
            one
            for one in (list(self._held.values()) if self._gate.is_open else ())
            if (one.next_beat <= now or one.lease.task_id in hurried) and not one.lost and self._may(one, now)
        ]
        if due:
            late = now - min(one.next_beat for one in due)
            if late > max(self._tick_s * 3, min(one.beat_s for one in due)):
                self._bus.emit(events.HeartbeatLate(seconds=late))
            beats = [_beat(one) for one in due]
            for running, beat, renewal in zip(due, *self._renew_bare(beats, self._renew(beats)), strict=True):
                self._take(running, beat, renewal)
        self.last_round = self._monotonic()

    def judge_all(self) -> None:
        """Stop handlers whose lease or time limit is over, and all of them without a grant of the region."""
        is_open = self._gate.is_open
        for running in list(self._held.values()):
            if not is_open and not running.settling and not running.lost:
                self._lose(running, f"the region {self._gate.region} holds no grant: {self._gate.why_closed}")
            self._judge(running, self._monotonic())

    def _take_hurries(self, now: float) -> set[str]:
        """The leases to renew before their time. A request during a beat causes one more."""
        if not self._hurries:
            return set()
        with self._changing:
            taken = {task_id for task_id, at in self._hurries.items() if at <= now}
            for task_id in taken:
                del self._hurries[task_id]
                self._hurried[task_id] = now
        return taken

    def _beat(self) -> None:
        while not self._stop.is_set():
            self._early.wait(self._tick_s)
            self._early.clear()
            if not self._stop.is_set():
                self.renew_due()

    def _watch(self) -> None:
        while not self._stop.wait(self._tick_s):
            self.judge_all()

    def _renew(self, beats: Sequence[Beat]) -> list[Renewal]:
        sent = self._monotonic()
        try:
            renewals = self.store.renew(beats)
        except StoreError as problem:
            renewals = [Renewal(error=problem) for _ in beats]
        unknown = [one.error for one in renewals if one.error and not isinstance(one.error, StoreRejected)]
        if error := next(iter(unknown), None):
            self._bus.emit(events.StoreFailed(during="heartbeat", error=str(error), next_try_s=HEARTBEAT_RETRY_S))
        if len(unknown) == len(renewals):
            if sent - self._failed_at > QUIET_S:
                self._failing_since = sent
            self._failed_at, self.last_error = self._monotonic(), str(error)
        else:
            self._failed_at = -math.inf
        return renewals

    def _renew_bare(self, beats: list[Beat], renewals: list[Renewal]) -> tuple[list[Beat], list[Renewal]]:
        """Renew leases without progress and cursor where the store rejects these, so that no lease is lost."""
        again = [
            index
            for index, (beat, renewal) in enumerate(zip(beats, renewals, strict=True))
            if isinstance(renewal.error, StoreRejected) and beat != Beat(beat.lease)
        ]
        for index in again:
            self._rejected(beats[index], renewals[index])
            beats[index] = Beat(beats[index].lease)
        for index, renewal in zip(again, self._renew([beats[index] for index in again]) if again else (), strict=True):
            renewals[index] = renewal
        return beats, renewals

    def _rejected(self, beat: Beat, renewal: Renewal) -> None:
        self._bus.emit(queue_events.WriteRejected(task_id=beat.lease.task_id, verb="renew", error=str(renewal.error)))

    def _take(self, running: Running, beat: Beat, renewal: Renewal) -> None:
        with self._changing:
            if self._held.get(running.lease.task_id) is running and running.lease is beat.lease:
                self._answered(running, beat, renewal)

    def _answered(self, running: Running, beat: Beat, renewal: Renewal) -> None:
        now = self._monotonic()
        if renewal.lease is not None:
            running.lease = renewal.lease
            running.next_beat = renewal.lease.held_from + running.beat_s
            running.context.extended(running.deadline, renewal.lease)
            running.context.cursor_saved(beat.last_seq)
            if renewal.lease.task.cancel_requested:
                running.context.stop(TaskCancelled(CANCELLED))
            elif renewal.lease.task.desired_state == Desired.STOPPED:
                running.context.stop(StreamStopped())
        elif renewal.lost and running.settling:
            running.next_beat = now + running.beat_s  # its own settlement ended the lease, or will be refused
        elif renewal.lost:
            who = f"it is held by {renewal.taken_by}" if renewal.taken_by else "no agent holds it"
            self._lose(running, f"the lease was lost: {who}")
        elif isinstance(renewal.error, StoreRejected):
            running.next_beat = now + running.beat_s
            self._rejected(beat, renewal)
        else:
            running.next_beat = now + min(HEARTBEAT_RETRY_S, running.beat_s)
            running.context.keep_progress(beat.progress)

    def _may(self, running: Running, now: float) -> bool:
        """Whether to renew a lease.

        A stream without progress is left to another agent, with one event. A lease that is over stays so, as after
        a machine has slept: another agent may hold the permit of the handler.
        """
        reason = None if running.settling else running.context.not_renewable()
        self._wedged(running, reason)
        return reason is None and (running.settling or now < running.deadline)

    def _wedged(self, running: Running, reason: str | None) -> None:
        with self._changing:
            is_new, running.wedged = reason is not None and not running.wedged, reason is not None
        if is_new:
            self._bus.emit(events.StreamWedged(**about(running.lease), reason=str(reason)))

    def _judge(self, running: Running, now: float) -> None:
        limit = running.job.timeout_s
        if not running.settling and (stuck := running.context.wedged(now)) is not None:
            self._wedged(running, stuck)
            running.context.stop(StreamWedged(stuck))
        if now >= running.deadline and not running.settling and not running.lost:
            late = f"the lease could not be renewed within {running.lease.lease_s:g} s"
            self._lose(running, "another agent is to go on now" if running.next_beat == math.inf else late)
        elif limit is not None and not running.waits and now - running.started >= limit:
            running.context.stop(TimeLimitExceeded(f"the time limit of {limit:g} s is over"))
        why = running.context.stop_reason
        if why is None or running.settling:
            return
        if not running.warned:
            running.warned = running.stop_seen_at = now
        elif now - running.warned >= STUCK_WAIT_S:
            running.warned = now
            self._overran(running, why, now)

    def _overran(self, running: Running, why: TaskStopped, now: float) -> None:
        seconds = now - running.started
        self._bus.emit(events.TaskOverran(**about(running.lease), reason=str(why), seconds=seconds))

    def _lose(self, running: Running, reason: str) -> None:
        """Ask the handler to stop; the agent forgets the lease when the handler has ended."""
        with self._changing:
            if running.lost:
                return
            running.lost = True
        running.context.stop(LeaseLost(reason))
        self._bus.emit(events.LeaseLost(**about(running.lease), reason=reason))


def _beat(running: Running) -> Beat:
    """A renewal, with progress and cursor."""
    context, task = running.context, running.lease.task
    return Beat(
        running.lease,
        progress=context.take_progress(),
        last_seq=context.unsaved_cursor(),
        forgive=context.has_progressed and bool(task.retry_count or task.crash_count),
    )
