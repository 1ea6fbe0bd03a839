"""A store that does not answer an agent's loop: since when, and when it is asked again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from thunderagent import events
from thunderagent.bus import EventBus
from thunderagent.choice import Choice
from thunderagent.errors import StoreError, StoreThrottled
from thunderagent.health.marks import Marks
from thunderagent.pacing import THROTTLED_S, outage_delays


class Outage:
    """Called in the agent's loop; heartbeats go on by themselves."""

    def __init__(
        self, choice: Choice, marks: Marks, bus: EventBus, rng: random.Random, monotonic: Callable[[], float]
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
    def may_try(self) -> bool:
        """Whether it is time for the next attempt."""
        return self._monotonic() >= self._next_try

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
        delay = next(self._delays)
        if isinstance(error, StoreThrottled):  # it is there, and less of us is all that it asks for
            delay = min(delay, THROTTLED_S)
        self._next_try = self._monotonic() + delay
        self._choice.postpone(delay)
        self._bus.emit(events.StoreFailed(during="polling", error=str(error), next_try_s=delay))
