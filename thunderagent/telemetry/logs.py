"""The only place that formats log lines and counts what happened: listeners of the events of the engine.

A line is written when a task changes its state, and one line of counters a minute; polls are only counted. Payloads and
results are never logged.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, Any, Final, TextIO

from loguru import logger

from thunderagent.jobs.running import Running
from thunderagent.model import events, fleet_events, router_events, websocket_events
from thunderagent.model.bus import EventBus
from thunderagent.model.events import Event
from thunderagent.model.forks import renewed
from thunderagent.model.outlet import outlet_of, without_waiting
from thunderagent.model.redaction import Redactor
from thunderagent.model.traceparent import CURRENT, trace_id
from thunderagent.telemetry.logwriter import LogWriter, utc

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
    events.TaskLimited: ("DEBUG", "task in line of its limit"),
    events.TaskLetOut: ("DEBUG", "task let out of the line of its limit"),
    events.LeaseLost: ("WARNING", "lease lost"),
    events.SettleRefused: ("WARNING", "late outcome refused: the task is another agent's"),
    events.OutcomeRejected: (
        "ERROR",
        "the store takes no outcome of the task, whose row may be too large: its lease ends by itself",
    ),
    events.WriteRejected: ("ERROR", "the store does not take a write: look at the row, which may be too large"),
    events.TaskOverran: ("WARNING", "handler went on although it was told to stop"),
    events.ChildUnparked: ("INFO", "task unparked"),
    events.ChildDoomed: ("WARNING", "task ended without a run"),
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
    router_events.EventRouted: ("INFO", "event taken"),
    router_events.EventRefused: ("WARNING", "event rejected"),
    router_events.EventFailed: ("ERROR", "event not handled"),
    websocket_events.ConnectionOpened: ("DEBUG", "connection opened"),
    websocket_events.ConnectionRefused: ("INFO", "connection refused"),
    websocket_events.MessageRefused: ("INFO", "message refused"),
    websocket_events.ConnectionFlooded: ("WARNING", "connection closed: it sends too much"),
    websocket_events.MessageFailed: ("ERROR", "message not handled"),
    websocket_events.NotificationFailed: ("WARNING", "other connections not notified of a change"),
    events.TickPut: ("INFO", "tick put"),
    events.TicksSkipped: ("WARNING", "ticks left out"),
    events.ScheduleSet: ("INFO", "schedule set"),
    events.ScheduleSetBack: ("WARNING", "schedule was ahead of the clock and is set back"),
    events.ScheduleUnreadable: ("ERROR", "schedule cannot be followed"),
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
    events.TickPut: "ticks",
    events.TicksSkipped: "ticks_left_out",
}
"""Names of the counters of the minute's line."""


_TEXT: Final = "{extra[at]} <level>{level: <7}</level> {message} <dim>{extra[line]}</dim>"
_JSON: Final = "{extra[line]}"
_QUOTED: Final = re.compile(r'[\s"]')
_OURS: Final = frozenset({"at", "line"})


def configure_logging(
    level: str = "INFO", *, as_json: bool = False, stream: TextIO | None = None, redact: str = ""
) -> None:
    """Send log lines of this process to a stream.

    By default that is standard error, and no thread waits for its reader: see `outlet`. A stream that is given is
    written in the thread of the line.

    Secrets are taken out of facts, messages and exceptions, see `redaction`; `redact` names further facts, with commas
    between. Tracebacks are printed without the values of variables, which may be secrets. The format is fixed text and
    a patcher fills in the facts: a format that is a function would be parsed anew for each line.
    """
    global _least, _redactor, _writer
    _redactor = Redactor(redact)
    to, guard = stream or without_waiting(sys.stderr), renewed(threading.Lock())
    _least = logger.level(level.upper()).no
    logger.configure(
        handlers=[
            {
                "sink": _Redacted(to, guard),
                "level": level.upper(),
                "format": _JSON if as_json else _TEXT,
                "colorize": False if as_json else None,
                "backtrace": False,
                "diagnose": False,
            }
        ],
        patcher=_as_json if as_json else _as_text,
    )
    _writer = writer = LogWriter(logger, to, guard, as_json=as_json, plain=_plain)
    if (outlet := outlet_of(to)) is not None:
        outlet.said = lambda number: writer.line("WARNING", "log lines were dropped", [("lines", number)])


