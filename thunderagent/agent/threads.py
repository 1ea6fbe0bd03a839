"""Threads that run beside an agent's loop: each does one thing at its own pace until the agent ends.

The loop looks after them: one that has died of something that nobody expected is told and started again, never more
often than once in `COMPANION_AGAIN_S`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from thunderagent.model import events
from thunderagent.model.bus import EventBus
from thunderagent.model.clock import since_boot
from thunderagent.model.pacing import COMPANION_AGAIN_S, COMPANION_JOIN_S, COMPANIONS_END_S


class Companion(Protocol):
    """What starts and ends with an agent."""

    @property
    def name(self) -> str:
        """What it is called in log lines."""

    @property
    def is_alive(self) -> bool:
        """False before `start`, after `close`, and when it has died."""

    def start(self) -> None:
        """Begin; or begin again after it has died."""

    def close(self) -> None:
        """End, within seconds whatever happens."""


class Repeated:
    """A companion that does a piece of work again and again, `every_s` seconds apart.

    Args:
        name: of the thread.
        every_s: seconds between the end of one piece and the begin of the next.
        work: the piece; an exception of it ends the thread, which is told and started again.
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
            self._thread.join(COMPANION_JOIN_S)
        if self._last is not None:
            self._last()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._work()
            self._stop.wait(self._every_s)


class Companions:
    """The companions of one agent."""

    def __init__(
        self,
        companions: Sequence[Companion],
        bus: EventBus,
        *,
        hooks: Sequence[Companion] = (),
        monotonic: Callable[[], float] = since_boot,
    ) -> None:
        """Make them; none runs before `start`.

        Args:
            companions: those that `close` ends.
            bus: told of those that have died.
            hooks: those that `close_hooks` ends, behind the last event of the agent.
            monotonic: the clock.
        """
        self._hooks = hooks
        self._companions = [*hooks, *companions]
        self._bus = bus
        self._monotonic = monotonic
        self._started: dict[str, float] = {}
        self._is_closed = False

    @property
    def dead(self) -> tuple[str, ...]:
        """Names of those that have ended before their time."""
        return (
            ()
            if self._is_closed
            else tuple(one.name for one in self._companions if one.name in self._started and not one.is_alive)
        )

    def start(self) -> None:
        """Start all."""
        for one in self._companions:
            self._start(one)

    def look_after(self) -> None:
        """Start those again that have died."""
        for one in self._companions:
            if not one.is_alive and self._monotonic() - self._started.get(one.name, 0.0) >= COMPANION_AGAIN_S:
                self._bus.emit(events.ThreadDied(thread=one.name, restarted=self._start_again(one)))

    def close(self, others: Mapping[str, Callable[[], object]] | None = None) -> tuple[str, ...]:
        """End all but the hooks, and `others` by name, at once: several that hang cost no more time than one.

        Returns:
            names of those that have not ended within `COMPANIONS_END_S`.
        """
        self._is_closed = True
        ends = {one.name: one.close for one in self._companions if one not in self._hooks}
        return _end_all({**ends, **(others or {})})

    def close_hooks(self) -> None:
        """Tell the hooks what waits for them, and end them."""
        _end_all({one.name: one.close for one in self._hooks})

    def _start(self, one: Companion) -> None:
        self._started[one.name] = self._monotonic()
        one.start()

    def _start_again(self, one: Companion) -> bool:
        """False when it cannot begin, such as at a port that another has now: the loop must not die of that too."""
        try:
            self._start(one)
        except Exception:
            return False
        return True


def _end_all(ends: Mapping[str, Callable[[], object]]) -> tuple[str, ...]:
    """Call all at once; the answer names those that have not come back within `COMPANIONS_END_S`."""
    threads = {name: threading.Thread(target=end, name=f"end of {name}", daemon=True) for name, end in ends.items()}
    for thread in threads.values():
        thread.start()
    until = since_boot() + COMPANIONS_END_S
    for thread in threads.values():
        thread.join(max(0.0, until - since_boot()))
    return tuple(name for name, thread in threads.items() if thread.is_alive())
