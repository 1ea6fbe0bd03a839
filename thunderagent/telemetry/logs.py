"""Log lines: one for each change of a task's state, and one of counters a minute. No other module formats lines.

Payloads and results are never logged.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from datetime import UTC, datetime
from functools import cache
from typing import TYPE_CHECKING, Any, Final, TextIO

from loguru import logger

from thunderagent.jobs.running import Running
from thunderagent.model import edge_events, events, fleet_events, queue_events
from thunderagent.model.bus import Event, EventBus
from thunderagent.model.forks import renewed
from thunderagent.model.outlet import outlet_of, without_waiting
from thunderagent.model.redaction import Redactor
from thunderagent.model.traceparent import CURRENT, trace_id

if TYPE_CHECKING:
    from loguru import Record

LEVELS: Final[dict[type[Event], tuple[str, str]]] = {
    events.AgentStarted: ("INFO", "agent started"),
    events.AgentDraining: ("INFO", "agent draining"),
    events.AgentStopped: ("INFO", "agent stopped"),
    events.TaskStarted: ("DEBUG", "task started"),
    events.TaskTakenOver: ("WARNING", "task taken over from a lost agent"),
    events.TaskSetApart: ("WARNING", "task has lost agents: it is to run alone here"),
    events.TaskGivenUp: ("ERROR", "task failed: too many agents were lost with it"),
    events.TaskSucceeded: ("INFO", "task succeeded"),
    events.TaskRetried: ("WARNING", "task will be retried"),
    events.TaskFailed: ("ERROR", "task failed"),
    events.TaskClosed: ("INFO", "task closed"),
    events.TaskSnoozed: ("INFO", "task snoozed"),
    events.TaskReleased: ("INFO", "task released"),
    events.TaskLimited: ("DEBUG", "task waits for a permit of its limit"),
    events.TaskLetOut: ("DEBUG", "task let out of the waitlist of its limit"),
    events.LeaseLost: ("WARNING", "lease lost"),
    events.SettleRefused: ("WARNING", "late outcome refused: the task is another agent's"),
    events.OutcomeRejected: (
        "ERROR",
        "the store takes no outcome of the task, whose row may be too large: its lease ends by itself",
    ),
    queue_events.WriteRejected: ("ERROR", "the store does not take a write: look at the row, which may be too large"),
    events.TaskOverran: ("WARNING", "handler went on although it was told to stop"),
    queue_events.ChildUnparked: ("INFO", "task unparked"),
    queue_events.ChildDoomed: ("WARNING", "task ended without a run"),
    events.UnknownJobsSeen: ("WARNING", "tasks of jobs that this agent does not have are left alone"),
    events.RowUnreadable: ("WARNING", "a row that cannot be read is left alone"),
    events.Paused: ("WARNING", "paused: no task of it starts here"),
    events.Resumed: ("INFO", "resumed"),
    events.StoreFailed: ("WARNING", "store does not answer"),
    events.StoreRecovered: ("INFO", "store answers again"),
    events.DoorbellFailed: ("WARNING", "doorbell does not work: polling at the usual pace"),
    events.DoorbellRecovered: ("INFO", "doorbell works again"),
    events.HeartbeatLate: ("WARNING", "heartbeat is late"),
    events.StreamConnected: ("INFO", "stream is live"),
    events.StreamDisconnected: ("WARNING", "stream is not connected"),
    events.StreamGap: ("WARNING", "stream has a gap"),
    events.StreamDoubted: ("WARNING", "stream looks wrong"),
    events.StreamWedged: ("ERROR", "stream makes no progress: its lease is not renewed"),
    events.StreamHandedOff: ("INFO", "stream is handed off"),
    events.StreamHandedOver: ("INFO", "stream is handed over"),
    events.ActiveConnections: ("DEBUG", "active connections"),
    events.ThreadDied: ("ERROR", "a thread of the agent has died"),
    fleet_events.HealthChanged: ("WARNING", "health has changed"),
    fleet_events.RecyclingOff: ("WARNING", "no recycling by memory: the agent begins with more than recycle_mib"),
    fleet_events.AgentRetires: ("WARNING", "agent retires: it drains, for a fresh one to take its place"),
    fleet_events.AgentFailed: ("ERROR", "agent ends by an error that nobody expected"),
    fleet_events.InstanceAtRisk: ("WARNING", "EC2 recommends to move away from this instance"),
    fleet_events.NoticesFailed: ("WARNING", "the instance does not say whether it is to be taken away"),
    fleet_events.HookFailed: ("WARNING", "a hook failed; its task goes on"),
    fleet_events.ExportFailed: ("WARNING", "metrics could not be sent"),
    fleet_events.QueueMeasured: ("DEBUG", "queue measured"),
    fleet_events.GrantAsked: ("WARNING", "asked the arbiter to change which region has the grant"),
    fleet_events.GrantBegan: ("INFO", "the region has the grant"),
    fleet_events.GrantDrains: ("WARNING", "the grant goes to another region: what is held is given back"),
    fleet_events.GrantEnded: ("WARNING", "the region has no grant any more: nothing is written"),
    fleet_events.RegionsFrozen: ("ERROR", "no region takes the grant by itself any more"),
    fleet_events.CanaryProbed: ("DEBUG", "canary has tried"),
    fleet_events.CanaryBlind: ("ERROR", "canary cannot judge the target: the last judgement stays"),
    fleet_events.CanaryTokenEnds: ("WARNING", "canary: its token is over soon"),
    fleet_events.CanaryDown: ("WARNING", "canary: the target is down"),
    fleet_events.CanaryUp: ("INFO", "canary: the target is up"),
    fleet_events.BacklogMeasured: ("DEBUG", "backlog measured"),
    edge_events.EventRouted: ("INFO", "event taken"),
    edge_events.EventRefused: ("WARNING", "event rejected"),
    edge_events.EventFailed: ("ERROR", "event not handled"),
    edge_events.ConnectionOpened: ("DEBUG", "connection opened"),
    edge_events.ConnectionRefused: ("INFO", "connection refused"),
    edge_events.MessageRefused: ("INFO", "message refused"),
    edge_events.ConnectionFlooded: ("WARNING", "connection closed: it sends too much"),
    edge_events.MessageFailed: ("ERROR", "message not handled"),
    edge_events.NotificationFailed: ("WARNING", "other connections not notified of a change"),
    queue_events.TickPut: ("INFO", "tick put"),
    queue_events.TicksSkipped: ("WARNING", "ticks left out"),
    queue_events.ScheduleSet: ("INFO", "schedule set"),
    queue_events.ScheduleSetBack: ("WARNING", "schedule was ahead of the clock and is set back"),
    queue_events.ScheduleUnreadable: ("ERROR", "schedule cannot be followed"),
}
"""Level and message of each event that is a line of its own."""

COUNTED: Final[dict[type[Event], str]] = {
    events.TaskStarted: "started",
    events.TaskSucceeded: "succeeded",
    events.TaskRetried: "retried",
    events.TaskFailed: "failed",
    events.TaskClosed: "closed",
    events.TaskSnoozed: "snoozed",
    events.TaskReleased: "released",
    events.TaskLimited: "limited",
    events.TaskTakenOver: "taken_over",
    events.TaskGivenUp: "given_up",
    events.LeaseLost: "leases_lost",
    events.SettleRefused: "refused",
    events.StoreFailed: "store_failures",
    events.DoorbellFailed: "doorbell_failures",
    events.StreamConnected: "connects",
    events.StreamDisconnected: "disconnects",
    events.StreamGap: "gaps",
    events.StreamWedged: "wedged",
    events.StreamHandedOff: "handed_off",
    queue_events.TickPut: "ticks",
    queue_events.TicksSkipped: "ticks_left_out",
}
"""Names of the counters of the minute's line."""


