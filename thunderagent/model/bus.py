from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from thunderagent.model.forks import renewed
from thunderagent.model.outlet import without_waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something happened."""


Listener = Callable[[Event], object]
T = TypeVar("T")


class EventBus:
    """Calls every listener for each event, in the thread in which it happened.

    A listener that raises is reported on standard error and does not hurt the engine.
    """

    def __init__(self) -> None:
        self._listeners: tuple[tuple[Listener, Callable[[Sequence[Event]], object] | None], ...] = ()
        self._guard = renewed(threading.Lock())

    def subscribe(
        self, listener: Listener, *, several: Callable[[Sequence[Event]], object] | None = None
    ) -> Callable[[], None]:
        """Call the listener for every event from now on; the answer is a function that ends this.

        Args:
            listener: called with one event.
            several: called with events that happened together, instead: one call to the system writes all their lines.
        """
        one = (listener, several)
        with self._guard:
            self._listeners = (*self._listeners, one)

        def unsubscribe() -> None:
            with self._guard:
                self._listeners = tuple(other for other in self._listeners if other is not one)

        return unsubscribe

    def emit(self, event: Event) -> None:
        for listener, _ in self._listeners:
            _tell(listener, event)

    def emit_all(self, events: Sequence[Event]) -> None:
        """Call all listeners for events that happened together, in their order."""
        for listener, several in self._listeners:
            if several is not None:
                _tell(several, events)
                continue
            for event in events:
                _tell(listener, event)


def _tell(listener: Callable[[T], object], what: T) -> None:
    try:
        listener(what)
    except Exception as error:
        name = type(what).__name__ if isinstance(what, Event) else "events"
        with suppress(Exception):  # its reader may be gone, or its disk full
            without_waiting(sys.stderr).write(f"a listener of {name} failed: {error!r}\n")
