"""What lasts of a stream: its cursor, and its moves with their reasons and what it missed, in words.

The journal has one row for each run of a stream, named by its fence, so that whoever lost the lease overwrites nobody's
account. It has no status and thus no index entry, and is written seldom: never for a heartbeat.
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
"""Seldom, as each writing is billed by the kilobyte of the whole account."""

_STEPS: Final = (State.RESOLVING, State.CONNECTING, State.SUBSCRIBING)
_OVER: Final = (State.CLOSED, State.FAILED)
REASON_BYTES: Final = 300
_COUNTS: Final = ("connects", "handled", "duplicates", "unsent")


@dataclass(frozen=True, slots=True)
class Move:
    """A stream came into another state; `at` is in epoch seconds."""

    at: float
    state: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Link:
    """Whether a stream is connected. Times are in epoch seconds."""

    is_connected: bool
    since: float
    reason: str = ""
    """Why it is not connected; empty before its first attempt has ended."""
    next_at: float | None = None
    """When the next attempt is due; None while it is connected or tries."""


@dataclass(frozen=True, slots=True)
class Missed:
    """A gap as it is kept: the places around it, how many messages as far as that can be told, what was done."""

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
    """None: it has no connection to tell of, or its agent is of an older version."""


class Journal:
    """The account of the run that goes on. Written in the loop's thread, read in the agent's."""

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
        """Whether all feeds are connected; of several that are not, the one that is away longest."""
        with self._guard:
            return self._link()

    def _link(self) -> Link | None:
        links = self._links.values()
        away = [link for link in links if not link.is_connected]
        return min(away, key=_since) if away else max(links, key=_since, default=None)

    def moved(self, at: float, state: str, reason: str = "", *, feed: object = None, wait_s: float = 0.0) -> None:
        """Add a move. Fifty are to reach far: steps of an attempt are told by its end, and pauses in a row are one.

        Args:
            at: epoch seconds.
            state: where the feed, or the run, is now.
            reason: why.
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
                reason = _told_by_end(state, reason, at, steps)
            elif steps and state not in _STEPS:  # it ended on its way: how far it came is worth a move
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
        """Add a gap."""
        with self._guard:
            self._gaps.append(gap)
            del self._gaps[:-GAPS_KEPT]
            self._is_new = True

    def take(self, now: float, **counts: int) -> dict[str, Any] | None:
        """The whole account if there is something new since the last call, or, each quarter of an hour, other counts.

        Args:
            now: any clock, in seconds.
            counts: numbers of the run.
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
        """The account could not be written: `take` answers with it again."""
        with self._guard:
            self._is_new = True


def _since(link: Link) -> float:
    return link.since


def _after(link: Link | None, at: float, state: str, reason: str, wait_s: float) -> Link:
    """What a move of its feed makes of a link."""
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


def _told_by_end(state: str, reason: str, at: float, steps: Sequence[Move]) -> str:
    """How an attempt ended, with what its steps tell; they come newest first."""
    if state == State.LIVE and not reason:
        return f"connected in {at - steps[-1].at:.1f} s"
    return f"while {steps[0].state}: {reason}" if state == State.BACKOFF else reason


def read_cursor(task: Task) -> Cursor | None:
    """The cursor that the row of a stream keeps.

    Raises:
        StreamFailed: somebody wrote something else there by hand.
    """
    try:
        return Cursor.from_map(task.last_seq)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise StreamFailed(f"the lastSeq of the row is no cursor ({error!r}): correct it or remove it") from error


def journal_id(task_id: str, fence: int) -> str:
    """Id of the row that keeps the account of a run."""
    return f"journal:{task_id}#{fence}"


def keep_journals(store: TaskStore, journals: Mapping[str, Mapping[str, Any]], *, keep_s: float) -> None:
    """Write accounts, by `journal_id`, and keep them for so many seconds.

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
        if answer.error and not isinstance(answer.error, StoreRejected):  # an account that is never taken is left out
            raise answer.error


def read_journals(store: TaskStore, task: Task, *, runs: int) -> list[Run]:
    """The accounts of the last runs of a stream, oldest first; runs without one are left out."""
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
    """Whether streams that run are connected, as their agents last wrote it; those that have told nothing are left out.

    Reads the account of each in one exchange.
    """
    names = {task.task_id: journal_id(task.task_id, task.fence) for task in tasks if _has_link(task)}
    rows = store.engine.get(list(names.values())) if names else {}
    infos = {task_id: rows[name].get("info") for task_id, name in names.items() if name in rows}
    links = {task_id: read_link(info.get("link")) for task_id, info in infos.items() if isinstance(info, Mapping)}
    return {task_id: link for task_id, link in links.items() if link is not None}


def _has_link(task: Task) -> bool:
    return task.is_stream and task.status is Status.RUNNING


def read_link(kept: Any) -> Link | None:
    """The link that an account tells; None without one, or with one that was made by hand."""
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
    """The run that an account tells of.

    Raises:
        ValueError: the account is of another version, or was written by hand.
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