_TEXT: Final = "{extra[at]} <level>{level: <7}</level> {message} <dim>{extra[line]}</dim>"
_JSON: Final = "{extra[line]}"
_QUOTED: Final = re.compile(r'[\s"]')
_OURS: Final = frozenset({"at", "line"})
_encode: Final = json.JSONEncoder(default=str, ensure_ascii=False).encode


def configure_logging(
    level: str = "INFO", *, as_json: bool = False, stream: TextIO | None = None, redact: str = ""
) -> None:
    """Send log lines of this process to a stream.

    Secrets are taken out of facts, messages and exceptions, see `redaction`. Tracebacks are printed without the values
    of variables, which may be secrets.

    Args:
        level: the least that is written.
        as_json: a JSON object a line, else text.
        stream: written in the thread of the line; None: standard error, whose reader no thread waits for.
        redact: names of further facts that are secrets, with commas between.
    """
    global _least, _lines, _redactor
    _redactor = Redactor(redact)
    to = stream or without_waiting(sys.stderr)
    has_colours = not as_json and not os.environ.get("NO_COLOR") and bool(getattr(to, "isatty", bool)())
    made = _Lines(to, _as_json if as_json else _as_text)
    _lines = None if has_colours else made
    _least = logger.level(level.upper()).no
    # The format is fixed text and a patcher fills in the facts: a function would be parsed again for each line.
    logger.configure(
        handlers=[
            {
                "sink": made,
                "level": level.upper(),
                "format": _JSON if as_json else _TEXT,
                "colorize": has_colours,
                "backtrace": False,
                "diagnose": False,
            }
        ],
        patcher=_patch_json if as_json else _patch_text,
    )
    if (outlet := outlet_of(to)) is not None:  # it asks in the midst of a write, so the logger cannot answer
        outlet.said = lambda number: made.line("WARNING", "log lines were dropped", {"lines": number})


