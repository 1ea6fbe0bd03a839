"""What is paused for one agent, and whether it is asked to drain.

The agent reads one row before it looks for work, at most once in `every_s` seconds: a pause costs nothing for each
task.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Collection
from contextlib import suppress
from typing import Final

from thunderagent.agent.core import Core
from thunderagent.agent.poller import QueuePoller
from thunderagent.model import events
from thunderagent.model.errors import NotAllowed, StoreError
from thunderagent.model.names import names_of, plain_job
from thunderagent.model.task import Row
from thunderagent.model.writes.pauses import CONTROL_ID
from thunderagent.queue.pauses import Pause, PauseKind, change_controls, drain_asked, pauses_of, without_drains

PAUSES_LOOK_S: Final = 10.0
"""An agent that has not looked for work for so long reads the row."""


class PauseWatcher:
    """The pauses that concern one agent. Called in the agent's loop."""

    def __init__(self, core: Core, *, queues: Collection[str]) -> None:
        self._store = core.store
        self._bus = core.bus
        self._keys = {f"{PauseKind.AGENT}:{name}" for name in names_of(core.name)}
        self._values = tuple(core.jobs.by_value)
        self._ours = self._keys | {f"{PauseKind.QUEUE}:{name}" for name in queues}
        self._ours |= {f"{PauseKind.JOB}:{plain_job(name)}" for name in self._values}
        self._every_s = core.settings.poll_min_s
        self._monotonic = core.store.monotonic
        self._next_read = -math.inf
        self._failing_since: float | None = None
        self._known: dict[str, Pause] = {}
        self._active: dict[str, Pause] = {}
        self._jobs: frozenset[str] = frozenset()
        self._was_read = False
        self._held: dict[str, Pause] = {}
        self._holding = threading.Lock()
        self._reasons: dict[str, str] = {}
        self._owner = core.name
        self._retire = core.stop.retire
        self._is_asked_to_drain = False
        self._asked: Row | None = None

    def hold(self, reason: str | None, *, by: str = "") -> None:
        """Let nothing start in this agent, whatever the row says. Safe in any thread.

        Args:
            reason: for people; None: go on.
            by: the holder; each holder ends only its own hold.
        """
        with self._holding:
            self._reasons.pop(by, None)
            if reason is not None:
                self._reasons[by] = reason
            pause = Pause(kind=PauseKind.AGENT, name=self._owner, reason="; ".join(self._reasons.values()))
            self._held = {pause.key: pause} if self._reasons else {}

    @property
    def held_for(self) -> str:
        """Why the agent is held, whatever the row says; empty: it is not."""
        return "; ".join(pause.reason or "" for pause in self._held.values())

    @property
    def is_agent_paused(self) -> bool:
        """Whether the agent is to claim nothing, as far as it knows."""
        return bool(self._held) or not self._keys.isdisjoint(self._active)

    def admits(self, poller: QueuePoller) -> bool:
        """Whether a poller that is due may look. A poller that may not is due again at its usual pace."""
        if poller.free > 0:
            self._read()
        if self._is_asked_to_drain:
            return False
        self._notice()
        holding = [self._active[key] for key in (*self._keys, f"queue:{poller.queue}") if key in self._active]
        if holding:
            poller.pass_by(woken_due=self._next_read, longest_s=self._lasts_s(max(map(_end, holding))))
        elif self._jobs:
            ends = min(_end(pause) for pause in self._active.values())
            poller.read_past(self._jobs, woken_due=self._next_read, longest_s=self._lasts_s(ends))
        else:
            poller.read_past((), woken_due=math.inf, longest_s=math.inf)
        return not holding

    def look(self) -> None:
        """Read the row if it was not read for a while, as in an agent without a free slot."""
        if self._monotonic() - self._next_read >= PAUSES_LOOK_S - self._every_s:
            self._read()
            self._notice()

    def end(self) -> None:
        """Remove the request to drain, if there was one: this agent has ended, and no other has its name.

        Raises:
            StoreError: the store did not answer.
        """
        if self._asked is not None:
            with suppress(NotAllowed):  # the next request to drain removes it
                change_controls(self._store, self._asked, without_drains([self._owner]))

    def take_answered(self) -> bool:
        """Whether the store has answered since the last call."""
        answered, self._was_read = self._was_read, False
        return answered

    def is_paused(self, queue: str, job: str) -> bool:
        """Whether no task of this job and queue may start here now."""
        self._read()
        self._notice()
        return self._is_asked_to_drain or not self._active.keys().isdisjoint(
            (*self._keys, f"queue:{queue}", f"job:{job}")
        )

    def _lasts_s(self, ends: float) -> float:
        return max(0.0, ends - self._store.clock.now())

    def _read(self) -> None:
        """Read the row if it was not read lately. Without an answer the last one stays."""
        now = self._monotonic()
        if now < self._next_read:
            return
        self._next_read = now + self._every_s
        try:
            row = self._store.engine.get([CONTROL_ID]).get(CONTROL_ID)
        except StoreError as error:
            if self._failing_since is None:
                self._failing_since = now
                failed = events.StoreFailed(during="reading pauses", error=str(error), next_try_s=self._every_s)
                self._bus.emit(failed)
            return
        if self._failing_since is not None:
            self._bus.emit(events.StoreRecovered(during="reading pauses", seconds=now - self._failing_since))
            self._failing_since = None
        self._known = {key: pause for key, pause in pauses_of(row).items() if key in self._ours}
        self._was_read = True
        if not self._is_asked_to_drain and (reason := drain_asked(row, self._owner)) is not None:
            self._is_asked_to_drain, self._asked = True, row
            self._retire(f"asked to drain: {reason}" if reason else "asked to drain")

    def _notice(self) -> None:
        """Find out which pauses hold now, and emit those that have begun or ended."""
        if not self._known and not self._active and not self._held:
            return
        now = self._store.clock.now()
        before, known = self._active, {**self._known, **self._held}
        self._active = {key: pause for key, pause in known.items() if not pause.is_over(now)}
        names = {pause.name for pause in self._active.values() if pause.kind is PauseKind.JOB}
        self._jobs = frozenset(value for value in self._values if plain_job(value) in names) if names else frozenset()
        for key in sorted(self._active.keys() - before.keys()):
            pause = self._active[key]
            self._bus.emit(events.Paused(kind=pause.kind, name=pause.name, until=pause.until, reason=pause.reason))
        for key in sorted(before.keys() - self._active.keys()):
            self._bus.emit(events.Resumed(kind=before[key].kind, name=before[key].name))


def _end(pause: Pause) -> float:
    return math.inf if pause.until is None else pause.until
