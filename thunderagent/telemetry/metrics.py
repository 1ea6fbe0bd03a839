"""The list of all metrics: names, units, dimensions.

CloudWatch, Prometheus, the dashboard, the page `docs/reference/metrics.md` and `thunderagent metrics` are made from it.
`meter.py` fills it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    DISTRIBUTION = "distribution"


class Unit(StrEnum):
    """Base units by their names in CloudWatch, which has neither dollars nor units of capacity."""

    COUNT = "Count"
    SECONDS = "Seconds"
    NONE = "None"


class Dimension(StrEnum):
    """What tells the values of one metric apart; never a task or an agent."""

    QUEUE = "Queue"
    JOB = "Job"
    PURPOSE = "Purpose"
    REASON = "Reason"
    TARGET = "Target"
    OBSERVER = "Observer"
    STEP = "Step"


MOST_LABELS: Final = 50
"""Values of a dimension that an agent tells apart; all further ones are `OTHER`."""
OTHER: Final = "other"
BETWEEN: Final = "/"
"""Separates the values of two dimensions in the label of a series; no value contains it."""


class Group(StrEnum):
    """Sections of the dashboard and of the documentation."""

    WORK = "Work"
    QUEUES = "Queues"
    LEASES = "Leases and health"
    STORE = "Store and cost"
    STREAMS = "Streams"
    CANARY = "Canary"


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Metric:
    """One metric. Compared by identity, as it is a key of every count."""

    name: str
    """Words with spaces, without the unit; all other names are made from it."""
    kind: Kind
    unit: Unit
    group: Group
    help: str
    dimension: Dimension | None = None
    second: Dimension | None = None
    of_fleet: bool = False
    """One agent at a time measures it for all: of several values the largest counts, not the sum."""
    fades: bool = False
    """Sent only when it was measured since: an old value would hide that no agent measures any more."""

    @property
    def must_be_fresh(self) -> bool:
        """Whether no value is sent twice."""
        return self.of_fleet or self.fades

    @property
    def dimensions(self) -> tuple[Dimension, ...]:
        return tuple(one for one in (self.dimension, self.second) if one is not None)

    def values(self, label: str) -> tuple[str, ...]:
        """The value of each dimension in the label of a series."""
        parts = label.split(BETWEEN, len(self.dimensions) - 1) if self.second else [label] * len(self.dimensions)
        return (*parts, *[OTHER] * (len(self.dimensions) - len(parts)))

    @property
    def cloudwatch(self) -> str:
        """Its name in CloudWatch: `TasksSucceeded`."""
        return "".join(word[0].upper() + word[1:] for word in re.split(r"[ -]", self.name))

    @property
    def prometheus(self) -> str:
        """Its name for Prometheus: `thunderagent_tasks_succeeded_total`, `thunderagent_claim_latency_seconds`."""
        words = re.sub(r"[ -]", "_", self.name)
        unit = "_seconds" if self.unit is Unit.SECONDS else ""
        return f"thunderagent_{words}{unit}" + ("_total" if self.kind is Kind.COUNTER else "")


def _counter(name: str, group: Group, help_: str, dimension: Dimension | None = None) -> Metric:
    return Metric(name=name, kind=Kind.COUNTER, unit=Unit.COUNT, group=group, help=help_, dimension=dimension)


def _seconds(name: str, group: Group, help_: str, dimension: Dimension | None = None) -> Metric:
    return Metric(name=name, kind=Kind.DISTRIBUTION, unit=Unit.SECONDS, group=group, help=help_, dimension=dimension)


_QUEUE, _JOB = Dimension.QUEUE, Dimension.JOB

TASKS_CLAIMED: Final = _counter("tasks claimed", Group.WORK, "Claims won.", _QUEUE)
TASKS_SUCCEEDED: Final = _counter("tasks succeeded", Group.WORK, "Tasks that are SUCCESS.", _QUEUE)
TASKS_FAILED: Final = _counter(
    "tasks failed", Group.WORK, "Tasks that are FAILED, as retries are used up or the error was fatal.", _QUEUE
)
TASKS_CLOSED: Final = _counter(
    "tasks closed", Group.WORK, "Tasks that are DONE, closed on purpose: cancelled, stopped.", _QUEUE
)
TASKS_RETRIED: Final = _counter("tasks retried", Group.WORK, "Handlers that failed and run again later.", _QUEUE)
TASKS_SNOOZED: Final = _counter("tasks snoozed", Group.WORK, "Handlers that asked for later.", _QUEUE)
TASKS_RELEASED: Final = _counter(
    "tasks released", Group.WORK, "Tasks that went back to their queue as their agent stopped.", _QUEUE
)
TASKS_LIMITED: Final = _counter(
    "tasks limited", Group.WORK, "Claimed tasks that went to a waitlist, as no permit of their limit was free.", _QUEUE
)
HANDLER_ERRORS: Final = _counter("handler errors", Group.WORK, "Runs that ended with an error.", _JOB)
HANDLER_OVERRUNS: Final = _counter(
    "handler overruns", Group.WORK, "Handlers that went on although they were told to stop.", _JOB
)
RUN_TIME: Final = _seconds("run time", Group.WORK, "How long runs took that succeeded.", _JOB)
SLOTS_USED: Final = Metric(
    name="slots used", kind=Kind.GAUGE, unit=Unit.COUNT, group=Group.WORK, help="Tasks that the agent holds."
)
SLOTS: Final = Metric(
    name="slots", kind=Kind.GAUGE, unit=Unit.COUNT, group=Group.WORK, help="Tasks that the agent can hold at once."
)
TICKS: Final = _counter("ticks", Group.WORK, "Tasks that were put for ticks of periodic jobs.")
TICK_LATENESS: Final = _seconds("tick lateness", Group.WORK, "From a tick to the moment its task was put.")
TICKS_SKIPPED: Final = _counter("ticks skipped", Group.WORK, "Ticks of periodic jobs that were left out.")

QUEUE_DEPTH: Final = Metric(
    name="queue depth",
    kind=Kind.GAUGE,
    unit=Unit.COUNT,
    group=Group.QUEUES,
    dimension=_QUEUE,
    of_fleet=True,
    help="Tasks that are ready: due, and not claimed. Counted once a minute for the whole fleet, up to 10,000.",
)
BACKLOG: Final = Metric(
    name="backlog",
    kind=Kind.GAUGE,
    unit=Unit.COUNT,
    group=Group.QUEUES,
    of_fleet=True,
    help="Ready tasks of all queues together; divided by the number of agents it says whether more are needed.",
)
OLDEST_READY_AGE: Final = Metric(
    name="oldest ready age",
    kind=Kind.GAUGE,
    unit=Unit.SECONDS,
    group=Group.QUEUES,
    dimension=_QUEUE,
    of_fleet=True,
    help="For how long the oldest ready task has been due; 0 when none is ready.",
)
CLAIM_LATENCY: Final = _seconds(
    "claim latency", Group.QUEUES, "From the moment a task was due to the start of its handler.", _QUEUE
)
CLAIMS_LOST: Final = _counter(
    "claims lost", Group.QUEUES, "Claims that another agent won, or that came to nothing otherwise.", _QUEUE
)

LEASES_LOST: Final = _counter(
    "leases lost", Group.LEASES, "Leases that another agent took, or that could not be renewed in time.", _QUEUE
)
TASKS_TAKEN_OVER: Final = _counter("tasks taken over", Group.LEASES, "Tasks of lost agents that were taken.", _QUEUE)
TASKS_GIVEN_UP: Final = _counter(
    "tasks given up", Group.LEASES, "Tasks that are FAILED as they lost too many agents.", _QUEUE
)
OUTCOMES_REFUSED: Final = _counter(
    "outcomes refused", Group.LEASES, "Outcomes that came late: the task was another agent's by then.", _QUEUE
)
HEARTBEAT_LATENESS: Final = _seconds(
    "heartbeat lateness", Group.LEASES, "How late a round of heartbeats was; rounds in time are not in it."
)
CLOCK_SKEW: Final = Metric(
    name="clock skew",
    kind=Kind.GAUGE,
    unit=Unit.SECONDS,
    group=Group.LEASES,
    help="The host's clock less that of DynamoDB. Nothing depends on it.",
)
HEALTHY: Final = Metric(
    name="healthy",
    kind=Kind.GAUGE,
    unit=Unit.NONE,
    group=Group.LEASES,
    help="1 while the agent is healthy, 0 while it is not. Its number of samples is that of the agents.",
)
THREADS_DIED: Final = _counter("threads died", Group.LEASES, "Threads of the agent that ended by an error.")
AGENTS_RETIRED: Final = _counter("agents retired", Group.LEASES, "Agents that drained by themselves.")
LINES_DROPPED: Final = _counter(
    "lines dropped", Group.LEASES, "Log lines and other output of the agent that nobody took in time."
)

STORE_FAILURES: Final = _counter("store failures", Group.STORE, "Calls to the store that failed.")
STORE_REQUESTS: Final = _counter("store requests", Group.STORE, "Requests to DynamoDB.")
THROTTLES: Final = _counter(
    "throttles",
    Group.STORE,
    "Replies of DynamoDB that asked for less, those included that the AWS SDK repeated by itself.",
    Dimension.REASON,
)
READ_UNITS: Final = Metric(
    name="read units",
    kind=Kind.COUNTER,
    unit=Unit.COUNT,
    group=Group.STORE,
    dimension=Dimension.PURPOSE,
    help="Read units of DynamoDB, by what they were for.",
)
WRITE_UNITS: Final = Metric(
    name="write units",
    kind=Kind.COUNTER,
    unit=Unit.COUNT,
    group=Group.STORE,
    dimension=Dimension.PURPOSE,
    help="Write units of DynamoDB, by what they were for; a refused write, whose units nobody tells, counts as one.",
)
COST: Final = Metric(
    name="dollars per 1000 tasks",
    kind=Kind.GAUGE,
    unit=Unit.NONE,
    group=Group.STORE,
    help="What the units of the last minute cost, for each 1,000 tasks that ended in it; none when no task ended.",
)
DOORBELL_FAILURES: Final = _counter("doorbell failures", Group.STORE, "Attempts to listen at the doorbell that failed.")

ACTIVE_CONNECTIONS: Final = Metric(
    name="active connections",
    kind=Kind.GAUGE,
    unit=Unit.COUNT,
    group=Group.STREAMS,
    help="Open connections of streams; each half minute, of an agent without streams 0 each minute.",
)
STREAMS_HELD: Final = Metric(
    name="streams held", kind=Kind.GAUGE, unit=Unit.COUNT, group=Group.STREAMS, help="Streams that the agent holds."
)
STREAM_CONNECTS: Final = _counter("stream connects", Group.STREAMS, "Connections that went live.", _JOB)
STREAM_DISCONNECTS: Final = _counter(
    "stream disconnects", Group.STREAMS, "Connections, or attempts to connect, that ended.", _JOB
)
STREAM_GAPS: Final = _counter("stream gaps", Group.STREAMS, "Times that messages were missing.", _JOB)
STREAMS_WEDGED: Final = _counter("streams wedged", Group.STREAMS, "Streams that made no progress.", _JOB)
STREAMS_HANDED_OFF: Final = _counter("streams handed off", Group.STREAMS, "Streams that went to another agent.", _JOB)

CANARY_HEALTHY: Final = Metric(
    name="canary healthy",
    kind=Kind.GAUGE,
    unit=Unit.NONE,
    group=Group.CANARY,
    dimension=Dimension.TARGET,
    second=Dimension.OBSERVER,
    fades=True,
    help="1 when the canary's last attempt did, 0 when it failed; after two failures 0 until five in a row did.",
)
CANARY_BLIND: Final = Metric(
    name="canary blind",
    kind=Kind.GAUGE,
    unit=Unit.NONE,
    group=Group.CANARY,
    dimension=Dimension.TARGET,
    second=Dimension.OBSERVER,
    fades=True,
    help="1 when the canary's last attempt could not judge: throttled, or no token that counts. Else not sent.",
)
CANARY_TOKEN_DAYS: Final = Metric(
    name="canary token days",
    kind=Kind.GAUGE,
    unit=Unit.NONE,
    group=Group.CANARY,
    dimension=Dimension.TARGET,
    second=Dimension.OBSERVER,
    fades=True,
    help="Days until the canary's token is over. Not sent for one that something replaces in time.",
)
CANARY_LATENCY: Final = Metric(
    name="canary latency",
    kind=Kind.DISTRIBUTION,
    unit=Unit.SECONDS,
    group=Group.CANARY,
    dimension=Dimension.TARGET,
    second=Dimension.STEP,
    help="How long each step of the canary took; that of a queue, from the task's put to its end.",
)

METRICS: Final[tuple[Metric, ...]] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
"""All metrics, in their order here."""