def adopt_lines(*libraries: str) -> None:
    """Write the warnings and errors of these libraries as lines of ours."""
    for name in libraries:
        library = logging.getLogger(name)
        library.handlers = [_LibraryLines(logging.WARNING)]
        library.propagate = False


class _LibraryLines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            bound = logger.bind(library=record.name).opt(exception=record.exc_info)
            bound.log(record.levelname, "{}", record.getMessage())
        except Exception:
            self.handleError(record)


def warn(sentence: str) -> None:
    """Log a warning of a command before its agent begins."""
    logger.warning(sentence)


class _Lines:
    """The stream of all lines, each written whole: those that the logger makes, and those of events.

    Args:
        stream: where they go.
        render: makes a line of a time, a level, a message and facts.
    """

    def __init__(self, stream: TextIO, render: Callable[[datetime, str, str, Mapping[str, Any]], str]) -> None:
        self._stream = stream
        self._render = render
        self._waiting: deque[str] = deque()
        self._guard = renewed(threading.Lock())

    def write(self, line: str) -> None:
        """Write a line of the logger, whose traceback may hold secrets."""
        record = getattr(line, "record", None)
        self._put(_redactor.text(line) if record and record["exception"] else line)

    def write_all(self, lines: Iterable[Line]) -> None:
        """Write lines of events with one call to the system."""
        self._put("".join([self.line(*line) for line in lines]))

    def line(self, level: str, message: str, facts: dict[str, Any]) -> str:
        return self._render(datetime.now(UTC), level, message, _shown(facts)) + "\n"

    def isatty(self) -> bool:
        return self._stream.isatty()

    def _put(self, text: str) -> None:
        """Write, or leave it to the thread that writes now: none waits, as a finalizer may log amid a write."""
        self._waiting.append(text)
        while self._waiting and self._guard.acquire(blocking=False):
            try:
                while self._waiting:
                    self._stream.write(self._waiting.popleft())
                self._stream.flush()
            finally:
                self._guard.release()


def task_scope(running: Running) -> AbstractContextManager[None]:
    """Bind task id, fence, attempt and trace to all lines of this thread or coroutine inside."""
    lease = running.lease
    facts: dict[str, Any] = {"task_id": lease.task_id, "fence": lease.fence, "attempt": lease.task.attempt}
    if (trace := trace_id(CURRENT.get() or lease.task.traceparent)) is not None:
        facts["trace_id"] = trace
    return logger.contextualize(**facts)


Line = tuple[str, str, dict[str, Any]]
"""Level, message and facts of a line."""

_WARNING: Final = logger.level("WARNING").no
_least = 0
_lines: _Lines | None = None
_redactor = Redactor()


