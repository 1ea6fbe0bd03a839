"""Counts the events of an agent into metrics.

Counts only grow; each reader remembers how far it has read, so readers take nothing from each other. Nothing grows
without a bound: a dimension has at most `MOST_LABELS` values, a distribution keeps values of two digits. The meter is
on the path of each task, so it costs a lock, and an entry of a dict for each number.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from thunderagent.model import events, fleet_events, queue_events
from thunderagent.model.bus import Event, EventBus
from thunderagent.model.clock import since_boot
from thunderagent.telemetry import metrics
from thunderagent.telemetry.metrics import BETWEEN, MOST_LABELS, OTHER, Dimension, Kind, Metric
from thunderagent.telemetry.prices import store_dollars

Series = tuple[Metric, str]
"""A metric with the value of its dimension, or with an empty string."""

LEAST_S: Final = 0.001
"""Shorter times are kept as 0."""
MOST_S: Final = 1e7
"""Longer times are kept as this."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """Counts of values of two digits, and the sum of the values before they were rounded."""

    counts: Mapping[float, int] = field(default_factory=dict)
    total: float = 0.0

    @property
    def number(self) -> int:
        return sum(self.counts.values())

    def less(self, before: Distribution) -> Distribution:
        more = {
            value: number - before.counts.get(value, 0)
            for value, number in self.counts.items()
            if number > before.counts.get(value, 0)
        }
        return Distribution(more, self.total - before.total)


@dataclass(frozen=True, slots=True)
class Reading:
    """The metrics at the monotonic second `at`; `set_at`: when each gauge was set."""

    counters: Mapping[Series, float]
    gauges: Mapping[Series, float]
    distributions: Mapping[Series, Distribution]
    set_at: Mapping[Series, float]
    at: float


_NONE: Final = Distribution()


class Reader:
    """Reads what is new since the last call of `kept`. In one thread at a time."""

    def __init__(self, read: Callable[[], Reading]) -> None:
        self._read = read
        self._counters: dict[Series, float] = {}
        self._set_at: dict[Series, float] = {}
        self._distributions: dict[Series, Distribution] = {}
        self._last = Reading({}, {}, {}, {}, 0.0)

    def take(self) -> Reading:
        """Counts since then, and gauges; those of the fleet only if they were measured since."""
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
        """These series of the last `take` have arrived: they are not read again."""
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
    """A time of two significant digits, so that few values are kept; 0 for what is no time."""
    if not value >= LEAST_S:
        return 0.0
    return float(f"{min(value, MOST_S):.1e}")


Source = Callable[[], Iterable[tuple[Metric, str, float]]]
"""Gives counters since the start, and gauges; called before each reading."""

_TAKEN_OVER_KEPT: Final = 1000

_ENDED: Final = (metrics.TASKS_SUCCEEDED, metrics.TASKS_FAILED, metrics.TASKS_CLOSED, metrics.TASKS_GIVEN_UP)


class Meter:
    """Listens to the events of one agent. Safe in threads.

    Args:
        monotonic: the clock by which gauges are old.
    """

    def __init__(self, bus: EventBus, *, monotonic: Callable[[], float] = since_boot) -> None:
        self._monotonic = monotonic
        self._guard = threading.Lock()
        self._counters: dict[Series, float] = {}
        self._gauges: dict[Series, float] = {}
        self._set_at: dict[Series, float] = {}
        self._counts: dict[Series, dict[float, int]] = {}
        self._totals: dict[Series, float] = {}
        self._labels: dict[tuple[Dimension, ...], set[str]] = {}
        self._taken_over: dict[tuple[str, int], None] = {}
        self._sources: list[Source] = []
        self._cost_seen = (0.0, 0.0)
        bus.subscribe(self.listen)

    def add_source(self, source: Source) -> None:
        """Ask this for counters and gauges before each reading."""
        self._sources.append(source)

    def listen(self, event: Event) -> None:
        note = _NOTES.get(type(event))
        if note is None:
            return
        values = self._ask() if isinstance(event, events.Counted) else ()
        with self._guard:
            self._take_in(values)
            note(self, event)

    def read(self) -> Reading:
        """Everything as it is now, counters and distributions since the start."""
        values = self._ask()
        with self._guard:
            self._take_in(values)
            return Reading(
                dict(self._counters),
                dict(self._gauges),
                {series: Distribution(dict(counts), self._totals[series]) for series, counts in self._counts.items()},
                dict(self._set_at),
                self._monotonic(),
            )

    def _ask(self) -> list[tuple[Metric, str, float]]:
        return [one for source in self._sources for one in source()]

    # The rest is called under the guard.

    def _take_in(self, values: Iterable[tuple[Metric, str, float]]) -> None:
        counters: dict[Series, float] = {}
        for metric, label, value in values:
            if metric.kind is Kind.COUNTER:
                series = self._series(metric, label)
                counters[series] = counters.get(series, 0.0) + value
            else:
                self._set(metric, value, label)
        self._counters.update(counters)

    def _series(self, metric: Metric, label: str) -> Series:
        if metric.dimension is None:
            return metric, ""
        known = self._labels.setdefault(metric.dimensions, set())
        if label not in known:
            if len(known) >= MOST_LABELS:
                return metric, OTHER
            known.add(label)
        return metric, label

    def _count(self, metric: Metric, label: str = "", number: float = 1) -> None:
        series = metric, label
        if series not in self._counters:  # rare
            series = self._series(metric, label)
        self._counters[series] = self._counters.get(series, 0.0) + number

    def _set(self, metric: Metric, value: float, label: str = "") -> None:
        series = self._series(metric, label)
        self._gauges[series], self._set_at[series] = value, self._monotonic()

    def _note(self, metric: Metric, value: float, label: str = "") -> None:
        series = metric, label
        if series not in self._totals:  # rare
            series = self._series(metric, label)
            self._counts.setdefault(series, {})
            self._totals.setdefault(series, 0.0)
        counts, rounded = self._counts[series], two_digits(value)
        counts[rounded] = counts.get(rounded, 0) + 1
        self._totals[series] += max(0.0, value)

    def _started(self, event: events.TaskStarted) -> None:
        if self._taken_over and (event.task_id, event.fence) in self._taken_over:
            del self._taken_over[event.task_id, event.fence]  # it was due for the agent that is lost
            return
        self._note(metrics.CLAIM_LATENCY, event.waited_s, event.queue)

    def _took_over(self, event: events.TaskTakenOver) -> None:
        self._count(metrics.TASKS_TAKEN_OVER, event.queue)
        self._taken_over[event.task_id, event.fence] = None
        if len(self._taken_over) > _TAKEN_OVER_KEPT:  # those of a drain never start
            del self._taken_over[next(iter(self._taken_over))]

    def _polled(self, event: events.Polled) -> None:
        if event.tried:
            self._count(metrics.TASKS_CLAIMED, event.queue, event.won)
            self._count(metrics.CLAIMS_LOST, event.queue, event.tried - event.won)

    def _succeeded(self, event: events.TaskSucceeded) -> None:
        self._count(metrics.TASKS_SUCCEEDED, event.queue)
        self._note(metrics.RUN_TIME, event.seconds, event.job)

    def _failed(self, event: events.TaskFailed) -> None:
        self._count(metrics.TASKS_FAILED, event.queue)
        self._count(metrics.HANDLER_ERRORS, event.job)

    def _retried(self, event: events.TaskRetried) -> None:
        self._count(metrics.TASKS_RETRIED, event.queue)
        self._count(metrics.HANDLER_ERRORS, event.job)

    def _began(self, event: events.AgentStarted) -> None:
        self._set(metrics.HEALTHY, 1.0)
        # Agents without streams have it too: a scaling policy without data keeps all policies from scaling in.
        self._set(metrics.ACTIVE_CONNECTIONS, 0.0)

    def _counted(self, event: events.Counted) -> None:
        self._set(metrics.SLOTS_USED, event.running)
        self._set(metrics.SLOTS, event.slots)
        if event.skew_s is not None:
            self._set(metrics.CLOCK_SKEW, event.skew_s)
        read_units, write_units = self._sum(metrics.READ_UNITS), self._sum(metrics.WRITE_UNITS)
        spent, ended = store_dollars(read_units=read_units, write_units=write_units), self._sum(*_ENDED)
        before, self._cost_seen = self._cost_seen, (spent, ended)
        if spent > before[0] and ended > before[1]:
            self._set(metrics.COST, (spent - before[0]) / (ended - before[1]) * 1000)
        else:
            self._gauges.pop((metrics.COST, ""), None)

    def _connections(self, event: events.ActiveConnections) -> None:
        self._set(metrics.ACTIVE_CONNECTIONS, event.connections)
        self._set(metrics.STREAMS_HELD, event.streams)

    def _measured(self, event: fleet_events.QueueMeasured) -> None:
        self._set(metrics.QUEUE_DEPTH, event.ready, event.queue)
        self._set(metrics.OLDEST_READY_AGE, event.oldest_ready_s, event.queue)

    def _probed(self, event: fleet_events.CanaryProbed) -> None:
        series = f"{event.target}{BETWEEN}{event.observer}"
        self._set(metrics.CANARY_HEALTHY, float(event.healthy), series)
        if event.unjudged is not None:
            self._set(metrics.CANARY_BLIND, 1.0, series)
        else:
            self._gauges.pop((metrics.CANARY_BLIND, series), None)
        if event.days_left is not None:
            self._set(metrics.CANARY_TOKEN_DAYS, event.days_left, series)
        for step, seconds in zip(event.steps, event.seconds, strict=False):
            self._note(metrics.CANARY_LATENCY, seconds, f"{event.target}{BETWEEN}{step}")

    def _sum(self, *wanted: Metric) -> float:
        return sum(value for (metric, _), value in self._counters.items() if metric in wanted)


def _counts(metric: Metric) -> Callable[[Meter, Any], None]:
    return lambda meter, event: meter._count(metric)


def _counts_queue(metric: Metric) -> Callable[[Meter, Any], None]:
    return lambda meter, event: meter._count(metric, event.queue)


def _counts_job(metric: Metric) -> Callable[[Meter, Any], None]:
    return lambda meter, event: meter._count(metric, event.job)


def _late_tick(meter: Meter, event: queue_events.TickPut) -> None:
    meter._count(metrics.TICKS)
    meter._note(metrics.TICK_LATENESS, event.late_s)


_NOTES: Final[dict[type[Event], Callable[[Meter, Any], None]]] = {
    events.AgentStarted: Meter._began,
    events.Counted: Meter._counted,
    events.Polled: Meter._polled,
    events.TaskStarted: Meter._started,
    events.TaskSucceeded: Meter._succeeded,
    events.TaskRetried: Meter._retried,
    events.TaskFailed: Meter._failed,
    events.TaskClosed: _counts_queue(metrics.TASKS_CLOSED),
    events.TaskSnoozed: _counts_queue(metrics.TASKS_SNOOZED),
    events.TaskReleased: _counts_queue(metrics.TASKS_RELEASED),
    events.TaskLimited: _counts_queue(metrics.TASKS_LIMITED),
    events.TaskTakenOver: Meter._took_over,
    events.TaskGivenUp: _counts_queue(metrics.TASKS_GIVEN_UP),
    events.TaskOverran: _counts_job(metrics.HANDLER_OVERRUNS),
    events.LeaseLost: _counts_queue(metrics.LEASES_LOST),
    events.SettleRefused: _counts_queue(metrics.OUTCOMES_REFUSED),
    events.HeartbeatLate: lambda meter, event: meter._note(metrics.HEARTBEAT_LATENESS, event.seconds),
    events.ThreadDied: _counts(metrics.THREADS_DIED),
    events.StoreFailed: _counts(metrics.STORE_FAILURES),
    events.DoorbellFailed: _counts(metrics.DOORBELL_FAILURES),
    events.ActiveConnections: Meter._connections,
    events.StreamConnected: _counts_job(metrics.STREAM_CONNECTS),
    events.StreamDisconnected: _counts_job(metrics.STREAM_DISCONNECTS),
    events.StreamGap: _counts_job(metrics.STREAM_GAPS),
    events.StreamWedged: _counts_job(metrics.STREAMS_WEDGED),
    events.StreamHandedOff: _counts_job(metrics.STREAMS_HANDED_OFF),
    queue_events.TickPut: _late_tick,
    queue_events.TicksSkipped: lambda meter, event: meter._count(metrics.TICKS_SKIPPED, "", event.number),
    fleet_events.HealthChanged: lambda meter, event: meter._set(metrics.HEALTHY, float(event.healthy)),
    fleet_events.AgentRetires: _counts(metrics.AGENTS_RETIRED),
    fleet_events.QueueMeasured: Meter._measured,
    fleet_events.CanaryProbed: Meter._probed,
    fleet_events.BacklogMeasured: lambda meter, event: meter._set(metrics.BACKLOG, event.ready),
}
"""What each event adds; called under the guard."""
