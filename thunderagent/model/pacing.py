"""Backoff and the pace of polls."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from thunderagent.model.arguments import check, seconds_problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Delay before a retry: full jitter, uniform between 0 and `base_s * 2 ** retries`, at most `cap_s`.

    With base 2 and cap 300 the upper ends are 2, 4, 8, 16, 32, 64, 128, 256, 300, 300 … seconds. Full jitter spreads
    tasks that failed together (https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/).
    """

    base_s: float = 2.0
    cap_s: float = 300.0

    def __post_init__(self) -> None:
        check(seconds_problem("base_s", self.base_s), seconds_problem("cap_s", self.cap_s))

    def delay(self, retries: int, rng: random.Random) -> float:
        """Seconds to wait after the retry number `retries`, counted from 0."""
        ceiling = min(self.cap_s, self.base_s * 2.0 ** min(retries, 62))
        return rng.uniform(0.0, ceiling)


@dataclass(slots=True)
class PollPace:
    """Waits of a queue between two polls.

    Work and room: none. A part of a page: `min_s`. Nothing: grows by half each time to `max_s`, and after
    `off_peak_after_s` of nothing to `idle_s`; to `stretched_s`, if longer, while a doorbell works. Every wait is
    jittered by a quarter so that agents do not march in step.
    """

    min_s: float
    max_s: float
    idle_s: float
    off_peak_after_s: float = 300.0
    stretched_s: float = 0.0
    _last_s: float = 0.0
    _empty_s: float = 0.0

    def after(self, found: int, *, more: bool, rng: random.Random) -> float:
        """Seconds to wait after a poll that claimed `found` tasks; `more`: it saw work it had room for."""
        if found:
            self._empty_s = 0.0
            self._last_s = self.min_s
            return 0.0 if more else jittered(self.min_s, rng)
        longest_s = max(self.max_s, self.stretched_s)
        self._last_s = min(longest_s, self._last_s * 1.5) if self._last_s else self.min_s
        if self._empty_s >= self.off_peak_after_s:
            self._last_s = max(self.idle_s, self.stretched_s)
        self._empty_s += self._last_s
        return jittered(self._last_s, rng)


def jittered(seconds: float, rng: random.Random) -> float:
    """The seconds less up to a quarter of them."""
    return seconds * (1.0 - 0.25 * rng.random())


def first_poll(rng: random.Random, min_s: float) -> float:
    """Random delay of an agent's first poll, which spreads a fleet that starts together: 1 to 3 s, less for a short
    `min_s`."""
    return rng.uniform(1.0, 3.0) * min(1.0, min_s)


def outage_delays(rng: random.Random, cap_s: float = 30.0) -> Iterator[float]:
    """Waits between attempts to reach a store that does not answer: 0.5 s doubling to `cap_s`, jittered."""
    seconds = 0.5
    while True:
        yield jittered(seconds, rng)
        seconds = min(cap_s, seconds * 2)


def wait_delays() -> Iterator[float]:
    """Waits between looks of a caller at what it waits for: 50 ms growing by half to 2 s."""
    seconds = 0.05
    while True:
        yield seconds
        seconds = min(2.0, seconds * 1.5)
