"""What a meter says at one moment, and what of it is new to a reader.

Counts only grow, and each reader remembers for itself how far it has read, so that readers do not take from each other
and what could not be sent is in the next reading.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from thunderagent.telemetry.metrics import Metric

Series = tuple[Metric, str]
"""A metric with the value of its dimension; the empty string when it has none."""

LEAST_S: Final = 0.001
"""Shorter times are kept as 0."""
MOST_S: Final = 1e7
"""Longer times are kept as this."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """How often each value was seen, rounded to two digits, and the sum of the values before that."""

    counts: Mapping[float, int] = field(default_factory=dict)
    total: float = 0.0

    @property
    def number(self) -> int:
        """How many values there are."""
        return sum(self.counts.values())

    def less(self, before: Distribution) -> Distribution:
        """What has come since."""
        more = {
            value: number - before.counts.get(value, 0)
            for value, number in self.counts.items()
            if number > before.counts.get(value, 0)
        }
        return Distribution(more, self.total - before.total)


@dataclass(frozen=True, slots=True)
class Reading:
    """The metrics at one moment, which is `at` on the monotonic clock; `set_at`: when each gauge was set."""

    counters: Mapping[Series, float]
    gauges: Mapping[Series, float]
    distributions: Mapping[Series, Distribution]
    set_at: Mapping[Series, float]
    at: float


_NONE: Final = Distribution()


class Reader:
    """Reads what is new since it last said `kept`. In one thread at a time.

    Args:
        read: everything as it is now.
    """

    def __init__(self, read: Callable[[], Reading]) -> None:
        self._read = read
        self._counters: dict[Series, float] = {}
        self._set_at: dict[Series, float] = {}
        self._distributions: dict[Series, Distribution] = {}
        self._last = Reading({}, {}, {}, {}, 0.0)

    def take(self) -> Reading:
        """What has been counted since; gauges as they are, those of the fleet only if they were measured since."""
        self._last = now = self._read()
        return Reading(
            {
                series: value - self._counters.get(series, 0.0)
                for series, value in now.counters.items()
                if value > self._counters.get(series, 0.0)
            },
            {
                series: value
                for series, value in now.gauges.items()
                if not series[0].must_be_fresh or now.set_at[series] > self._set_at.get(series, -math.inf)
            },
            {
                series: distribution.less(self._distributions.get(series, _NONE))
                for series, distribution in now.distributions.items()
                if distribution.number > self._distributions.get(series, _NONE).number
            },
            now.set_at,
            now.at,
        )

    def kept(self, arrived: Iterable[Series]) -> None:
        """Of what was taken last these have arrived: they are not read again."""
        for series in arrived:
            for seen, last in (
                (self._counters, self._last.counters),
                (self._set_at, self._last.set_at),
            ):
                if series in last:
                    seen[series] = last[series]
            if series in self._last.distributions:
                self._distributions[series] = self._last.distributions[series]


def two_digits(value: float) -> float:
    """A time of two significant digits, so that few different ones are kept; what is none is 0."""
    if not value >= LEAST_S:
        return 0.0
    return float(f"{min(value, MOST_S):.1e}")
