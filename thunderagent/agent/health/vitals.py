"""The facts of an agent's health, seen from any thread, also while its loop stands still."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from types import FrameType
from typing import Any, Final

from thunderagent.agent.core import Core
from thunderagent.agent.doorbell import THREAD, DoorbellListener
from thunderagent.agent.health.judgement import Facts, Health, Limits, QueueFacts, judge
from thunderagent.agent.health.outage import Marks
from thunderagent.agent.heartbeat import Heartbeat
from thunderagent.agent.in_flight import InFlight
from thunderagent.agent.pauses import PauseWatcher
from thunderagent.agent.poller import QueuePoller
from thunderagent.agent.queues import slots_of
from thunderagent.agent.recycling import Held
from thunderagent.agent.threads import BackgroundThreads
from thunderagent.jobs.running import Running
from thunderagent.model.outlet import dropped_lines
from thunderagent.model.redaction import Redactor
from thunderagent.model.task import STREAM

AGAIN_S: Final = 30.0
"""A claim that was not repeated for so long after the longest pause counts no more."""

PACKAGE: Final = f"{Path(__file__).parents[2]}/"
STORES: Final = f"{PACKAGE}stores/"
"""The code that waits for a store."""

LONG_S: Final = 2.0
"""Time without progress after which the place of a thread in the code is looked up."""


class Vitals:
    """Looks at one agent, in any thread."""

    def __init__(
        self,
        core: Core,
        marks: Marks,
        *,
        pollers: Mapping[Any, QueuePoller],
        in_flight: InFlight,
        heartbeat: Heartbeat,
        listener: DoorbellListener,
        pauses: PauseWatcher,
        threads: BackgroundThreads,
    ) -> None:
        self._core = core
        self._marks = marks
        self._pollers = pollers
        self._in_flight = in_flight
        self._heartbeat = heartbeat
        self._listener = listener
        self._pauses = pauses
        self._threads = threads
        self._clock = core.store.clock
        self._monotonic = core.store.monotonic
        settings = core.settings
        # Rows, files and ports have other readers than the log.
        self._redacted = Redactor(settings.log_redact).text
        pause_s = max(settings.poll_idle_s, settings.poll_wake_s if listener.may_stretch else 0.0)
        self.limits = Limits(progress_s=settings.health_s, pause_s=pause_s)

    @property
    def is_ready(self) -> bool:
        """Whether the agent has begun to look for work."""
        return self._marks.is_ready

    def health(self) -> Health:
        return judge(self.facts(), self.limits)

    def entry(self) -> Mapping[str, Any]:
        """The health in the agent's row: ages of the last good rounds, and the judgement."""
        now, marks = self._monotonic(), self._marks
        return {
            "last_round_s": round(now - marks.round_at, 1),
            "last_heartbeat_s": round(now - self._heartbeat.last_round, 1),
            "heartbeat_alive": self._heartbeat.is_alive,
            "store_answers": marks.outage_since is None,
            "draining": self._core.stop.is_made,
            "paused": self._pauses.is_agent_paused,
            **self.health().entry(),
        }

    @property
    def slots(self) -> int:
        return slots_of(self._pollers)

    def held(self) -> list[Held]:
        """The tasks that the agent holds, and how long their handlers have ignored a request to stop."""
        now = self._monotonic()
        running = [one for one in list(self._in_flight.held.values()) if not one.settling]
        return [Held(one.job.name, now - one.stop_seen_at if one.stop_seen_at else 0.0) for one in running]

    def wake(self) -> None:
        """Wake the loop, which starts dead threads again."""
        self._core.inbox.wake()

    def dead(self) -> tuple[str, ...]:
        """The threads that have ended although the agent needs them."""
        return (
            *self._heartbeat.dead,
            *(("event-loop",) if self._in_flight.executors.is_dead else ()),
            *((THREAD,) if self._listener.is_dead else ()),
            *self._threads.dead,
        )

    def facts(self) -> Facts:
        now, marks, beats = self._monotonic(), self._marks, self._heartbeat
        loop = self._in_flight.executors.loop
        loop_s = now - marks.moved_at
        tick_s = None if loop is None or not loop.is_open else now - loop.last_tick
        return Facts(
            loop_s=loop_s,
            loop_at=place_of(marks.loop_thread) if loop_s > LONG_S else "",
            loop_asks=loop_s > LONG_S and is_in(marks.loop_thread, STORES),
            answered_s=now - marks.answered_at,
            outage_s=_since(marks.outage_since, now),
            store_error=self._redacted(marks.store_error),
            round_s=now - beats.last_round,
            beats_fail_s=beats.failing_s,
            beat_error=self._redacted(beats.last_error),
            held=len(self._in_flight.held),
            tick_s=tick_s,
            tick_at=place_of(loop.thread_id) if loop is not None and tick_s is not None and tick_s > LONG_S else "",
            dead=self.dead(),
            doorbell=self._listener.is_reachable,
            queues=tuple(self._queues(now)),
            draining=self._core.stop.is_made,
            paused=self._pauses.is_agent_paused,
            lines_dropped=dropped_lines(),
            held_for=self._redacted(self._pauses.held_for),
        )

    def _queues(self, now: float) -> Iterator[QueueFacts]:
        leaked = [one for one in list(self._in_flight.held.values()) if one.stop_seen_at and not one.settling]
        for poller in self._pollers.values():
            refused = poller.lost_claims.longest(now - self.limits.pause_s - AGAIN_S)
            ours = [one for one in leaked if _is_of(one, poller)]
            yield QueueFacts(
                queue=poller.queue,
                slots=poller.slots,
                free=poller.free,
                unlooked_s=now - poller.looked_at,
                refused_s=refused[1] if refused else None,
                refused_task=refused[0].task_id if refused else "",
                oldest_s=self._clock.now() - refused[0].created_at if refused else 0.0,
                leaked_s=tuple(now - one.stop_seen_at for one in ours),
                leaked_jobs=tuple(one.job.name for one in ours),
            )


def place_of(thread: int | None) -> str:
    """The place of a thread in the code: the innermost function, and the innermost of no library."""
    frames = list(_frames(thread))
    if not frames:
        return ""
    outer = next((one for one in frames if not _is_library(one)), frames[0])
    return _named(frames[0]) if outer is frames[0] else f"{_named(frames[0])}, called by {_named(outer)}"


def is_in(thread: int | None, folder: str) -> bool:
    """Whether a thread is in a function of this folder, or in one called from there."""
    return any(frame.f_code.co_filename.startswith(folder) for frame in _frames(thread))


def _frames(thread: int | None) -> Iterator[FrameType]:
    """The frames of a thread, the innermost first; none for a thread that has ended."""
    frame = sys._current_frames().get(thread) if thread is not None else None
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_library(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return name.startswith("<") or ("/lib/python" in name and not name.startswith(PACKAGE))


def _named(frame: FrameType) -> str:
    """Function, file and line; never values, which may be secrets."""
    return f"{frame.f_code.co_name} ({'/'.join(PurePath(frame.f_code.co_filename).parts[-2:])}:{frame.f_lineno})"


def _is_of(running: Running, poller: QueuePoller) -> bool:
    task = running.lease.task
    return task.queue == poller.queue and (poller.kind == STREAM) == running.job.is_stream


def _since(at: float | None, now: float) -> float | None:
    return None if at is None else now - at
