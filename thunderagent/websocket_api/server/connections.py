"""The connections of users.

The row of a connection is older than its place in the list of its user, and is deleted after it. `$disconnect` may
never come, so rows expire after more than the two hours of a connection. A connect that finds the list full looks which
connections still have a row, and probes those.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Final

from thunderagent.model.clock import since_boot
from thunderagent.model.errors import StoreError, ThunderAgentError
from thunderagent.stores.engine import Applied, Engine
from thunderagent.websocket_api.protocol import Kind, encode
from thunderagent.websocket_api.records import (
    MOST_CONNECTIONS,
    Bucket,
    add_connection,
    connection_id_of,
    connection_row,
    connections_id,
    connections_row,
    forget_connection,
    holders_of,
    remove_connection,
    replace_connections,
    spend,
)
from thunderagent.websocket_api.server.throttle import CONNECT_BURST, CONNECT_RATE, MOST_ROWS, Throttled

FLOOD_CONNECTS: Final = 20.0
"""Connects that a flooding connection costs its user: after five such in a row the next one must wait."""

PROBE_S: Final = 5.0
"""How long a connect may look for connections that are gone."""
_TRIES: Final = 5
"""Attempts to replace a list that changes meanwhile."""


class Connections:
    """The lists of connections of one region. Its methods raise `StoreError` when the store does not answer.

    Args:
        engine: the table of connections.
        now: epoch seconds.
        post: sends a text to a connection and returns whether it lives; None: rows are trusted.
        monotonic: seconds.
        rate: connects of a user in a second.
    """

    def __init__(
        self,
        engine: Engine,
        now: Callable[[], float],
        post: Callable[[str, str], bool] | None = None,
        *,
        monotonic: Callable[[], float] = since_boot,
        rate: float = CONNECT_RATE,
    ) -> None:
        self._engine = engine
        self._now = now
        self._post = post
        self._monotonic = monotonic
        self._connects = Bucket("handoffUntil", rate, CONNECT_BURST)
        self._until: dict[str, float] = {}
        """Until when users that connect too often are refused without a write."""

    def open(self, connection: str, user: str) -> bool:
        """List a connection. False: the user has `MOST_CONNECTIONS`, and all of them may live.

        Raises:
            Throttled: the user connects too often.
        """
        now = self._now()
        if (left := self._until.get(user, 0.0) - now) > 0:
            raise Throttled(left)
        [applied] = self._engine.put([connection_row(connection, user, now=now)])
        _checked(applied)
        try:
            if self._list(connection, user, now):
                return True
        except Throttled as error:
            while len(self._until) >= MOST_ROWS:
                del self._until[next(iter(self._until))]
            self._until[user] = now + error.wait_s
            self._forget(connection, user)
            raise
        self._forget(connection, user)
        return False

    def _list(self, connection: str, user: str, now: float) -> bool:
        connects, was_full = self._connects, True
        for _ in range(_TRIES):
            [applied] = self._engine.apply([add_connection(user, connection, connects, now=now, was_full=was_full)])
            if _checked(applied).won:
                return True
            if applied.row is None:
                [applied] = self._engine.put([connections_row(user, [connection], connects, now=now)])
                if _checked(applied).won:
                    return True
                continue
            seen = holders_of(applied.row)
            if connection in seen:
                return True
            if (left_s := connects.wait_s(applied.row, 1, now)) > 0:
                raise Throttled(left_s)
            was_full = connects.is_full(applied.row, now)
            if len(seen) < MOST_CONNECTIONS:
                continue
            left = self._living(seen)
            if len(left) >= MOST_CONNECTIONS:
                left = self._answering(left)
            if len(left) >= MOST_CONNECTIONS:
                break
            write = replace_connections(user, seen, left | {connection}, connects, now=now, was_full=was_full)
            [applied] = self._engine.apply([write])
            if _checked(applied).won:
                return True
        return False

    def _forget(self, connection: str, user: str) -> None:
        with suppress(StoreError):  # it expires
            self._engine.apply([forget_connection(connection, user)])

    def flooded(self, user: str) -> None:
        """Charge the user `FLOOD_CONNECTS` for a connection that was closed for flooding."""
        now = self._now()
        for was_full in (True, False):
            write = spend(
                connections_id(user), self._connects, FLOOD_CONNECTS, now=now, was_full=was_full, into_debt=True
            )
            if _checked(self._engine.apply([write])[0]).won:
                return

    def close(self, connection: str, user: str) -> None:
        """Take a connection out of the list. A repeated call changes nothing."""
        for applied in self._engine.apply([remove_connection(user, connection), forget_connection(connection, user)]):
            _checked(applied)

    def of(self, user: str) -> frozenset[str]:
        """The connections that are listed. Some may have ended."""
        row_id = connections_id(user)
        return holders_of(self._engine.get([row_id]).get(row_id))

    def _living(self, connections: frozenset[str]) -> frozenset[str]:
        now = self._now()
        rows = self._engine.get([connection_id_of(one) for one in sorted(connections)])
        return frozenset(
            one
            for one in connections
            if (row := rows.get(connection_id_of(one))) is not None and row.get("expireAt", 0) > now
        )

    def _answering(self, connections: frozenset[str]) -> frozenset[str]:
        """The connections that take a probe, or are not known to be gone, within `PROBE_S`."""
        if self._post is None:
            return connections
        until, gone = self._monotonic() + PROBE_S, list[str]()
        for one in sorted(connections):
            if self._monotonic() >= until:
                break
            with suppress(ThunderAgentError):  # it may live
                if not self._post(one, encode({"type": Kind.PROBE})):
                    gone.append(one)
        return connections.difference(gone)


def _checked(applied: Applied) -> Applied:
    if applied.error is not None:
        raise applied.error
    return applied
