"""The task: its states, its row, and its place in the index.

A `Task` is a frozen picture of one row. Rows travel between the store and its engines as plain dictionaries with the
attribute names of the table (`taskId`, `createdAt`, …); `read_task` is their only reader.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import lru_cache
from typing import Any, Final, NamedTuple

from thunderagent.model.arguments import shown
from thunderagent.model.errors import ConfigurationError, StoreError, TaskUnreadable
from thunderagent.model.names import job_value, parse_job
from thunderagent.model.rows import ATTRIBUTES, RIGHT, Unreadable, is_count, is_list, is_maps

Row = dict[str, Any]
"""One row by attribute names of the table; an absent attribute is no key."""

DEFAULT_QUEUE: Final = "default"

RESERVED: Final = (
    *("agent:", "turn:", "lanes:", "journal:", "unique:", "limit:", "schedule:", "control:", "probe:", "boot:"),
    *("region:", "sentinel:"),
)
"""Ids of our own rows begin so, and no task's id does."""

_QUEUE_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_DIGITS: Final = 9
"""Most digits of a shard's number."""


class Status(StrEnum):
    """Where a task is in its life.

    * `PENDING`: waits for `createdAt` (its due time) and a free slot.
    * `RUNNING`: one agent holds its lease.
    * `BLOCKED`: waits for the tasks it depends on, or for a permit of its limit.
    * `SUCCESS`: it ran to its end. Only this satisfies a dependency.
    * `FAILED`: retries or crashes are used up, or the error was fatal; stays for inspection and retry.
    * `DONE`: closed on purpose; `done_reason` says why.
    """

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    BLOCKED = "BLOCKED"
    SUCCESS = "SUCCESS"
    FAILED = "FAILED"
    DONE = "DONE"

    @property
    def is_terminal(self) -> bool:
        """Whether no agent will touch the task again unless a person retries it."""
        return self in TERMINAL


TERMINAL: Final = frozenset({Status.SUCCESS, Status.FAILED, Status.DONE})

TRANSITIONS: Final[Mapping[Status, frozenset[Status]]] = {
    Status.PENDING: frozenset({Status.RUNNING, Status.BLOCKED, Status.DONE}),
    Status.RUNNING: frozenset(set(Status)),
    Status.BLOCKED: frozenset({Status.PENDING, Status.RUNNING, Status.FAILED, Status.DONE}),
    Status.SUCCESS: frozenset(),
    Status.FAILED: frozenset({Status.PENDING, Status.BLOCKED}),
    Status.DONE: frozenset({Status.PENDING, Status.BLOCKED}),
}
"""Which status may follow which. RUNNING to RUNNING is a takeover, PENDING to BLOCKED the way to a waitlist, BLOCKED
to RUNNING the claim of a task from there. What leaves FAILED and DONE is a retry by hand."""


@dataclass(frozen=True, slots=True)
class Lane:
    """A queue and one of its shards: the suffix of the status value under which the index keeps its tasks."""

    queue: str = DEFAULT_QUEUE
    shard: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.queue, str) or not _QUEUE_NAME.fullmatch(self.queue):
            raise ConfigurationError(
                f"{shown(self.queue)} cannot be the name of a queue: use 1 to 64 letters, digits, '-' or '_'"
            )

    @property
    def suffix(self) -> str:
        """The empty string for the plain lane, else `#reports` or `#reports.3`."""
        if self.shard:
            return f"#{self.queue}.{self.shard}"
        return "" if self.queue == DEFAULT_QUEUE else f"#{self.queue}"

    def value(self, status: str) -> str:
        """The attribute `status` of a task of this lane."""
        return f"{status}{self.suffix}"

    @classmethod
    def of(cls, task_id: str, queue: str, shards: int) -> Lane:
        """The lane of a new task: crc32 of its id over the number of shards."""
        return cls(queue, zlib.crc32(task_id.encode()) % shards if shards > 1 else 0)

    @classmethod
    def parse(cls, suffix: str) -> Lane:
        """The lane of a suffix such as `#reports.3`.

        Raises:
            ConfigurationError: no lane has this suffix.
        """
        queue, _, shard = suffix.removeprefix("#").partition(".")
        lane = cls(queue or DEFAULT_QUEUE, int(shard) if shard.isdecimal() and len(shard) <= _DIGITS else 0)
        if lane.suffix != suffix:
            raise ConfigurationError(f"{suffix!r:.100} is no lane: write for example #reports, or #reports.3")
        return lane


