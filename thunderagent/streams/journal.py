"""The journal of a stream: the moves of its connections with their reasons, and what it missed.

Each run has a row of its own, named by its fence, so that an agent that lost the lease overwrites no other run. The row
has no status and so no index entry, and is written seldom: never for a heartbeat.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from typing import Any, Final

from thunderagent.model.errors import StoreRejected, StreamFailed
from thunderagent.model.rows import Unreadable, is_number
from thunderagent.model.task import Status, Task, timestamp
from thunderagent.model.writes import agents as agent_writes
from thunderagent.model.writes import tasks as writes
from thunderagent.stores.tasks import TaskStore
from thunderagent.streams.connection.ending import CAUGHT_UP, NEXT_ATTEMPT, State
from thunderagent.streams.cursor import Cursor

MOVES_KEPT: Final = 50
GAPS_KEPT: Final = 100
PAUSE_S: Final = 60.0
COUNTS_S: Final = 900.0
"""Shortest time between two writes for new counts alone: a write is billed by the kilobyte of the whole row."""

_STEPS: Final = (State.RESOLVING, State.CONNECTING, State.SUBSCRIBING)
_OVER: Final = (State.CLOSED, State.FAILED)
REASON_BYTES: Final = 300
_COUNTS: Final = ("connects", "handled", "duplicates", "unsent")


@dataclass(frozen=True, slots=True)
class Move:
    """A change of a stream's state; `at` is in epoch seconds."""

    at: float
    state: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Link:
    """Connected or not, and since when; times are in epoch seconds."""

    is_connected: bool
    since: float
    reason: str = ""
    """Why it is not connected; empty before its first attempt has ended."""
    next_at: float | None = None
    """When the next attempt is due; None while it is connected or tries."""


@dataclass(frozen=True, slots=True)
class Missed:
    """A gap in the journal: the places around it, the number of messages if it is known, and the action."""

    at: float
    cause: str
    after: Mapping[str, Any]
    before: Mapping[str, Any]
    missed: int | None
    action: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of a stream, under one fence."""

    fence: int
    agent: str
    moves: Sequence[Move] = ()
    """The last fifty, oldest first."""
    gaps: Sequence[Missed] = ()
    """The last hundred, oldest first."""
    connects: int = 0
    handled: int = 0
    duplicates: int = 0
    unsent: int = 0
    link: Link | None = None
    """None: it made no connection, or its agent has an older version."""


class Journal:
    """The journal of the present run. Written in the loop's thread, read in the agent's."""

    def __init__(self, task_id: str, fence: int, agent: str) -> None:
        self.journal_id = journal_id(task_id, fence)
        self._agent = agent
        self._moves: list[Move] = []
        self._gaps: list[Missed] = []
        self._links: dict[object, Link] = {}
        self._guard = threading.Lock()
        self._is_new = False
        self._counts: Mapping[str, int] = {}
        self._taken_at = 0.0

    @property
    def link(self) -> Link | None:
        """The link of the feeds; of several that are not connected, the one that is away longest."""
        with self._guard:
            return self._link()

    def _link(self) -> Link | None:
        links = self._links.values()
        away = [link for link in links if not link.is_connected]
        return min(away, key=_since) if away else max(links, key=_since, default=None)

    def moved(self, at: float, state: str, reason: str = "", *, feed: object = None, wait_s: float = 0.0) -> None:
        """Add a move. So that fifty reach far, an attempt's end replaces its steps, and pauses in a row are one.

        Args:
            state: where the feed, or the run, is now.
            feed: the feed that moved; None for the run itself.
            wait_s: seconds to the next attempt.
        """
        with self._guard:
            steps = list(takewhile(_is_step, reversed(self._moves)))
            if state == State.PAUSED and self._has_just_caught_up(at):
                del self._moves[-1]
                return
            if steps and state in (State.LIVE, State.BACKOFF):
                del self._moves[-len(steps) :]
                reason = _with_steps(state, reason, at, steps)
            elif steps and state not in _STEPS:  # it ended on its way: the last step stays
                del self._moves[-len(steps) : -1]
            why, mark, after = reason.partition(NEXT_ATTEMPT)
            why, after = writes.cut(why, REASON_BYTES), mark + after
            self._moves.append(Move(timestamp(at), state, why + after))
            del self._moves[:-MOVES_KEPT]
            self._is_new = True
            if feed is not None and state in _OVER:
                self._links.pop(feed, None)
            elif feed is not None:
                self._links[feed] = _after(self._links.get(feed), timestamp(at), state, why, wait_s)

    def _has_just_caught_up(self, at: float) -> bool:
        """True when the last move ended a pause less than a minute ago."""
        last = self._moves[-2:]
        return (
            [move.state for move in last] == [State.PAUSED, State.LIVE]
            and last[1].reason == CAUGHT_UP
            and at - last[1].at < PAUSE_S
        )

    def missed(self, gap: Missed) -> None:
        with self._guard:
            self._gaps.append(gap)
            del self._gaps[:-GAPS_KEPT]
            self._is_new = True

    def take(self, now: float, **counts: int) -> dict[str, Any] | None:
        """The whole journal if there is something new since the last call, or other counts after `COUNTS_S`.

        Args:
            now: any clock, in seconds.
        """
        with self._guard:
            is_due = counts != self._counts and now - self._taken_at >= COUNTS_S
            if not self._is_new and not is_due:
                return None
            self._is_new, self._taken_at, self._counts = False, now, counts
            return {
                "agent": self._agent,
                "moves": [[move.at, move.state, move.reason] for move in self._moves],
                "gaps": [asdict(gap) for gap in self._gaps],
                **({"link": asdict(link)} if (link := self._link()) is not None else {}),
                **counts,
            }

    def keep(self) -> None:
        """Let `take` answer with the same journal again, as it could not be written."""
        with self._guard:
            self._is_new = True


def _since(link: Link) -> float:
    return link.since


def _after(link: Link | None, at: float, state: str, reason: str, wait_s: float) -> Link:
    if state == State.PAUSED or (state == State.LIVE and reason == CAUGHT_UP):
        return link or Link(True, at)
    if state == State.LIVE:
        return Link(True, at)
    away = link if link is not None and not link.is_connected else Link(False, at)
    if state == State.BACKOFF:
        return replace(away, reason=reason, next_at=timestamp(at + wait_s))
    return replace(away, next_at=None)


def _is_step(move: Move) -> bool:
    return move.state in _STEPS and not move.reason


def _with_steps(state: str, reason: str, at: float, steps: Sequence[Move]) -> str:
    """The reason of an attempt's end, with how far it came; steps come newest first."""
    if state == State.LIVE and not reason:
        return f"connected in {at - steps[-1].at:.1f} s"
    return f"while {steps[0].state}: {reason}" if state == State.BACKOFF else reason


