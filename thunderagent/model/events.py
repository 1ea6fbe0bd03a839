"""What happens in the engine, as frozen classes.

The engine never logs: it emits on a bus (`bus.py`). `telemetry/logs.py` turns events into log lines, tests await them.
"""

from __future__ import annotations

from dataclasses import dataclass

from thunderagent.model.bus import Event
from thunderagent.model.rows import REMEDY, Unreadable


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentStarted(Event):
    agent: str
    store: str
    queues: str
    jobs: tuple[str, ...]
    http: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentDraining(Event):
    """The agent claims no more; `running` tasks have `drain_s` seconds to end."""

    running: int
    drain_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentStopped(Event):
    """The agent has stopped; the tasks of `stuck` handlers went back to their queues without them."""

    stuck: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Polled(Event):
    """A poll of one queue ended: entries seen, claims tried, leases won."""

    queue: str
    seen: int
    tried: int
    won: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEvent(Event):
    """An event of one task under one lease."""

    task_id: str
    job: str
    queue: str
    fence: int
    attempt: int
    trace_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskStarted(TaskEvent):
    """The handler is about to run, `waited_s` after the task was due."""

    waited_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTakenOver(TaskEvent):
    """The agent has taken over the task of a lost agent."""

    lost_agent: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskGivenUp(TaskEvent):
    """The task lost its last allowed agent and is FAILED."""

    lost_agent: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSetApart(TaskEvent):
    """The task has lost agents: it runs alone here, once the tasks `beside` it have ended."""

    lost_agents: int
    beside: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSucceeded(TaskEvent):
    seconds: float
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRetried(TaskEvent):
    """The handler failed and the task is PENDING again."""

    error: str
    delay_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFailed(TaskEvent):
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskClosed(TaskEvent):
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSnoozed(TaskEvent):
    """The handler asked for later."""

    delay_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskLimited(TaskEvent):
    """No permit of its limit was free: the task waits on its waitlist."""

    limit_key: str
    limit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskReleased(TaskEvent):
    """The task went back to its queue because the agent stops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseLost(TaskEvent):
    """The lease is over: `reason` says whether another agent has it or it could not be renewed in time."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SettleRefused(TaskEvent):
    """The outcome of a handler was not accepted, as the lease is another agent's."""

    verb: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeRejected(TaskEvent):
    """The store takes no outcome of the task, not even a bare failure: its lease expires."""

    verb: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOverran(TaskEvent):
    """The handler runs on although it was asked to stop, or has ended only now, long after its time limit."""

    reason: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskLetOut(Event):
    """A task left the line of its limit for its queue, as a slot is free."""

    task_id: str
    queue: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownJobsSeen(Event):
    """Tasks whose jobs this agent does not have are left for another agent."""

    queue: str
    jobs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowUnreadable(Event):
    """This version cannot read a row, and leaves it alone. Emitted once for each row."""

    row_id: str
    attribute: str
    value: str
    remedy: str

    @classmethod
    def of(cls, one: Unreadable) -> RowUnreadable:
        return cls(row_id=one.row_id, attribute=one.attribute, value=one.value, remedy=REMEDY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Paused(Event):
    """The agent has noticed that a queue or a job of its, or itself, is paused; `until` None: until resumed."""

    kind: str
    name: str
    until: float | None
    reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed(Event):
    """The agent has noticed the end of a pause, by hand or by itself."""

    kind: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFailed(Event):
    """A call to the store failed; `next_try_s` until the next."""

    during: str
    error: str
    next_try_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRecovered(Event):
    during: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorbellFailed(Event):
    """Rings cannot be heard; polling goes on at its usual pace, and `next_try_s` until the next attempt to listen."""

    error: str
    next_try_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorbellRecovered(Event):
    """Rings are heard again."""

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatLate(Event):
    """A round of heartbeats came this many seconds late."""

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadDied(Event):
    """One of the agent's own threads has ended; `restarted` says whether it runs again."""

    thread: str
    restarted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted(Event):
    """The minute's line: slots in use and what the listeners counted since the last."""

    running: int
    slots: int
    skew_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamConnected(TaskEvent):
    """A stream is live; `connects` counts its connections in this run."""

    connects: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamDisconnected(TaskEvent):
    """A connection or an attempt ended; the reason says when the next one comes."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamGap(TaskEvent):
    gap: str
    action: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamDoubted(TaskEvent):
    """A stream goes on, and something looks wrong: the reason has the remedy."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamWedged(TaskEvent):
    """A stream makes no progress: its lease is not renewed any more."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamHandedOff(TaskEvent):
    """A stream goes to another agent; `overlap`: this agent goes on with it until that one is ready."""

    reason: str
    overlap: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamHandedOver(TaskEvent):
    """The agent has stopped handling a stream that it had offered; `cursor` is where."""

    cursor: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveConnections(Event):
    """Open connections, and streams held."""

    connections: int
    streams: int