def adopt_lines(*libraries: str) -> None:
    """Write what these libraries log as lines of ours, warnings and errors only; they would print bare ones."""
    for name in libraries:
        library = logging.getLogger(name)
        library.handlers = [_LibraryLines(logging.WARNING)]
        library.propagate = False


class _LibraryLines(logging.Handler):
    """Writes the lines of a library's logger as ours, with its name as a fact."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            bound = logger.bind(library=record.name).opt(exception=record.exc_info)
            bound.log(record.levelname, "{}", record.getMessage())
        except Exception:
            self.handleError(record)


def warn(sentence: str) -> None:
    """Log what a command sees before its agent begins."""
    logger.warning(sentence)


class _Redacted:
    """A stream that gets lines with a traceback, which the logger itself makes, without secrets too."""

    def __init__(self, stream: TextIO, guard: threading.Lock) -> None:
        self._stream = stream
        self._guard = guard

    def write(self, line: str) -> None:
        record = getattr(line, "record", None)
        shown = _redactor.text(line) if record and record["exception"] else line
        with self._guard:
            self._stream.write(shown)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def task_scope(running: Running) -> AbstractContextManager[None]:
    """Bind task id, fence, attempt and trace to every line that is logged inside, in this thread or coroutine."""
    lease = running.lease
    facts: dict[str, Any] = {"task_id": lease.task_id, "fence": lease.fence, "attempt": lease.task.attempt}
    if (trace := trace_id(CURRENT.get() or lease.task.traceparent)) is not None:
        facts["trace_id"] = trace
    return logger.contextualize(**facts)


Line = tuple[str, str, dict[str, Any]]
"""Level, message and facts of a line."""

_least = 0
_redactor = Redactor()
_writer: LogWriter | None = None


class Telemetry:
    """Listens to a bus, writes lines and counts."""

    def __init__(self, bus: EventBus) -> None:
        self._guard = renewed(threading.Lock())
        self._counts: Counter[str] = Counter()
        self.active_connections: int | None = None
        """The gauge ActiveConnections, each half minute; None for an agent without streams."""
        bus.subscribe(self.listen, several=self.listen_to_all)

    def listen(self, event: Event) -> None:
        """Count the event and write its line."""
        self.listen_to_all((event,))

    def listen_to_all(self, several: Sequence[Event]) -> None:
        """Count events that happened together; their lines are written at once, which costs as much as for one."""
        lines: list[Line] = []
        for event in several:
            self._listen(event, lines)
        self._write(lines)

    def _listen(self, event: Event, lines: list[Line]) -> None:
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
            if logger.level(level).no < _least:  # before the facts are gathered, which costs more than the line
                return
            lines.append((level, message, _facts(event)))

    def _write(self, lines: Sequence[Line]) -> None:
        writer = _writer
        if writer is not None and writer.may_write:
            writer.write([(level, message, _shown(facts)) for level, message, facts in lines])
            return
        for level, message, facts in lines:
            logger.bind(**facts).log(level, message)

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


def _as_text(record: Record) -> None:
    extra = record["extra"]
    record["message"] = _redactor.text(record["message"])
    extra["line"] = " ".join(f"{name}={_plain(value)}" for name, value in _shown(extra))
    extra["at"] = utc(record["time"]).replace("T", " ", 1)[:23] + "Z"


def _shown(extra: dict[Any, Any]) -> list[tuple[str, Any]]:
    value_of = _redactor.value
    return [(name, value_of(name, value)) for name, value in extra.items() if value is not None and name not in _OURS]


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, int):
        return str(value)
    text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return json.dumps(text, ensure_ascii=False) if _QUOTED.search(text) else text


def _as_json(record: Record) -> None:
    extra = record["extra"]
    line: dict[str, Any] = {
        "time": utc(record["time"]),
        "level": record["level"].name,
        "message": _redactor.text(record["message"]),
        **dict(_shown(extra)),
    }
    if record["exception"] is not None:
        line["exception"] = _redactor.text(repr(record["exception"].value))
        record["exception"] = None
    extra["line"] = json.dumps(line, default=str, ensure_ascii=False)