class Telemetry:
    """Listens to a bus, writes lines and counts.

    Lines of events go through the logger. Those below WARNING, which come with every task, go straight to the stream of
    `configure_logging`, at a third of the cost: further sinks of the application get them from hooks.
    """

    def __init__(self, bus: EventBus) -> None:
        self._guard = renewed(threading.Lock())
        self._counts: Counter[str] = Counter()
        self.active_connections: int | None = None
        """The gauge ActiveConnections, each half minute; None for an agent without streams."""
        bus.subscribe(self.listen, several=self.listen_to_all)

    def listen(self, event: Event) -> None:
        self.listen_to_all((event,))

    def listen_to_all(self, several: Sequence[Event]) -> None:
        """Count events that happened together, and write their lines."""
        straight: list[Line] = []
        for event in several:
            self._listen(event, straight)
        if straight and _lines is not None:
            _lines.write_all(straight)

    def _listen(self, event: Event, straight: list[Line]) -> None:
        kind = type(event)
        name = COUNTED.get(kind)
        if name is not None:
            with self._guard:
                self._counts[name] += 1
        if isinstance(event, events.Polled):
            with self._guard:
                self._counts["polls"] += 1
                self._counts["claims_lost"] += event.tried - event.won
        elif isinstance(event, events.Counted):
            self._count(event)
            return
        if isinstance(event, events.ActiveConnections):
            self.active_connections = event.connections
        if kind in LEVELS:
            level, message = LEVELS[kind]
            number = logger.level(level).no
            if number < _least:  # before the facts are gathered, which costs more than the line
                return
            if number < _WARNING and _lines is not None:
                straight.append((level, message, _facts(event)))
            else:
                if straight and _lines is not None:  # lines keep the order of their events
                    _lines.write_all(straight)
                    straight.clear()
                logger.bind(**_facts(event)).log(level, message)

    def take(self) -> dict[str, int]:
        """The counters since the last call."""
        with self._guard:
            counts, self._counts = self._counts, Counter()
        return dict(counts)

    def _count(self, event: events.Counted) -> None:
        facts: dict[str, Any] = {"slots": f"{event.running}/{event.slots}", **self.take()}
        if self.active_connections is not None:
            facts["active_connections"] = self.active_connections
        if event.skew_s is not None:
            facts["clock_skew_s"] = round(event.skew_s, 2)
        logger.bind(**facts).info("last minute")


@cache
def _names(kind: type[Event]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def _facts(event: Event) -> dict[str, Any]:
    return {name: getattr(event, name) for name in _names(type(event))}  # type: ignore[arg-type] # classes hash


def _patch_text(record: Record) -> None:
    extra = record["extra"]
    record["message"] = _redactor.text(record["message"])
    extra["line"] = _in_words(_shown(extra))
    extra["at"] = _to_millis(record["time"])


def _patch_json(record: Record) -> None:
    extra, exception = record["extra"], record["exception"]
    facts = _shown(extra)
    if exception is not None:
        facts["exception"] = _redactor.text(repr(exception.value))
        record["exception"] = None
    extra["line"] = _as_json(record["time"], record["level"].name, _redactor.text(record["message"]), facts)


def _as_text(at: datetime, level: str, message: str, facts: Mapping[str, Any]) -> str:
    return f"{_to_millis(at)} {level: <7} {message} {_in_words(facts)}"


def _as_json(at: datetime, level: str, message: str, facts: Mapping[str, Any]) -> str:
    return _encode({"time": utc(at), "level": level, "message": message, **facts})


def _shown(extra: dict[Any, Any]) -> dict[str, Any]:
    value_of = _redactor.value
    return {name: value_of(name, value) for name, value in extra.items() if value is not None and name not in _OURS}


def _in_words(facts: Mapping[str, Any]) -> str:
    return " ".join([f"{name}={_plain(value)}" for name, value in facts.items()])


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, int):
        return str(value)
    text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return json.dumps(text, ensure_ascii=False) if _QUOTED.search(text) else text


def utc(at: datetime) -> str:
    """As `2026-07-14T07:30:00.250000Z`: the same moment is the same text on every host, whatever `TZ` says."""
    return at.astimezone(UTC).isoformat(timespec="microseconds").removesuffix("+00:00") + "Z"


def _to_millis(at: datetime) -> str:
    return utc(at).replace("T", " ", 1)[:23] + "Z"