def read_cursor(task: Task) -> Cursor | None:
    """The cursor in the row of a stream.

    Raises:
        StreamFailed: something else was written there by hand.
    """
    try:
        return Cursor.from_map(task.last_seq)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise StreamFailed(f"the lastSeq of the row is no cursor ({error!r}): correct it or remove it") from error


def journal_id(task_id: str, fence: int) -> str:
    return f"journal:{task_id}#{fence}"


def keep_journals(store: TaskStore, journals: Mapping[str, Mapping[str, Any]], *, keep_s: float) -> None:
    """Write journals, by `journal_id`, and keep them for so many seconds.

    Raises:
        StoreError: one of them had no answer.
    """
    now = store.clock.now()
    expire_at = int(now + keep_s)
    batch = [agent_writes.journal(name, info=info, now=now, expire_at=expire_at) for name, info in journals.items()]
    answers = store.engine.apply(batch) if batch else []
    new = [
        {"taskId": write.task_id, "info": write.set["info"], "expireAt": expire_at, "updatedAt": timestamp(now)}
        for write, answer in zip(batch, answers, strict=True)
        if not answer.won and answer.error is None
    ]
    answers += store.engine.put(new) if new else []
    for answer in answers:
        if answer.error and not isinstance(answer.error, StoreRejected):  # it never takes this one
            raise answer.error


def read_journals(store: TaskStore, task: Task, *, runs: int) -> list[Run]:
    """The journals of the last runs of a stream, oldest first; runs without one are left out."""
    fences = range(max(1, task.fence - runs + 1), task.fence + 1)
    rows = store.engine.get([journal_id(task.task_id, fence) for fence in fences])
    found = []
    for fence in fences:
        if (row := rows.get(journal_id(task.task_id, fence))) is not None:
            try:
                found.append(_run(fence, row["info"]))
            except (AttributeError, LookupError, TypeError, ValueError):
                store.unread.note(Unreadable.of(row, "info"))
    return found


def read_links(store: TaskStore, tasks: Iterable[Task]) -> dict[str, Link]:
    """The links of running streams by their last journals, read in one exchange; streams without one are left out."""
    names = {task.task_id: journal_id(task.task_id, task.fence) for task in tasks if _has_link(task)}
    rows = store.engine.get(list(names.values())) if names else {}
    infos = {task_id: rows[name].get("info") for task_id, name in names.items() if name in rows}
    links = {task_id: read_link(info.get("link")) for task_id, info in infos.items() if isinstance(info, Mapping)}
    return {task_id: link for task_id, link in links.items() if link is not None}


def _has_link(task: Task) -> bool:
    return task.is_stream and task.status is Status.RUNNING


def read_link(kept: Any) -> Link | None:
    """The link in a journal; None without one, or with one made by hand."""
    if not isinstance(kept, Mapping) or not is_number(kept.get("since")):
        return None
    next_at = kept.get("next_at")
    return Link(
        is_connected=kept.get("is_connected") is True,
        since=float(kept["since"]),
        reason=str(kept.get("reason", "")),
        next_at=float(next_at) if is_number(next_at) else None,
    )


def _run(fence: int, info: Mapping[str, Any]) -> Run:
    """The run of a journal's row.

    Raises:
        ValueError: the row is of another version, or was written by hand.
    """
    numbers = [at for at, *_ in info.get("moves", ())] + [info.get(name, 0) for name in _COUNTS]
    if not all(map(is_number, numbers)):
        raise ValueError("no account")
    return Run(
        fence=fence,
        agent=info.get("agent", "?"),
        moves=tuple(Move(*move) for move in info.get("moves", ())),
        gaps=tuple(Missed(**gap) for gap in info.get("gaps", ())),
        connects=info.get("connects", 0),
        handled=info.get("handled", 0),
        duplicates=info.get("duplicates", 0),
        unsent=info.get("unsent", 0),
        link=read_link(info.get("link")),
    )
