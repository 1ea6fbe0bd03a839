"""What lasts of a stream: its cursor, and its moves with their reasons and what it missed, in words.

The journal has one row for each run of a stream, named by its fence, so that whoever lost the lease overwrites nobody's
account. It has no status and thus no index entry, and is written seldom: never for a heartbeat.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any, Final

from thunderagent import shared_writes, writes
from thunderagent.errors import StoreRejected, StreamFailed
from thunderagent.store import TaskStore
from thunderagent.streaming.cursor import Cursor
from thunderagent.streaming.ending import CAUGHT_UP, State
from thunderagent.task import Task, timestamp
from thunderagent.unreadable import Unreadable, is_number

MOVES_KEPT: Final = 50
GAPS_KEPT: Final = 100
PAUSE_S: Final = 60.0
COUNTS_S: Final = 900.0
"""Seldom, as each writing is billed by the kilobyte of the whole account."""

_STEPS: Final = (State.RESOLVING, State.CONNECTING, State.SUBSCRIBING)
REASON_BYTES: Final = 200
_COUNTS: Final = ("connects", "handled", "duplicates")


@dataclass(frozen=True, slots=True)
class Move:
    """A stream came into another state; `at` is in epoch seconds."""

    at: float
    state: str
    reason: str = ""


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


class Journal:
    """The account of the run that goes on. Written in the loop's thread, read in the agent's."""

    def __init__(self, task_id: str, fence: int, agent: str) -> None:
        self.journal_id = journal_id(task_id, fence)
        self._agent = agent
        self._moves: list[Move] = []
        self._gaps: list[Missed] = []
        self._guard = threading.Lock()
        self._is_new = False
        self._counts: Mapping[str, int] = {}
        self._taken_at = 0.0

    def moved(self, at: float, state: str, reason: str = "") -> None:
        """Add a move. Fifty are to reach far: steps of an attempt are told by its end, and pauses in a row are one."""
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
            self._moves.append(Move(timestamp(at), state, writes.cut(reason, REASON_BYTES)))
            del self._moves[:-MOVES_KEPT]
            self._is_new = True

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
                **counts,
            }

    def keep(self) -> None:
        """The account could not be written: `take` answers with it again."""
        with self._guard:
            self._is_new = True


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
    batch = [shared_writes.journal(name, info=info, now=now, expire_at=expire_at) for name, info in journals.items()]
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
    )
