"""Sends changes to the server, one at a time, each under the same id until a server has it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Final

from thunderagent.model.clock import since_boot
from thunderagent.model.errors import ChangeRefused, VersionConflict
from thunderagent.model.pacing import Backoff
from thunderagent.streams.connection.connection import Connection
from thunderagent.websocket_api.client.replica import Change, Replica
from thunderagent.websocket_api.client.session import PASSING, PASSING_LEAST_S, Session
from thunderagent.websocket_api.client.talk import Message, pause_of, text_of
from thunderagent.websocket_api.protocol import CHANGES_KEPT, Action, Kind, Problem

OVERTAKEN: Final = Backoff(base_s=0.05, cap_s=2.0)
"""Delay before a change is sent again that changes of others have overtaken twice."""


INTERNAL_TRIES: Final = 5
"""Attempts for a change that fails for an internal reason of the server."""
TOO_BIG_TRIES: Final = 2
"""Attempts for a change with which the connection ends as if it were too big."""
_TOO_BIG: Final = 1009
_IN_DOUBT: Final = (
    f"whether the change was made is not known: its answer was lost, and more than {CHANGES_KEPT} changes of others "
    "have come since; look at the state before you make it again"
)

Settled = Callable[[Change, int | Exception], None]


class Submitter:
    """Sends the head of the tail until it is cancelled.

    `settled` is called for each change with its version, or with the error of its final refusal.
    """

    def __init__(self, replica: Replica, session: Session, *, settled: Settled, rng: random.Random) -> None:
        self._replica = replica
        self._session = session
        self._settled = settled
        self._rng = rng
        self._some = asyncio.Event()
        self._failures = self._conflicts = self._internal = self._too_big = 0

    def wake(self) -> None:
        """Look for a change to send."""
        self._some.set()

    async def run(self) -> None:
        """Send until the task is cancelled."""
        while True:
            self._some.clear()
            change = self._replica.head
            if change is None:
                await self._some.wait()
                continue
            connection = await self._session.connection()
            change = self._replica.head
            if change is None:
                continue
            if self._replica.is_in_doubt(change):
                self._give_up(change, ChangeRefused(_IN_DOUBT))
                continue
            sent, before = self._replica.version, self._session.last_end
            version = self._replica.version_for(change)
            self._replica.sent(change.id, version)
            answer = await self._session.talk.ask(
                connection, Action.SET_STATE, version=version, patch=change.patch, change=change.id
            )
            end = self._session.last_end
            if answer is None and end is not before and end is not None and end.code == _TOO_BIG:
                answer = self._as_too_large(answer)
            pause_s = await self._answered(connection, change, sent, answer)
            if pause_s:
                await asyncio.sleep(pause_s)

    async def _answered(self, connection: Connection, change: Change, sent: int, answer: Message | None) -> float:
        """Handle an answer and return the seconds to wait."""
        match answer:
            case None:
                return self._passing()
            case {"type": Kind.SAVED, "version": int(version)}:
                self._start_afresh()
                is_stale = self._replica.saved(change.id, version, text_of(answer.get("region")), since_boot())
                self._settled(change, version)
                return 0.0 if not is_stale or await self._session.read(connection) else self._passing()
            case {"type": Kind.CONFLICT, "version": int(version), "state": dict(state)}:
                region = text_of(answer.get("region"))
                is_certain = change.unanswered is None or version - change.unanswered <= CHANGES_KEPT
                if is_certain:
                    self._replica.sent(change.id, None)
                self._session.again(*self._replica.conflict(sent, state, version, region, since_boot()))
                if change.expected is not None and is_certain:
                    text = f"the state has version {version} and not {change.expected}: look at it and decide again"
                    self._give_up(change, VersionConflict(text))
                    return 0.0
                self._conflicts += 1
                return OVERTAKEN.delay(self._conflicts - 2, self._rng) if self._conflicts > 1 else 0.0
            case {"type": Kind.ERROR}:
                return self._refused(change, answer)
        return self._passing()

    def _refused(self, change: Change, answer: Message) -> float:
        problem = answer.get("error")
        self._internal += problem == Problem.INTERNAL
        is_final = problem in (Problem.BAD_REQUEST, Problem.TOO_LARGE, Problem.UNKNOWN_ROUTE)
        if is_final or self._internal >= INTERNAL_TRIES:
            self._give_up(change, ChangeRefused(f"{problem}: {answer.get('message') or 'no reason given'}"))
            return 0.0
        if problem == Problem.THROTTLED and change.unanswered is None:  # no attempt has done anything
            self._replica.sent(change.id, None)
        return pause_of(answer) + self._passing()

    def _as_too_large(self, answer: Message | None) -> Message | None:
        """The connection ended as if this change were too big; the second time it is refused."""
        self._too_big += 1
        if self._too_big < TOO_BIG_TRIES:
            return answer
        text = f"the connection was ended with {_TOO_BIG} each time that this change was sent; make it smaller"
        return {"type": Kind.ERROR, "error": Problem.TOO_LARGE, "message": text}

    def _give_up(self, change: Change, error: ChangeRefused) -> None:
        self._start_afresh()
        self._replica.drop(change.id)
        self._settled(change, error)

    def _start_afresh(self) -> None:
        """Forget the failures of this change before the next one."""
        self._failures = self._conflicts = self._internal = self._too_big = 0

    def _passing(self) -> float:
        self._failures += 1
        return max(PASSING_LEAST_S, PASSING.delay(self._failures - 1, self._rng))
