"""What happens by the rules that the client and the agent share: children follow their parents, ticks are put."""

from __future__ import annotations

from dataclasses import dataclass

from thunderagent.model.bus import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildUnparked(Event):
    """A BLOCKED task is in its queue, as its last parent ended."""

    task_id: str
    parent_id: str
    queue: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildDoomed(Event):
    """A BLOCKED task ended without a run, as a parent did not succeed."""

    task_id: str
    status: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteRejected(Event):
    """The store never takes this write of a row; the rows beside it go on."""

    task_id: str
    verb: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TickPut(Event):
    """The task of a tick of a periodic job is in its queue, `late_s` after the tick."""

    job: str
    task_id: str
    late_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TicksSkipped(Event):
    """Ticks of a periodic job were left out; at most a thousand are counted."""

    job: str
    number: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSet(Event):
    """The row of a periodic job has the schedule of our code now, instead of `before`."""

    job: str
    spec: str
    before: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSetBack(Event):
    """The last tick of a periodic job was this far ahead of the clock: ticks count from now on again."""

    job: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleUnreadable(Event):
    """This version cannot follow the row of a periodic job: its ticks are left to other agents."""

    job: str
    error: str
