"""What an agent's loop meets at its store: marks of its progress, and outages with the time of the next attempt."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Final

from thunderagent.agent.candidates import CandidateSelector
from thunderagent.agent.core import Core
from thunderagent.model import events
from thunderagent.model.errors import StoreError, StoreThrottled
from thunderagent.model.pacing import jittered, outage_delays

THROTTLED_S: Final = 2.0
"""Longest wait of an agent after a throttle."""


class Marks:
    """Marks that an agent's loop leaves as it gets on, for other threads: single assignments, so none waits."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self.moved_at = self.answered_at = self.round_at = monotonic()
        self.outage_since: float | None = None
        self.store_error = ""
        self.is_ready = False
        """True once the store has answered a whole round: the agent looks for work."""
        self.loop_thread: int | None = None

    def begin(self) -> None:
        """The loop begins in this thread, and the store has just answered."""
        self.loop_thread = threading.get_ident()
        self.moved()
        self.answered()

    def moved(self) -> None:
        self.moved_at = self._monotonic()

    def answered(self) -> None:
        self.moved()
        self.answered_at = self.moved_at

    def good_round(self, *, asked: bool) -> None:
        """The store answered all that a round asked for."""
        self.moved()
        self.round_at = self.moved_at
        if asked:
            self.answered_at, self.outage_since, self.store_error = self.moved_at, None, ""
            self.is_ready = True

    def missed(self, error: object) -> None:
        """The store failed for something beside the work."""
        self.moved()
        self.store_error = str(error)

    def failed(self, error: object, *, answered: bool) -> None:
        """The store failed for the loop; `answered`: but for a part."""
        self.missed(error)
        if answered:
            self.answered_at, self.outage_since = self.moved_at, None
        elif self.outage_since is None:
            self.outage_since = self.moved_at


PART_AGAIN_S: Final = 0.1
"""Before the next attempt when a part of a round was answered."""


class Outage:
    """A store that does not answer an agent's loop. Called in the loop; heartbeats go on by themselves."""

    def __init__(self, core: Core, selector: CandidateSelector, marks: Marks) -> None:
        self._selector = selector
        self._marks = marks
        self._bus = core.bus
        self._rng = core.rng
        self._monotonic = core.store.monotonic
        self._delays: Iterator[float] | None = None
        self._since = self._next_try = 0.0

    @property
    def is_on(self) -> bool:
        """Whether the last round met a store that does not answer."""
        return self._delays is not None

    @property
    def wait_s(self) -> float:
        """Seconds until the next attempt; 0 while the store answers."""
        return max(0.0, self._next_try - self._monotonic()) if self.is_on else 0.0

    def reached(self, *, asked: bool) -> None:
        """The store answered all that a round asked for. A round that asked for nothing ends no outage."""
        if self.is_on and not asked:
            self._marks.moved()
            return
        self._marks.good_round(asked=asked)
        self._selector.inbox.is_muted = False
        if self._delays is not None:
            self._delays = None
            self._bus.emit(events.StoreRecovered(during="polling", seconds=self._monotonic() - self._since))

    def failed(self, error: StoreError, *, answered: bool) -> None:
        """Wait longer after each failure, but shortly when a part was answered."""
        self._marks.failed(error, answered=answered)
        self._selector.inbox.is_muted = True
        if self._delays is None:
            self._since = self._monotonic()
        if self._delays is None or answered:
            self._delays = outage_delays(self._rng)
        delay = jittered(PART_AGAIN_S, self._rng) if answered else next(self._delays)
        if isinstance(error, StoreThrottled):
            delay = min(delay, THROTTLED_S)
        self._next_try = self._monotonic() + delay
        self._selector.postpone(delay)
        self._bus.emit(events.StoreFailed(during="polling", error=str(error), next_try_s=delay))
