"""A store that does not answer an agent's loop: since when, and when it is asked again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Final

from thunderagent.agent.candidates import CandidateSelector
from thunderagent.agent.health.marks import Marks
from thunderagent.model import events
from thunderagent.model.bus import EventBus
from thunderagent.model.errors import StoreError, StoreThrottled
from thunderagent.model.pacing import jittered, outage_delays

THROTTLED_S: Final = 2.0
"""Longest wait of an agent after a throttle."""


PART_AGAIN_S: Final = 0.1
"""Before the next attempt when a part of a round was answered."""


class Outage:
    """Called in the agent's loop; heartbeats go on by themselves."""

    def __init__(
        self, choice: CandidateSelector, marks: Marks, bus: EventBus, rng: random.Random, monotonic: Callable[[], float]
    ) -> None:
        self._choice = choice
        self._marks = marks
        self._bus = bus
        self._rng = rng
        self._monotonic = monotonic
        self._delays: Iterator[float] | None = None
        self._since = self._next_try = 0.0

    @property
    def is_on(self) -> bool:
        """Whether the last round met a store that does not answer."""
        return self._delays is not None

    @property
    def wait_s(self) -> float:
        """Seconds until the next attempt, whatever wakes the loop before; 0 while the store answers."""
        return max(0.0, self._next_try - self._monotonic()) if self.is_on else 0.0

    def reached(self, *, asked: bool) -> None:
        """Whatever a round asked for was answered; one that asked for nothing ends no outage."""
        if self.is_on and not asked:
            self._marks.moved()
            return
        self._marks.good_round(asked=asked)
        self._choice.rung.is_deaf = False
        if self._delays is not None:
            self._delays = None
            self._bus.emit(events.StoreRecovered(during="polling", seconds=self._monotonic() - self._since))

    def failed(self, error: StoreError, *, answered: bool) -> None:
        """Wait longer after each failure, shortly when a part was answered."""
        self._marks.failed(error, answered=answered)
        self._choice.rung.is_deaf = True
        if self._delays is None:
            self._since = self._monotonic()
        if self._delays is None or answered:
            self._delays = outage_delays(self._rng)
        delay = jittered(PART_AGAIN_S, self._rng) if answered else next(self._delays)
        if isinstance(error, StoreThrottled):  # it is there, and less of us is all that it asks for
            delay = min(delay, THROTTLED_S)
        self._next_try = self._monotonic() + delay
        self._choice.postpone(delay)
        self._bus.emit(events.StoreFailed(during="polling", error=str(error), next_try_s=delay))
