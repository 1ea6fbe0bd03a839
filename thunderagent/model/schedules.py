"""Schedules: what a periodic job is to do, what its row says, and the pure decision which ticks are put.

One of several agents decides for each interval: it changes the row under the fence that it saw. The decision stands in
the row until its ticks are put, so that another agent can put them.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, field_validator

from thunderagent.model.arguments import check, choice_problem, seconds_problem
from thunderagent.model.errors import ConfigurationError
from thunderagent.model.jsondata import dump_json, is_same_json
from thunderagent.model.rows import is_number
from thunderagent.model.task import DEFAULT_QUEUE, Lane, Row, Status, Task, timestamp
from thunderagent.model.ticks import LAST_MOMENT, Spec, between, newest, spec_of
from thunderagent.model.writes.schedules import SCHEDULE_STATUS

CatchUp = Literal["none", "last", "all"]
Overlap = Literal["allow", "skip", "cancel_previous"]
CATCH_UPS: Final = ("none", "last", "all")
OVERLAPS: Final = ("allow", "skip", "cancel_previous")

LATE_S: Final = 60
"""Age from which on a tick was missed: `catch_up` says what becomes of it."""

SET_BACK_S: Final = 300
"""A row whose last tick is further ahead than this was written under a wrong clock."""

AT_ONCE: Final = 100
"""Ticks of one decision at most; the next goes on from there."""

COUNTED: Final = 1000
"""Missed ticks that are counted at most."""

LONGEST_JITTER_S: Final = 86400.0
PAYLOAD_BYTES: Final = 8192
"""Most bytes of a schedule's payload: its row is written with each tick."""