WAITLIST_MARK: Final = "@"
"""Between the lane and the key of the limit on whose waitlist the task is."""


class StatusValue(NamedTuple):
    """A value of the attribute `status`: `BLOCKED#reports.3@api` is of a task of the queue `reports`, shard 3, that
    waits for a permit of the limit `api`."""

    status: str
    suffix: str
    waitlist: str | None = None

    @classmethod
    def parse(cls, value: str) -> StatusValue:
        place, mark, waitlist = value.partition(WAITLIST_MARK)
        status, hash_mark, suffix = place.partition("#")
        return cls(status, hash_mark + suffix, waitlist if mark else None)


_PLAIN = Lane()
_lane_of_suffix = lru_cache(maxsize=4096)(Lane.parse)


def lanes_of(suffixes: Iterable[str], strange: Callable[[str], None]) -> list[Lane]:
    """The lanes of these suffixes, each once; `strange` is called with those that name none."""
    lanes: dict[Lane, None] = {}
    for suffix in suffixes:
        try:
            lanes[_lane_of_suffix(suffix)] = None
        except ConfigurationError:
            strange(suffix)
    return list(lanes)


def new_task_id(now: float | None = None) -> str:
    """A UUID of version 7 (RFC 9562, section 5.7): 48 bits of milliseconds, then random bits.

    Ids that grow with time keep neighbouring tasks in neighbouring pages of an embedded database.
    """
    milliseconds = int((time.time() if now is None else now) * 1000)
    value = (milliseconds << 80) | int.from_bytes(os.urandom(10))
    value = value & ~(0xF << 76) | (0x7 << 76)
    value = value & ~(0x3 << 62) | (0x2 << 62)
    text = f"{value:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def timestamp(seconds: float) -> float:
    """Epoch seconds as the table keeps them: three decimals, cut off so that nothing becomes due in the future."""
    return math.floor(seconds * 1000) / 1000


BATCH: Final = "batch"
"""The `kind` of a task that runs to its end."""

STREAM: Final = "stream"
"""The `kind` of a task whose job holds a connection until it is asked to stop."""


class Desired(StrEnum):
    """The attribute `desiredState` of a stream."""

    STARTED = "STARTED"
    STOPPED = "STOPPED"


class OnParentFailure(StrEnum):
    """What a child does when a parent ends without success.

    * `FAIL`: the child fails too, and so on down the graph.
    * `CANCEL`: the child is closed as DONE.
    * `RUN`: the child runs as if the parent had succeeded.
    """

    FAIL = "fail"
    CANCEL = "cancel"
    RUN = "run"


class UniqueScope(StrEnum):
    """How long a task holds its unique key: the attribute `uniqueScope`.

    * `UNTIL_START`: until an agent starts the task.
    * `UNTIL_DONE`: until the task has ended, whatever its end.
    """

    UNTIL_START = "until_start"
    UNTIL_DONE = "until_done"


