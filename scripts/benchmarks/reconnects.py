"""A fleet of WebSocket clients that lose their region at one moment, and an API that takes 500 connects in a second.

Pure: no clock, no network, the same figures for the same seed. The delays are those of the client itself.
`scripts/bench reconnects` prints the comparison.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from thunderagent.streams.connection.governor import Governor
from thunderagent.streams.connection.pump import SPREAD_S, reconnect_delay
from thunderagent.websocket_api.client.options import CONNECTS_A_SECOND, ClientOptions

CLIENTS: Final = 30_000
NAIVE_CAP_S: Final = 5.0
"""Longest delay of the client that knows nothing of its fleet; many libraries have as little."""

Delay = Callable[[int], float]
"""Seconds before the next attempt, by the number of failures so far; 0 right after the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a fleet came back."""

    clients: int
    seconds: float
    """Until the last one was back."""
    half_s: float
    """Until half of them were."""
    attempts: int
    refused: int
    busiest: int
    """Attempts in the busiest second."""

    def __str__(self) -> str:
        return (
            f"{self.clients} clients back after {self.seconds:.1f} s (half of them after {self.half_s:.1f} s): "
            f"{self.attempts} attempts, {self.refused} refused, {self.busiest} in the busiest second"
        )


class Bucket:
    """Connects that an API takes: so many in a second, and as many at once after a quiet one."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._tokens = rate
        self._at = 0.0

    def take(self, now: float) -> bool:
        """Whether a connect at this moment is taken."""
        self._tokens = min(self._rate, self._tokens + (now - self._at) * self._rate)
        self._at = now
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True


def resilient(fleet: int, rng: random.Random, *, sees_why: bool = True) -> Delay:
    """The delays of `websocket_api.client` with `fleet` set, before the first attempt and after each refusal.

    Args:
        fleet: what it is told.
        rng: its chance.
        sees_why: it sees the 429 of a refused handshake; browsers do not show it.
    """
    options = ClientOptions(fleet=fleet)
    governor = Governor(spread_s=1.0 / CONNECTS_A_SECOND, fleet=lambda: fleet, rng=rng)

    def delay(failures: int) -> float:
        if failures and sees_why:
            return rng.uniform(*SPREAD_S)
        first = 0.0 if failures else governor.first_retry()
        return first + reconnect_delay(failures, options.backoff_base_s, options.backoff_cap_s, rng)

    return delay


def naive(rng: random.Random) -> Delay:
    """Full jitter under a small fixed cap, and no word of the fleet."""
    return lambda failures: reconnect_delay(failures, 0.5, NAIVE_CAP_S, rng)


def reconnect(clients: int, delay: Delay, rate: float = CONNECTS_A_SECOND) -> Outcome:
    """All lose their connections at 0; how they come back."""
    bucket = Bucket(rate)
    waiting = [(delay(0), number, 0) for number in range(clients)]
    heapq.heapify(waiting)
    attempts, seconds, back = Counter[int](), 0.0, list[float]()
    while waiting:
        seconds, number, failures = heapq.heappop(waiting)
        attempts[int(seconds)] += 1
        if bucket.take(seconds):
            back.append(seconds)
        else:
            heapq.heappush(waiting, (seconds + delay(failures + 1), number, failures + 1))
    total = attempts.total()
    return Outcome(
        clients=clients,
        seconds=seconds,
        half_s=back[clients // 2],
        attempts=total,
        refused=total - clients,
        busiest=max(attempts.values()),
    )


def comparison(clients: int = CLIENTS, seed: int = 1) -> dict[str, Outcome]:
    """The kinds of clients in the same place."""
    return {
        "thunderagent": reconnect(clients, resilient(clients, random.Random(seed))),
        "told of a third": reconnect(clients, resilient(max(1, clients // 3), random.Random(seed))),
        "naive": reconnect(clients, naive(random.Random(seed))),
    }
