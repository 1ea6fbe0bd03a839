"""Threads that run beside an agent's loop until the agent ends, and the signals that end it.

The loop starts a thread again that has died of an error, at most once in `RESTART_AFTER_S`.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Final, Protocol

from thunderagent.model import events
from thunderagent.model.bus import EventBus
from thunderagent.model.clock import since_boot

RESTART_AFTER_S: Final = 5.0
"""Shortest time between two starts of one thread."""

JOIN_S: Final = 2.0
"""Longest wait for one thread to end."""

END_S: Final = 2.5
"""Longest wait for all threads to end: hooks and metrics may still be sent for 2 s."""


class BackgroundThread(Protocol):
    """What starts and ends with an agent."""

    @property
    def name(self) -> str:
        """Its name in log lines."""

    @property
    def is_alive(self) -> bool:
        """False before `start`, after `close`, and when it has died."""

    def start(self) -> None:
        """Begin, also again after it has died."""

    def close(self) -> None:
        """End within seconds, whatever happens."""


class RepeatingThread:
    """A background thread that does a piece of work again and again.

    Args:
        every_s: seconds between the end of one piece and the begin of the next.
        work: the piece; an exception of it ends the thread.
        last: done once at the end, in the thread that closes it.
    """

    def __init__(
        self, name: str, every_s: float, work: Callable[[], object], *, last: Callable[[], object] | None = None
    ) -> None:
        self.name = name
        self._every_s = every_s
        self._work = work
        self._last = last
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(JOIN_S)
        if self._last is not None:
            self._last()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._work()
            self._stop.wait(self._every_s)


class BackgroundThreads:
    """The background threads of one agent; none runs before `start`.

    Args:
        threads: those that `close` ends.
        bus: gets an event for each that has died.
        hooks: those that `close_hooks` ends, after the last event of the agent.
    """

    def __init__(
        self,
        threads: Sequence[BackgroundThread],
        bus: EventBus,
        *,
        hooks: Sequence[BackgroundThread] = (),
        monotonic: Callable[[], float] = since_boot,
    ) -> None:
        self._hooks = hooks
        self._threads = [*hooks, *threads]
        self._bus = bus
        self._monotonic = monotonic
        self._started: dict[str, float] = {}
        self._is_closed = False

    def add(self, threads: Sequence[BackgroundThread]) -> None:
        """Add threads before `start`."""
        self._threads += threads

    @property
    def dead(self) -> tuple[str, ...]:
        """Names of those that have ended before their time."""
        if self._is_closed:
            return ()
        return tuple(one.name for one in self._threads if one.name in self._started and not one.is_alive)

    def start(self) -> None:
        """Start all."""
        for one in self._threads:
            self._start(one)

    def look_after(self) -> None:
        """Start those again that have died."""
        for one in self._threads:
            if not one.is_alive and self._monotonic() - self._started.get(one.name, 0.0) >= RESTART_AFTER_S:
                self._bus.emit(events.ThreadDied(thread=one.name, restarted=self._start_again(one)))

    def close(self, others: Mapping[str, Callable[[], object]] | None = None) -> tuple[str, ...]:
        """End all but the hooks, and `others` by name, at once: several that hang cost no more time than one.

        Returns:
            names of those that have not ended within `END_S`.
        """
        self._is_closed = True
        ends = {one.name: one.close for one in self._threads if one not in self._hooks}
        return _end_all({**ends, **(others or {})})

    def close_hooks(self) -> None:
        """Call the hooks for the events that wait, and end their threads."""
        _end_all({one.name: one.close for one in self._hooks})

    def _start(self, one: BackgroundThread) -> None:
        self._started[one.name] = self._monotonic()
        one.start()

    def _start_again(self, one: BackgroundThread) -> bool:
        """False when it cannot begin, such as at a port that another process has now."""
        try:
            self._start(one)
        except Exception:  # the loop must not die of that too
            return False
        return True


def _end_all(ends: Mapping[str, Callable[[], object]]) -> tuple[str, ...]:
    """Call all at once; the answer names those that have not returned within `END_S`."""
    threads = {name: threading.Thread(target=end, name=f"end of {name}", daemon=True) for name, end in ends.items()}
    for thread in threads.values():
        thread.start()
    until = since_boot() + END_S
    for thread in threads.values():
        thread.join(max(0.0, until - since_boot()))
    return tuple(name for name, thread in threads.items() if thread.is_alive())


@contextmanager
def stopping_signals(stop: Callable[[], object]) -> Iterator[None]:
    """While inside, SIGTERM and SIGINT call `stop`. Does nothing outside the main thread, which gets no signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(_: int, __: FrameType | None) -> None:
        stop()

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