class Tick(BaseModel):
    """The payload of a periodic job that has no other: `at` is the moment of the tick in UTC, not that of the run."""

    model_config = ConfigDict(frozen=True)

    at: AwareDatetime

    @field_validator("at")
    @classmethod
    def _in_utc(cls, at: datetime) -> datetime:
        return at.astimezone(UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When the tasks of a periodic job are put, and with what."""

    spec: Spec
    catch_up: str = "last"
    overlap: str = "allow"
    jitter_s: float = 0.0
    queue: str = DEFAULT_QUEUE
    payload: str | None = None
    """JSON text; None: each tick has a `Tick`."""
    version: int = 1
    """Of the job's code that gave the schedule and its payload."""

    def __post_init__(self) -> None:
        check(choice_problem("catch_up", self.catch_up, CATCH_UPS), choice_problem("overlap", self.overlap, OVERLAPS))
        check(seconds_problem("jitter_s", self.jitter_s, most=LONGEST_JITTER_S))
        jitter_s = self.jitter_s
        if jitter_s and jitter_s >= self.spec.shortest_s:
            raise ConfigurationError(
                f"jitter_s is {jitter_s:g}; it must be under the {self.spec.shortest_s} s from a tick to the next"
            )
        if self.payload is not None and len(self.payload.encode()) > PAYLOAD_BYTES:
            raise ConfigurationError(f"the payload has over {PAYLOAD_BYTES:,} bytes; pass a reference to the data")
        Lane(self.queue)

    def is_same(self, other: Schedule) -> bool:
        """Whether it is the same schedule, whatever the order of the keys in its payload."""
        return replace(self, payload=other.payload) == other and is_same_json(self.payload, other.payload)

    def to_data(self) -> dict[str, Any]:
        data: dict[str, Any] = {"spec": self.spec.to_data(), "queue": self.queue}
        data |= {"catch_up": self.catch_up, "overlap": self.overlap}
        data |= {"jitter_s": self.jitter_s} if self.jitter_s else {}
        data |= {"version": self.version} if self.version != 1 else {}
        return data | ({"payload": self.payload} if self.payload is not None else {})

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Schedule:
        """The schedule of a small JSON map, as `to_data` gives it.

        Raises:
            ConfigurationError: this version cannot follow it.
        """
        try:
            return cls(
                spec=spec_of(data["spec"]),
                catch_up=data["catch_up"],
                overlap=data["overlap"],
                jitter_s=data.get("jitter_s", 0.0),
                queue=data["queue"],
                payload=data.get("payload"),
                version=int(data.get("version", 1)),
            )
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ConfigurationError(f"{data!r:.200} is no schedule: {error!r}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    schedule: Schedule
    last: int
    """The last tick that was dealt with; at the begin, the moment from which ticks count."""
    ticks: tuple[int, ...] = ()
    """Ticks that are decided, and perhaps not put."""
    cancels: str | None = None
    """Id of the task to be cancelled before they are put."""
    previous: str | None = None
    """Id of the task that was put last."""
    skipped: int = 0
    """Ticks that were left out so far."""
    paused: float | None = None
    """Since when no ticks are put, in epoch seconds."""
    paused_until: float | None = None
    reason: str | None = None

    def is_paused(self, now: float) -> bool:
        return self.paused is not None and (self.paused_until is None or now < self.paused_until)

    def to_info(self) -> dict[str, Any]:
        info = self.schedule.to_data() | {"last": self.last}
        for name in _BESIDE:
            if value := getattr(self, name):
                info[name] = value
        return info | ({"ticks": list(self.ticks)} if self.ticks else {})

    @classmethod
    def of(cls, row: Row) -> State:
        """The state in a row.

        Raises:
            ConfigurationError: a person or a newer version wrote the row.
        """
        info = row.get("info")
        if not isinstance(info, Mapping):
            raise ConfigurationError(f"the row {row.get('taskId')!r} has no schedule in it")
        schedule = Schedule.from_data(info)
        ticks = info.get("ticks", [])
        wrong = [name for name, is_right in _BESIDE.items() if name in info and not is_right(info[name])]
        if not isinstance(ticks, (list, tuple)) or not all(map(_is_moment, [info.get("last"), *ticks])):
            wrong.append("ticks")
        if not _is_moment(row.get("fence")):
            wrong.append("fence")
        if row.get("status") != SCHEDULE_STATUS:
            wrong.append("status")
        if wrong:
            raise ConfigurationError(f"the row {row.get('taskId')!r} cannot be read: {', '.join(wrong)}")
        known = {name: info[name] for name in _BESIDE if name in info}
        return cls(schedule=schedule, last=info["last"], ticks=tuple(ticks), **known)


def expires_at(row: Row) -> float:
    """When the row of a schedule expires; infinity if it does not say."""
    at = row.get("expireAt")
    return at if is_number(at) else math.inf


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 2 * LAST_MOMENT


def _is_moment(value: object) -> bool:
    return isinstance(value, int) and _is_time(value)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


_BESIDE: Final[Mapping[str, Callable[[object], bool]]] = {
    "cancels": _is_text,
    "previous": _is_text,
    "skipped": _is_moment,
    "paused": _is_time,
    "paused_until": _is_time,
    "reason": _is_text,
}
"""What a row may have beside its schedule and ticks, and whether a value is right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be done with a row: its next state, and why."""

    state: State
    skipped: tuple[tuple[str, int], ...] = ()
    """Reasons and numbers of ticks that are left out."""
    set_back_s: float = 0.0
    """How far ahead the row was of the clock."""
    must_wait: bool = False
    """Nothing is decided before the cancelled task of the previous tick has ended."""

    @property
    def ticks(self) -> tuple[int, ...]:
        """The ticks to put, oldest first."""
        return self.state.ticks


MISSED: Final = "missed"
OPEN: Final = "the task before it is still open"
OVERTAKEN: Final = "overtaken by the next"
PAUSED: Final = "paused"


def plan(
    job: str,
    state: State,
    now: float,
    is_open: Callable[[str], bool],
    is_stopping: Callable[[str], bool] = lambda task_id: False,
) -> Plan | None:
    """Decide on all ticks that are due at `now`; None: nothing is.

    Args:
        job: its name.
        state: what the row says; the ticks of the previous decision must have been put.
        now: epoch seconds.
        is_open: whether the task with this id has not ended; asked only if `overlap` needs it.
        is_stopping: whether an open task was cancelled: with `overlap="skip"` the tick waits for its end.
    """
    if state.last > now + SET_BACK_S:
        return Plan(state=replace(state, last=math.floor(now)), set_back_s=state.last - now)
    if state.is_paused(now):
        return None
    spec, skipped = state.schedule.spec, list[tuple[str, int]]()
    begin = counts_from(state)
    if begin > state.last:
        skipped.append((PAUSED, len(between(spec, state.last, begin, most=COUNTED))))
    if not between(spec, begin, now, most=1):
        return None
    ticks, last = _caught_up(state.schedule, begin, now, skipped)
    before = state.previous if state.schedule.overlap == "skip" and ticks else None
    if before is not None and before < tick_id(job, ticks[0]) and is_stopping(before):
        return Plan(state=state, must_wait=True)
    ticks, cancels = _kept_apart(job, state, ticks, is_open, skipped)
    after = replace(
        state,
        last=last,
        ticks=tuple(ticks),
        cancels=cancels,
        previous=tick_id(job, ticks[-1]) if ticks else state.previous,
        skipped=state.skipped + sum(number for _, number in skipped),
        paused=None,
        paused_until=None,
        reason=None,
    )
    return Plan(state=after, skipped=tuple((why, number) for why, number in skipped if number))


def counts_from(state: State) -> int:
    """The moment from which ticks count: the last one, or the end of a pause."""
    return max(state.last, math.floor(state.paused_until or 0.0)) if state.paused is not None else state.last


def _caught_up(schedule: Schedule, last: int, now: float, skipped: list[tuple[str, int]]) -> tuple[list[int], int]:
    """The due ticks that `catch_up` lets through, and the last that is dealt with."""
    spec = schedule.spec
    if schedule.catch_up == "all":
        ticks = between(spec, last, now, most=AT_ONCE)
        return ticks, ticks[-1]
    edge = math.floor(now - LATE_S)
    ticks = between(spec, max(last, edge), now, most=AT_ONCE)
    missed = newest(spec, last, edge)
    if missed is None:
        return ticks, ticks[-1]
    if schedule.catch_up == "last" and not ticks:
        ticks = [missed]
    left_out = between(spec, last, missed - 1 if ticks == [missed] else missed, most=COUNTED)
    skipped.append((MISSED, len(left_out)))
    return ticks, ticks[-1] if ticks else missed


def _kept_apart(
    job: str, state: State, ticks: list[int], is_open: Callable[[str], bool], skipped: list[tuple[str, int]]
) -> tuple[list[int], str | None]:
    """The ticks that `overlap` lets through, and the task to be cancelled for them."""
    overlap, before = state.schedule.overlap, state.previous
    if overlap == "allow" or not ticks:
        return ticks, None
    # Ids of a job are in the order of their ticks. A later one was put under a clock that was ahead: it is still to
    # come. The same one was put by hand, a moment ago.
    is_in_the_way = before is not None and before < tick_id(job, ticks[0]) and is_open(before)
    if overlap == "skip":
        kept = [] if is_in_the_way else ticks[:1]
        skipped.append((OPEN, len(ticks) - len(kept)))
        return kept, None
    skipped.append((OVERTAKEN, len(ticks) - 1))
    return ticks[-1:], before if is_in_the_way else None


def schedule_id(job: str) -> str:
    return f"schedule:{job}"


def tick_id(job: str, tick: int) -> str:
    """Id of the task of a tick, the same for every agent, so that the tick is put once."""
    return f"{job}@{tick_text(tick)}"


def tick_text(tick: int) -> str:
    return datetime.fromtimestamp(tick, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def tick_payload(tick: int) -> str:
    return dump_json({"at": tick_text(tick)}, "a tick")


def tick_task(job: str, schedule: Schedule, tick: int, *, shards: int, now: float) -> Task:
    """The task of a tick, the same in every agent; only the code of the job knows its retries."""
    task_id = tick_id(job, tick)
    jitter_s = zlib.crc32(task_id.encode()) / 2**32 * schedule.jitter_s
    payload = tick_payload(tick) if schedule.payload is None else schedule.payload
    return Task(
        task_id=task_id,
        status=Status.PENDING,
        lane=Lane.of(task_id, schedule.queue, shards),
        created_at=timestamp(tick + jitter_s),
        submitted_at=timestamp(now),
        job=job,
        version=schedule.version,
        payload_text=payload,
    )
