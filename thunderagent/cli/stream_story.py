"""A stream in words: its state, its runs with their moves and reasons, and what it missed."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from datetime import time as time_of_day
from typing import Final

from rich.markup import escape
from rich.table import Table

from thunderagent.agent.housekeeping import JOURNAL_S
from thunderagent.cli.output import colour, cursor_text, handoff_text, out
from thunderagent.model.errors import ConfigurationError
from thunderagent.model.task import Desired, Status, Task
from thunderagent.ops.waiting import link_text
from thunderagent.streams.connection.ending import CAUGHT_UP, NEXT_ATTEMPT, State
from thunderagent.streams.cursor import GapAction
from thunderagent.streams.journal import MOVES_KEPT, Missed, Move, Run

# The state


def since_of(task: Task) -> float | None:
    if task.status.is_terminal:
        return task.finished_at
    return task.started_at if task.status is Status.RUNNING else task.created_at


def now_of(task: Task, now: float) -> str:
    """The state of a stream in a line."""
    parts = []
    if task.desired_state == Desired.STOPPED and not task.status.is_terminal:
        parts.append("stop requested")
    if handoff := handoff_text(task, now):
        parts.append(handoff)
    match task.status:
        case Status.RUNNING:
            is_over = task.lock_time is not None and task.lock_time < now
            parts.append(f"by {task.lease_owner}" + (", whose lease has expired" if is_over else ""))
        case Status.PENDING if task.created_at > now:
            parts.append(f"in {task.created_at - now:.0f} s")
        case Status.PENDING:
            parts.append("waits for an agent")
        case Status.BLOCKED:
            parts.append(f"waits for {', '.join(sorted(task.waiting_for))}")
        case Status.DONE:
            parts.append(task.done_reason or "")
    if task.status in (Status.PENDING, Status.FAILED) and task.error:
        parts.append(_first_line(task.error))
    return ", ".join(filter(None, parts))


# The head


def show_head(task: Task, now: float, run: Run | None) -> None:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _facts(task, now, run):
        table.add_row(f"[dim]{name}[/dim]", value)
    out.print(table)


def _facts(task: Task, now: float, run: Run | None) -> Iterator[tuple[str, str]]:
    yield "stream", escape(task.task_id)
    yield "job", escape(f"{task.job_value} in the queue {task.queue}")
    since = since_of(task)
    yield "state", colour(task.status) + (f" since {at_text(since)}" if since else "")
    if text := now_of(task, now):
        yield "", escape(text)
    if task.status is Status.RUNNING and run is not None and run.link is not None:
        yield "connection", escape(link_text(run.link, now, at_text))
    if task.last_agent and task.status is not Status.RUNNING:
        yield "last agent", escape(task.last_agent)
    yield "cursor", escape(cursor_text(task.last_seq) or "none yet")
    counted = f"fence {task.fence}, lost agents {task.crash_count}, retries {task.retry_count}"
    yield "counted", counted
    if run is not None:
        name = "this run" if task.status is Status.RUNNING else "last run"
        numbers = f"connects {run.connects}, handled {run.handled}, duplicates dropped {run.duplicates}"
        numbers += f", not sent {run.unsent}" if run.unsent else ""
        latest = max((*(move.at for move in run.moves), *(gap.at for gap in run.gaps)), default=None)
        when = f"; as of its last move or gap, {at_text(latest)}" if latest and task.status is Status.RUNNING else ""
        yield name, f"{numbers}, gaps {len(run.gaps)}{when}"
    yield "times", f"local, {_local(now):%Z (UTC%z)}"


# The runs


@dataclass(frozen=True, slots=True)
class Line:
    """A line of one or several moves."""

    at: float
    state: str
    text: str


READS_AGAIN: Final = CAUGHT_UP
_ON_THE_WAY: Final = (State.RESOLVING, State.CONNECTING, State.SUBSCRIBING)
_OPEN: Final = ("leased", *_ON_THE_WAY, State.LIVE, State.PAUSED, State.BACKOFF)
_STATE_COLOURS: Final[Mapping[str, str]] = {
    "live": "green",
    "backoff": "yellow",
    "paused": "yellow",
    "failed": "red",
    "fail": "red",
    "retry": "red",
    "lost": "red",
}


def lines_of(moves: Sequence[Move]) -> list[Line]:
    """Moves for people: an attempt is one line with its end, and repeated attempts are one line."""
    lines: list[Line] = []
    steps: list[Move] = []
    for move in moves:
        if move.state in _ON_THE_WAY and not move.reason:
            steps.append(move)
            continue
        text = move.reason
        if move.state == State.LIVE and not text:
            is_again = bool(lines) and lines[-1].state == State.PAUSED
            text = READS_AGAIN if is_again else f"connected in {move.at - steps[0].at:.1f} s" if steps else ""
        elif move.state == State.BACKOFF and steps:
            text = f"while {steps[-1].state}: {text}"
        lines.append(Line(move.at, move.state, text))
        steps = []
    if steps:
        lines.append(Line(steps[-1].at, steps[-1].state, ""))
    return list(_without_repetitions(lines))


def _without_repetitions(lines: Sequence[Line]) -> Iterator[Line]:
    number = 0
    while number < len(lines):
        first = last = lines[number]
        same, seconds = 0, 0.0
        if first.state == State.PAUSED:
            while number + 1 < len(lines) and _is_pause(*lines[number : number + 2]):
                seconds += lines[number + 1].at - lines[number].at
                last, same, number = lines[number + 1], same + 1, number + 2
        elif first.state == State.BACKOFF:
            while number < len(lines) and _is_same(first, lines[number]):
                last, same, number = lines[number], same + 1, number + 1
        times = f"{same} times until {at_text(last.at, with_date=False)}" if same > 1 else ""
        if not same:
            yield first
            number += 1
        elif first.state == State.PAUSED:
            yield replace(first, text=f"{times}{times and ', '}{seconds:.1f} s in all: {first.text}")
        else:
            yield replace(first, text=f"{times}{times and ': '}{last.text}")


def _is_pause(before: Line, after: Line) -> bool:
    return before.state == State.PAUSED and (after.state, after.text) == (State.LIVE, READS_AGAIN)


def _is_same(before: Line, after: Line) -> bool:
    """Whether two attempts failed in the same way, whatever delay followed."""
    texts = [one.text.partition(NEXT_ATTEMPT)[0] for one in (before, after)]
    return before.state == after.state and texts[0] == texts[1]


def show_runs(task: Task, shown: Sequence[Run], known: set[int], first: int) -> None:
    """Print runs, oldest first; runs without a journal are named together."""
    by_fence = {run.fence: run for run in shown}
    fences = sorted({*by_fence, *(fence for fence in range(first, task.fence + 1) if fence not in known)})
    for is_told, group in itertools.groupby(fences, key=by_fence.__contains__):
        if is_told:
            for fence in group:
                _show_run(by_fence[fence], is_present=fence == task.fence, is_running=task.status is Status.RUNNING)
            continue
        missing = list(group)
        if missing[-1] == task.fence and task.status is Status.RUNNING:
            missing.pop()
            _no_account(missing)
            out.print(
                f"\n[bold]run {task.fence}[/bold] by {escape(task.lease_owner or '?')}\n"
                f"  nothing is written yet: its agent writes its journal every {JOURNAL_S:g} s",
                soft_wrap=True,
            )
        else:
            _no_account(missing)


def _no_account(missing: Sequence[int]) -> None:
    if missing:
        name = f"run {missing[0]}" if len(missing) == 1 else f"runs {missing[0]} to {missing[-1]}"
        out.print(f"\n[bold]{name}[/bold]\n  [dim]nothing is left: too short to be written, or too old[/dim]")


def _show_run(run: Run, *, is_present: bool, is_running: bool) -> None:
    begun = (run.moves or run.gaps)[0].at
    out.print(f"\n[bold]run {run.fence}[/bold] by {escape(run.agent)}, {_local(begun):%Y-%m-%d}", soft_wrap=True)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    if len(run.moves) == MOVES_KEPT:
        table.add_row("", "", f"[dim]only its last {MOVES_KEPT} moves are kept[/dim]")
    day = _local(begun).date()
    for line in lines_of(run.moves):
        if _local(line.at).date() != day:
            day = _local(line.at).date()
            table.add_row(f"[dim]{day}[/dim]")
        style = _STATE_COLOURS.get(line.state, "default")
        table.add_row(f"  {at_text(line.at, with_date=False)}", f"[{style}]{line.state}[/]", escape(line.text))
    has_end = not run.moves or run.moves[-1].state not in _OPEN
    if not has_end and not (is_present and is_running):
        table.add_row("", "", "[dim]nothing more is written: its agent died, or was cut off[/dim]")
    for gap in run.gaps:
        table.add_row(
            f"  {at_text(gap.at, with_date=_local(gap.at).date() != day)}", "[red]gap[/]", escape(_story(gap))
        )
    out.print(table)


# The gaps


@dataclass(slots=True)
class Sum:
    """The sum of several gaps; a gap that was found again counts once."""

    gaps: int = 0
    messages: int = 0
    """Missed for good, as far as numbers show."""
    by_snapshot: int = 0
    """Covered by a state that was read again."""
    sent_again: int = 0
    """Requested again, and not missing any more."""
    unknown: int = 0
    """Gaps of unknown size."""


def summed(gaps: Sequence[Missed]) -> Sum:
    ends = ("key", "epoch", "seq")
    last = {tuple(place.get(end) for place in (gap.after, gap.before) for end in ends): gap for gap in gaps}
    total = Sum(gaps=len(last))
    for gap in last.values():
        if gap.missed is None:
            total.unknown += 1
        elif gap.action in (GapAction.SNAPSHOT, GapAction.AWAIT):
            total.by_snapshot += gap.missed
        elif gap.action == GapAction.RECONNECT:
            total.sent_again += gap.missed
        else:
            total.messages += gap.missed
    return total


_DONE: Final[Mapping[str, str]] = {
    GapAction.CONTINUE: "went on without",
    GapAction.SNAPSHOT: "read the state again",
    GapAction.AWAIT: "waited for a snapshot",
    GapAction.RECONNECT: "connected again for them",
    GapAction.FAIL: "failed",
}


def _story(gap: Missed) -> str:
    missed = "messages, how many is not known," if gap.missed is None else _messages(gap.missed)
    done = _DONE.get(gap.action, gap.action)
    after, before = _places(gap)
    return f"{gap.cause}: {missed} after {after} and before {before}; {done}"


def _places(gap: Missed) -> tuple[str, str]:
    """The places around a gap; their epochs only if they differ."""
    if gap.after.get("epoch") == gap.before.get("epoch"):
        after = {name: value for name, value in gap.after.items() if name != "epoch"}
        return cursor_text(after), str(gap.before.get("seq"))
    return cursor_text(gap.after), cursor_text(gap.before)


def _messages(number: int) -> str:
    return f"{number} message" if number == 1 else f"{number} messages"


def show_gaps(shown: Sequence[Run]) -> None:
    total = summed([gap for run in shown for gap in run.gaps])
    if not total.gaps:
        out.print("\nNo gaps.")
        return
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("at", "run", "cause", "missed", "after", "before", "action"):
        is_text = name in ("after", "before")
        table.add_column(name, no_wrap=not is_text, overflow="fold", justify="right" if name == "missed" else "left")
    for run in shown:
        for gap in run.gaps:
            missed = "?" if gap.missed is None else str(gap.missed)
            texts = (*_places(gap), gap.action)
            table.add_row(at_text(gap.at), str(run.fence), escape(gap.cause), missed, *map(escape, texts))
    out.print()
    out.print(table)
    parts = [f"{_messages(total.messages)} missed for good"]
    for number, what in ((total.by_snapshot, "made up for by a snapshot"), (total.sent_again, "sent again")):
        if number:
            parts.append(f"{_messages(number)} {what}")
    if total.unknown:
        parts.append(f"{total.unknown} of unknown size")
    out.print(f"\n{total.gaps} {'gap' if total.gaps == 1 else 'gaps'}: {', '.join(parts)}")


# Times and texts


def begin_of(text: str, now: float) -> float:
    """The moment that `--since` names: the last 03:12 on the local clock, or a date with a time.

    Raises:
        ConfigurationError: it is neither.
    """
    try:
        if not re.fullmatch(r"\d{1,2}:\d{2}(:\d{2})?", text):
            return datetime.fromisoformat(text).timestamp()
        clock = time_of_day.fromisoformat(text.rjust(8 if text.count(":") == 2 else 5, "0"))
    except ValueError:
        raise ConfigurationError(
            f"--since is {text!r}; write a time such as 03:12, or a date with it such as 2026-11-29T03:12"
        ) from None
    today = _local(now).date()
    return next(
        at
        for day in (today, today - timedelta(days=1))
        if (at := datetime.combine(day, clock).timestamp()) <= now or day != today
    )


def cut(run: Run, begin: float | None) -> Run:
    if begin is None:
        return run
    return replace(
        run,
        moves=tuple(move for move in run.moves if move.at >= begin),
        gaps=tuple(gap for gap in run.gaps if gap.at >= begin),
    )


def _local(at: float) -> datetime:
    return datetime.fromtimestamp(at).astimezone()


def at_text(at: float | None, *, with_date: bool = True) -> str:
    return "" if at is None else _local(at).strftime("%Y-%m-%d %H:%M:%S" if with_date else "%H:%M:%S")


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def short(text: str, room: int) -> str:
    return text if len(text) <= room else text[: room - 1] + "…"
