"""A fleet of WebSocket clients that lose their region at one moment, and an API that takes 500 connects in a second.

Pure: no clock, no network, the same figures for the same seed. The delays are those of the client itself.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from typing import Final

from benchmarks.harness import Plan, Section, section
from thunderagent.streams.connection.governor import Governor
from thunderagent.streams.connection.pump import SPREAD_S, reconnect_delay
from thunderagent.websocket_api.client.options import CONNECTS_A_SECOND, ClientOptions

CLIENTS: Final = 30_000
NAIVE_CAP_S: Final = 5.0
"""Longest delay of the client that knows nothing of its fleet; many libraries have as little."""

Delay = Callable[[int], float]
"""Seconds before the next attempt, by the number of failures so far; 0 right after the loss."""


def resilient(fleet: int, rng: random.Random, *, sees_why: bool = True) -> Delay:
    """The delays of our client with `fleet` set, before the first attempt and after each refusal.

    With `sees_why` it sees the 429 of a refused handshake; browsers do not show it.
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


def reconnect(clients: int, delay: Delay, rate: float = CONNECTS_A_SECOND) -> dict[str, float]:
    """All lose their connections at 0; how they come back.

    The API takes `rate` connects in a second, and as many at once after a quiet one.
    """
    tokens, seconds, back = rate, 0.0, list[float]()
    attempts = Counter[int]()
    waiting = [(delay(0), number, 0) for number in range(clients)]
    heapq.heapify(waiting)
    while waiting:
        before = seconds
        seconds, number, failures = heapq.heappop(waiting)
        attempts[int(seconds)] += 1
        tokens = min(rate, tokens + (seconds - before) * rate)
        if tokens >= 1.0:
            tokens -= 1.0
            back.append(seconds)
        else:
            heapq.heappush(waiting, (seconds + delay(failures + 1), number, failures + 1))
    return {
        "all back, s": seconds,
        "half of them back, s": back[clients // 2],
        "attempts": attempts.total(),
        "refused": attempts.total() - clients,
        "attempts in the busiest second": max(attempts.values()),
    }


def comparison(clients: int = CLIENTS, seed: int = 1) -> dict[str, dict[str, float]]:
    """The kinds of clients in the same place."""
    return {
        "thunderagent": reconnect(clients, resilient(clients, random.Random(seed))),
        "a third": reconnect(clients, resilient(max(1, clients // 3), random.Random(seed))),
        "naive": reconnect(clients, naive(random.Random(seed))),
    }


def measure_reconnects(plan: Plan) -> list[Section]:
    """The kinds of clients beside each other, for each number of them."""
    sections = []
    for clients in plan.clients:
        ours, wrong, theirs = comparison(clients).values()
        title = f"{clients:,} clients lose their region at one moment"
        sections += [section(title, ours, theirs), section(f"{title}, and know of a third of them", wrong)]
    return sections
