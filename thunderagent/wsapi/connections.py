"""The connections of users: who is connected, and for how long it is believed.

A connection has a row from before it is listed to after it is taken from the list. `$disconnect` may never come: rows
go by themselves after more than the two hours that a connection can last, and whoever finds the list of a user full
looks which of them still have a row, and sends to those to find out which are still there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Final

from thunderagent.clock import since_boot
from thunderagent.errors import StoreError, ThunderAgentError
from thunderagent.port import Applied, Engine
from thunderagent.websocket_messages import Kind, encode
from thunderagent.websocket_writes import (
    MOST_CONNECTIONS,
    add_connection,
    connection_id_of,
    connection_row,
    connections_row,
    forget_connection,
    holders_of,
    remove_connection,
    replace_connections,
)

PROBE_S: Final = 5.0
"""How long a connect may look for connections that are gone."""
_TRIES: Final = 5
"""How often a list is replaced that changes meanwhile."""


class Connections:
    """The lists of connections of one region.

    Args:
        engine: the table of connections.
        now: epoch seconds.
        post: sends a text to a connection, and answers whether it is still there; None: a row is believed.
        monotonic: seconds.
    """

    def __init__(
        self,
        engine: Engine,
        now: Callable[[], float],
        post: Callable[[str, str], bool] | None = None,
        *,
        monotonic: Callable[[], float] = since_boot,
    ) -> None:
        self._engine = engine
        self._now = now
        self._post = post
        self._monotonic = monotonic

    def open(self, connection: str, user: str) -> bool:
        """List a connection. False: the user has as many as one may have, and all of them may live.

        Raises:
            StoreError: the store did not answer; the connection may be listed.
        """
        now = self._now()
        [applied] = self._engine.put([connection_row(connection, user, now=now)])
        _checked(applied)
        for _ in range(_TRIES):
            [applied] = self._engine.apply([add_connection(user, connection, now=now)])
            if _checked(applied).won:
                return True
            if applied.row is None:
                [applied] = self._engine.put([connections_row(user, [connection], now=now)])
                if _checked(applied).won:
                    return True
                continue
            seen = holders_of(applied.row)
            if connection in seen:
                return True
            left = self._living(seen)
            if len(left) >= MOST_CONNECTIONS:
                left = self._answering(left)
            if len(left) >= MOST_CONNECTIONS:
                break
            [applied] = self._engine.apply([replace_connections(user, seen, left | {connection}, now=now)])
            if _checked(applied).won:
                return True
        with suppress(StoreError):  # it goes by itself, later
            self._engine.apply([forget_connection(connection, user)])
        return False

    def close(self, connection: str, user: str) -> None:
        """Take a connection that is over from the list; doing it again changes nothing.

        Raises:
            StoreError: the store did not answer.
        """
        for applied in self._engine.apply([remove_connection(user, connection), forget_connection(connection, user)]):
            _checked(applied)

    def of(self, user: str) -> frozenset[str]:
        """The connections that are listed. Some may be over.

        Raises:
            StoreError: the store did not answer.
        """
        row_id = connections_row(user, (), now=0.0)["taskId"]
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
        """Those that take a probe, or of which nobody knows; within a bounded time."""
        if self._post is None:
            return connections
        until, gone = self._monotonic() + PROBE_S, list[str]()
        for one in sorted(connections):
            if self._monotonic() >= until:
                break
            with suppress(ThunderAgentError):  # it may be there
                if not self._post(one, encode({"type": Kind.PROBE})):
                    gone.append(one)
        return connections.difference(gone)


def _checked(applied: Applied) -> Applied:
    if applied.error is not None:
        raise applied.error
    return applied