class Handoff(StrEnum):
    """How far the handoff of a live stream is: the attribute `handoffState`.

    * `OFFERED`: the old holder goes on handling messages until another agent is ready.
    * `READY`: the successor is connected and buffers.
    * `DONE`: the old holder has stopped; `lastSeq` is where.
    """

    OFFERED = "OFFERED"
    READY = "READY"
    DONE = "DONE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task as its row was at some moment; times are epoch seconds."""

    task_id: str
    status: Status
    lane: Lane = _PLAIN
    created_at: float
    """The earliest moment the task may run, its place in the queue. Moves with each delay, retry and snooze."""
    submitted_at: float
    started_at: float | None = None
    finished_at: float | None = None
    updated_at: float | None = None
    job: str
    version: int = 1
    """Of the job's code that put the task; in the table a part of `job`."""
    kind: str = "batch"
    payload_text: str = "null"
    payload_ref: str | None = None
    payload_error: StoreError | None = None
    """Why a payload outside the row could not be read; no attribute."""
    payload_until: float | None = None
    """When a payload outside the row is deleted by itself, as far as it was read; no attribute."""
    retry_count: int = 0
    """Handler errors so far. Snoozes, drains and lost agents do not count."""
    max_retry: int | None = None
    """Retries allowed; None for a task that was enqueued without its job's code: the agent's job knows."""
    crash_count: int = 0
    """Agents lost while they ran it."""
    fence: int = 0
    lock_time: float | None = None
    lease_owner: str | None = None
    lease_sec: float | None = None
    hb: int | None = None
    last_agent: str | None = None
    depends_on: tuple[str, ...] = ()
    waiting_for: frozenset[str] = frozenset()
    dependents: frozenset[str] = frozenset()
    on_parent_failure: str | None = None
    desired_state: str | None = None
    last_seq: Mapping[str, Any] | None = None
    """The saved cursor of a stream."""
    handoff_owner: str | None = None
    handoff_until: float | None = None
    handoff_state: str | None = None
    cancel_requested: bool = False
    progress_text: str | None = None
    result_text: str | None = None
    result_ref: str | None = None
    result_error: StoreError | None = None
    """Why a result outside the row could not be read; no attribute."""
    error: str | None = None
    errors: tuple[Mapping[str, Any], ...] = ()
    done_reason: str | None = None
    expire_at: float | None = None
    unique_key: str | None = None
    unique_scope: str | None = None
    limit_key: str | None = None
    limit_max: int | None = None
    """How many tasks with this `limit_key` may run at once in the whole fleet."""
    traceparent: str | None = None
    """The W3C `traceparent` of the caller that enqueued it."""
    region_epoch: int | None = None
    """Epoch of the region whose agent claimed it last; None: it was claimed where there is one region."""
    waitlist: str | None = None
    """Key of the limit on whose waitlist the task is while it is BLOCKED; a part of the status, no attribute."""

    @property
    def is_stream(self) -> bool:
        return self.kind == STREAM

    @property
    def is_stopping(self) -> bool:
        """Whether the task was asked to stop, by a cancel or as a stream, and has not ended yet."""
        is_asked = self.cancel_requested or (self.is_stream and self.desired_state == Desired.STOPPED)
        return is_asked and not self.status.is_terminal

    @property
    def id(self) -> str:
        return self.task_id

    @property
    def queue(self) -> str:
        return self.lane.queue

    @property
    def status_value(self) -> str:
        """The attribute `status`, with the suffix of the lane and the waitlist."""
        value = f"{self.status}{self.lane.suffix}"
        return value if self.waitlist is None else f"{value}{WAITLIST_MARK}{self.waitlist}"

    @property
    def job_value(self) -> str:
        """The attribute `job`, with the version unless that is 1."""
        return job_value(self.job, self.version)

    @property
    def attempt(self) -> int:
        """Number of this run, from 1: handler errors and lost agents so far, plus one."""
        return self.retry_count + self.crash_count + 1

    @property
    def payload(self) -> Any:
        """The payload as JSON data.

        Raises:
            StoreError: it is outside the row, and could not be read.
        """
        if self.payload_error is not None:
            raise self.payload_error
        return json.loads(self.payload_text)

    @property
    def result(self) -> Any:
        """The result as JSON data; None until the task has succeeded.

        Raises:
            StoreError: it is outside the row, and could not be read.
        """
        if self.result_error is not None:
            raise self.result_error
        return None if self.result_text is None else json.loads(self.result_text)

    @property
    def progress(self) -> Any:
        """The last value of `ctx.progress()`, as JSON data."""
        return None if self.progress_text is None else json.loads(self.progress_text)

    @classmethod
    def from_row(cls, row: Row) -> Task:
        """The task of a row.

        Raises:
            TaskUnreadable: this version cannot read the row.
        """
        task = read_task(row)
        if isinstance(task, Unreadable):
            raise TaskUnreadable(str(task))
        return task

    def to_row(self) -> Row:
        """The row to put; what is empty is left out, as DynamoDB refuses empty sets and bills each byte."""
        row = {
            name: value
            for name, field in _FIELDS.items()
            if (value := getattr(self, field)) is not None and value is not False and value not in _NOTHING
        }
        row |= {"status": self.status_value, "job": self.job_value}
        for name in ("dependsOn", "errors"):
            if name in row:
                row[name] = list(row[name])
        return row


_NOTHING: Final[tuple[object, ...]] = ((), frozenset())
_IRREGULAR = {
    "payload": "payload_text",
    "result": "result_text",
    "progress": "progress_text",
}


