"""What a measured process counts, for streams; the same for agents and for the naive loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final

from benchmarks.tally import peak_kib, rss_kib

TIMER_S: Final = 0.05
MODES: Final = ("raw", "json", "checkpoint")


class Probe:
    """Counts of this process. Everything but `state` happens in the event loop."""

    def __init__(self) -> None:
        self.handled = 0
        self.mode = "raw"
        """What is done with a message: nothing, decode it, or save its place too."""
        self.first: dict[str, float] = {}
        """Monotonic second of the first message of each stream."""
        self.ticks = 0
        self.latest_s = 0.0
        """Largest lateness of the timer."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wanted: asyncio.Event | None = None

    def take(self, stream: str) -> None:
        """A message was handled, the first one of a run."""
        self.first.setdefault(stream, time.monotonic())

    async def tick(self) -> None:
        """A timer in the event loop, once it is asked for: how late it is tells how long the loop stood still."""
        loop = self._loop = asyncio.get_running_loop()
        self._wanted = asyncio.Event()
        await self._wanted.wait()
        while True:
            due = loop.time() + TIMER_S
            await asyncio.sleep(TIMER_S)
            self.latest_s = max(self.latest_s, loop.time() - due)
            self.ticks += 1

    def state(self) -> dict[str, Any]:
        """Everything so far."""
        return {
            "handled": self.handled,
            "streams": len(self.first),
            "has_timer": self._wanted is not None,
            "ticks": self.ticks,
            "latest_s": self.latest_s,
            "cpu_s": time.process_time(),
            "now": time.monotonic(),
            "rss_kib": rss_kib(),
            "peak_kib": peak_kib(),
        }

    def answer(self, do: str, more: Callable[[], dict[str, Any]], **arguments: Any) -> dict[str, Any]:
        """Answer a request of whoever measures."""
        match do:
            case "state":
                return self.state() | more()
            case "mark":
                self.latest_s = 0.0
                return {}
            case "watch":
                if self._loop is None or self._wanted is None:
                    raise RuntimeError("there is no timer")
                self._loop.call_soon_threadsafe(self._wanted.set)
                return {}
            case "first":
                return {"first": dict(self.first)}
            case "mode":
                self.mode = arguments["mode"]
                return {}
        raise ValueError(f"nobody here can {do}")


PROBE: Final = Probe()
