"""When somebody should be woken: thresholds of metrics, as data, for the dashboard and the documentation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from thunderagent.telemetry import metrics
from thunderagent.telemetry.metrics import Metric


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """A threshold that is crossed for some minutes in a row. Missing data is fine unless `missing_is_bad`."""

    metric: Metric
    statistic: str
    """As CloudWatch calls it: Sum, Maximum, Minimum, p99."""
    above: float | None = None
    below: float | None = None
    minutes: int
    why: str
    """What it means, and where to look first."""
    missing_is_bad: bool = False

    @property
    def threshold(self) -> float:
        """The number that is crossed."""
        return self.above if self.above is not None else (self.below or 0.0)

    @property
    def text(self) -> str:
        """In words: `Maximum > 300 for 5 min`."""
        sign, number = (">", self.above) if self.above is not None else ("<", self.below)
        missing = ", or no data" if self.missing_is_bad else ""
        return f"{self.statistic} {sign} {number:g} for {self.minutes} min{missing}"


ALARMS: Final[tuple[Alarm, ...]] = (
    Alarm(
        metric=metrics.OLDEST_READY_AGE,
        statistic="Maximum",
        above=300.0,
        minutes=5,
        why="Nobody takes the tasks of a queue, or it needs more slots: `thunderagent stats`, `agents` and `pauses`.",
    ),
    Alarm(
        metric=metrics.HEALTHY,
        statistic="Minimum",
        below=1.0,
        minutes=5,
        missing_is_bad=True,
        why="An agent is not healthy, or none is left: `thunderagent agents`, and the log line `health has changed`.",
    ),
    Alarm(
        metric=metrics.CANARY_HEALTHY,
        statistic="Average",
        below=0.51,
        minutes=2,
        missing_is_bad=True,
        why="With a canary: users cannot use the API of a region, or nobody looks: `thunderagent canary`.",
    ),
    Alarm(
        metric=metrics.CANARY_BLIND,
        statistic="Maximum",
        above=0.0,
        minutes=5,
        why="The canary cannot judge, so nothing moves: users use up the throttle, or it has no token that counts.",
    ),
    Alarm(
        metric=metrics.CANARY_TOKEN_DAYS,
        statistic="Minimum",
        below=7.0,
        minutes=5,
        why="The canary's token is over soon: replace it where `THUNDERAGENT_CANARY_TOKEN_FROM` has it from.",
    ),
    Alarm(
        metric=metrics.TASKS_GIVEN_UP,
        statistic="Sum",
        above=0.0,
        minutes=1,
        why="A task took several agents with it: its job kills the process, mostly by its memory.",
    ),
    Alarm(
        metric=metrics.TASKS_FAILED,
        statistic="Sum",
        above=0.0,
        minutes=1,
        why="Tasks are FAILED and stay so: `thunderagent list --status FAILED`, repair, `thunderagent retry`.",
    ),
    Alarm(
        metric=metrics.LEASES_LOST,
        statistic="Sum",
        above=5.0,
        minutes=5,
        why="Agents lose their leases: the network, a machine without CPU, or a handler that blocks the process.",
    ),
    Alarm(
        metric=metrics.TASKS_TAKEN_OVER,
        statistic="Sum",
        above=10.0,
        minutes=5,
        why="Agents are lost: killed by memory, or stopped without their drain.",
    ),
    Alarm(
        metric=metrics.CLOCK_SKEW,
        statistic="Maximum",
        above=5.0,
        minutes=15,
        why="A host's clock is ahead. Leases are not affected; signatures of AWS fail from 5 minutes on.",
    ),
    Alarm(
        metric=metrics.CLOCK_SKEW,
        statistic="Minimum",
        below=-5.0,
        minutes=15,
        why="A host's clock is behind; as above.",
    ),
    Alarm(
        metric=metrics.STORE_FAILURES,
        statistic="Sum",
        above=10.0,
        minutes=5,
        why="The store does not answer, or refuses: the log line `store does not answer` has the reason.",
    ),
    Alarm(
        metric=metrics.THROTTLES,
        statistic="Sum",
        above=100.0,
        minutes=5,
        why="DynamoDB asks for less: with a reason of the index use more shards, of the account ask for more quota.",
    ),
    Alarm(
        metric=metrics.THREADS_DIED,
        statistic="Sum",
        above=0.0,
        minutes=1,
        why="A thread of an agent ended by an error; it was started again, or the agent ended: see its log.",
    ),
    Alarm(
        metric=metrics.STREAMS_WEDGED,
        statistic="Sum",
        above=0.0,
        minutes=1,
        why="A stream makes no progress and goes to another agent: `thunderagent streams explain ID`.",
    ),
)
"""Where to begin; the numbers for queue age and throttles depend on what is promised to whom."""
