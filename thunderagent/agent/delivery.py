"""Tells the events of an agent to the hooks that asked for them, in a thread of its own behind a bounded queue.

The engine only puts an event into the queue: a hook that is slow or hangs holds up other hooks, never a task.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Final

from thunderagent.jobs.hooks import EventHook
from thunderagent.jobs.outcome import raised
from thunderagent.model.bus import EventBus
from thunderagent.model.clock import since_boot
from thunderagent.model.events import Event
from thunderagent.model.fleet_events import HookFailed
from thunderagent.model.pacing import HOOK_TOLD_S, HOOKS_END_S

MOST_WAITING: Final = 10_000
"""Events that may wait for hooks; further ones are dropped and counted."""


class Complaints:
    """Tells of failing hooks: at once, and of one that goes on failing once a minute, with how often it did.

    Args:
        bus: gets `HookFailed`.
        monotonic: the clock.
    """

    def __init__(self, bus: EventBus, *, monotonic: Callable[[], float] = since_boot) -> None:
        self._bus = bus
        self._monotonic = monotonic
        self._guard = threading.Lock()
        self._told: dict[str, float] = {}
        self._more: dict[str, tuple[int, str]] = {}

    def tell(self, hook: str, error: str) -> None:
        """A hook failed."""
        with self._guard:
            if self._monotonic() - self._told.get(hook, -HOOK_TOLD_S) < HOOK_TOLD_S:
                number, _ = self._more.get(hook, (0, ""))
                self._more[hook] = (number + 1, error)
                return
            number, _ = self._more.pop(hook, (0, ""))
            self._told[hook] = self._monotonic()
        self._emit(hook, error, number)

    def look(self, *, at_the_end: bool = False) -> None:
        """Tell what was not told at once and is a minute old, or all at the end."""
        if not self._more:
            return
        with self._guard:
            now = self._monotonic()
            due = [hook for hook in self._more if at_the_end or now - self._told[hook] >= HOOK_TOLD_S]
            rest = [(hook, *self._more.pop(hook)) for hook in due]
            self._told.update(dict.fromkeys(due, now))
        for hook, number, error in rest:
            self._emit(hook, error, number - 1)

    def _emit(self, hook: str, error: str, more: int) -> None:
        self._bus.emit(HookFailed(hook=hook, error=f"{error} (and {more} times before)" if more else error))


class Delivery:
    """A thread of the agent: takes its events and calls the hooks.

    Args:
        hooks: who is told what.
        bus: where the events come from.
        complaints: told of hooks that fail.
        most: events that may wait.
        last: done at the end beside the hooks, so that the end is not longer for it; bounded by itself.
    """

    name = "hooks"

    def __init__(
        self,
        hooks: Sequence[EventHook],
        bus: EventBus,
        complaints: Complaints,
        *,
        most: int = MOST_WAITING,
        last: Callable[[], object] = lambda: None,
    ) -> None:
        self._hooks = hooks
        self._bus = bus
        self._complaints = complaints
        self._most = most
        self._last = last
        self._inbox: SimpleQueue[Event | None] = SimpleQueue()
        self._wanted: dict[type[Event], bool] = {}
        self._thread: threading.Thread | None = None
        self._unsubscribe: Callable[[], None] | None = None
        self._busy_with: str | None = None

    @property
    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        self._thread = threading.Thread(target=self._serve, name=self.name, daemon=True)
        self._thread.start()
        self._unsubscribe = self._unsubscribe or self._bus.subscribe(self._listen)

    def close(self) -> None:
        """Work off what waits, for at most `HOOKS_END_S`; a hook that hangs is left behind."""
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None
        last = threading.Thread(target=self._last, name="last-spans", daemon=True)
        last.start()
        if self._thread is not None:
            self._inbox.put(None)
            self._thread.join(HOOKS_END_S)
            left = max(0, self._inbox.qsize() - 1)  # without the None
            if left or self._thread.is_alive():
                self._complaints.tell(self._busy_with or self.name, f"the agent ended before it had {left} events more")
        self._complaints.look(at_the_end=True)
        last.join(HOOKS_END_S)

    def _listen(self, event: Event) -> None:
        kind = type(event)
        wanted = self._wanted.get(kind)
        if wanted is None:
            wanted = self._wanted[kind] = any(issubclass(kind, hook.kinds) for hook in self._hooks)
        if not wanted or not any(hook.wants(event) for hook in self._hooks):
            return
        if self._inbox.qsize() >= self._most:
            self._complaints.tell(
                self._busy_with or self.name, f"it does not keep up: an event was dropped, as {self._most} wait"
            )
            return
        self._inbox.put(event)

    def _serve(self) -> None:
        while True:
            try:
                event = self._inbox.get(timeout=HOOK_TOLD_S)
            except Empty:
                self._complaints.look()
                continue
            if event is None:
                return
            for hook in self._hooks:
                if hook.wants(event):
                    self._call(hook, event)
            self._complaints.look()

    def _call(self, hook: EventHook, event: Event) -> None:
        self._busy_with = hook.name
        try:
            hook.function(event)
        except BaseException as error:  # SystemExit too: the other hooks are told all the same
            self._complaints.tell(hook.name, raised(error).error)
        self._busy_with = None