def _field_names() -> dict[str, str]:
    known = {field.name for field in fields(Task)}
    names = {}
    for attribute in ATTRIBUTES:
        name = _IRREGULAR.get(attribute) or re.sub(r"([A-Z])", r"_\1", attribute).lower()
        if name in known:
            names[attribute] = name
    return names


_FIELDS: Final = _field_names()
_COUNTS: Final = ("retryCount", "maxRetry", "crashCount", "fence", "hb", "regionEpoch")


def _one_of(values: Iterable[str]) -> Callable[[object], bool]:
    known = frozenset(values)
    return lambda value: isinstance(value, str) and value in known


_RIGHT: Final[Mapping[str, Callable[[object], bool]]] = {
    **{name: RIGHT[kind] for name, kind in ATTRIBUTES.items()},
    **dict.fromkeys(_COUNTS, is_count),
    "kind": _one_of((BATCH, STREAM)),
    "dependsOn": is_list,
    "errors": is_maps,
    "onParentFailure": _one_of(OnParentFailure),
    "uniqueScope": _one_of(UniqueScope),
    "desiredState": _one_of(Desired),
    "handoffState": _one_of(Handoff),
    "lastSeq": lambda value: True,  # `read_cursor` says what is wrong with it
}
_READERS: Final = {
    name: (field, str if _RIGHT[name] is RIGHT["S"] else None, _RIGHT[name]) for name, field in _FIELDS.items()
}
_STATUSES: Final = {str(status): status for status in Status}


def read_task(row: Row) -> Task | Unreadable:
    """The task of a row. What the row lacks is filled in; attributes that this version does not know are left alone.

    A value of a wrong type, or a newer version's status, policy or state, makes the whole row unreadable.
    """
    values: dict[str, Any] = {}
    for name, value in row.items():
        if (reader := _READERS.get(name)) is not None:
            field, kind, is_right = reader
            if type(value) is not kind and not is_right(value):
                return Unreadable.of(row, name)
            values[field] = value
    for name in ("taskId", "status", "job"):
        if name not in row:
            return Unreadable.of(row, name)
    status, suffix, waitlist = StatusValue.parse(values["status"])
    try:
        values["status"], values["lane"], values["waitlist"] = _STATUSES[status], _lane_of_suffix(suffix), waitlist
    except (KeyError, ConfigurationError):
        return Unreadable.of(row, "status")
    if waitlist is not None and status != Status.BLOCKED:
        return Unreadable.of(row, "status")
    if "@" in values["job"]:
        values["job"], values["version"] = parse_job(values["job"])
    values.setdefault("created_at", 0.0)
    values.setdefault("submitted_at", values["created_at"])
    for field in ("depends_on", "errors"):
        if field in values:
            values[field] = tuple(values[field])
    return Task(**values)


class Candidate(NamedTuple):
    """An index entry of a task: enough to try a claim, nothing to rely on.

    A tuple and not a dataclass, as a poll makes fifty of them to claim ten.
    """

    task_id: str
    status_value: str
    created_at: float
    job: str
    kind: str = "batch"

    @classmethod
    def of(cls, task_id: str, status_value: str, created_at: float, job: object, kind: object) -> Candidate:
        """The entry, whatever the row has as job and kind: no agent has a job whose name is no text."""
        job_text = job if isinstance(job, str) else f"{job!r:.80}"
        kind = kind or BATCH
        return cls(task_id, status_value, created_at, job_text, kind if isinstance(kind, str) else f"{kind!r:.80}")


@dataclass(frozen=True, slots=True)
class Page:
    """Some entries of the index in its order; `after` continues behind them and is None at the end."""

    entries: tuple[Candidate, ...]
    after: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Ownership of a task for a time. Every write after the claim takes one; there is no `complete(task_id)`."""

    task: Task
    owner: str
    fence: int
    lease_s: float
    held_from: float
    """Monotonic seconds just before the claim or the last good renewal was sent."""

    @property
    def task_id(self) -> str:
        return self.task.task_id

    def deadline(self, margin: float) -> float:
        """Monotonic second at which the holder stops by itself; `margin` is a share of the lease, at least 0.2."""
        return self.held_from + self.lease_s * (1.0 - margin)
