"""The port of the local gateway for WebSockets: closed at once when a region is lost, and opened again."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final
from weakref import WeakSet

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.http11 import Request, Response

HOST: Final = "127.0.0.1"
CLOSE_S: Final = 2.0
"""Longest wait for a client's answer to a close."""
_BACKLOG: Final = 1024


@dataclass(eq=False, slots=True)
class Peer:
    """A client that may connect, and its socket."""

    id: str
    authorizer: Mapping[str, Any]
    protocol: str | None
    opened_at: float
    socket: Socket | None = None
    active_at: float = 0.0
    is_lost: bool = False
    """The region was cut: there is no `$disconnect`."""
    handling: set[asyncio.Task[None]] = field(default_factory=set)


class Socket(ServerConnection):
    peer: Peer


class Door:
    """Listens on one port.

    Args:
        port: 0: a free one.
        serve: runs an open connection.
        request: the answer to a request; None: it may connect, and its socket has a peer.
        max_size: bytes of a message and of a frame.
    """

    def __init__(
        self,
        port: int,
        *,
        serve: Callable[[Socket], Awaitable[None]],
        request: Callable[[Socket, Request], Awaitable[Response | None]],
        max_size: tuple[int, int],
    ) -> None:
        self.port = port
        self._serve = serve
        self._request = request
        self._max_size = max_size
        self._sockets = WeakSet[Socket]()
        self._server: Server | None = None
        self._held: socket.socket | None = None

    async def open(self) -> None:
        """Listen; the port is known then.

        Raises:
            OSError: the port is taken.
        """
        sock, self._held = self._held or bound(self.port), None
        self.port = sock.getsockname()[1]
        sock.listen(_BACKLOG)
        self._server = await serve(
            self._serve,  # type: ignore[arg-type] # all connections are of our class
            sock=sock,
            process_request=self._request,  # type: ignore[arg-type]
            select_subprotocol=lambda connection, _: getattr(connection, "peer").protocol,  # noqa: B009
            create_connection=self._made,  # type: ignore[arg-type] # "a wrapper or a subclass"
            compression=None,  # as API Gateway
            ping_interval=None,
            close_timeout=CLOSE_S,
            max_size=self._max_size,
            backlog=_BACKLOG,
        )

    def slam(self) -> None:
        """Reset all connections and refuse new ones; keep the port."""
        if self._server is not None:
            self._server.close(close_connections=False)
            self._server.server.close()  # now, and not when its task runs
            self._server = None
            self._held = bound(self.port)
        elif self._held is not None:  # it was unlocked just now
            self._held.close()
            self._held = bound(self.port)
        self._abort()

    def unlock(self) -> None:
        """Let connects wait for `open`."""
        if self._held is not None:
            self._held.listen(_BACKLOG)

    async def close(self) -> None:
        """Close all connections in bounded time, and free the port."""
        server, self._server = self._server, None
        if server is not None:
            server.close(code=1001, reason="Going away")
            with suppress(TimeoutError):
                await asyncio.wait_for(server.wait_closed(), CLOSE_S + 1)
        self._abort()
        if self._held is not None:
            self._held.close()

    def _abort(self) -> None:
        for connection in list(self._sockets):
            with suppress(AttributeError):  # it has no transport yet
                connection.transport.abort()

    def _made(self, *arguments: Any, **options: Any) -> Socket:
        connection = Socket(*arguments, **options)
        self._sockets.add(connection)
        return connection


def bound(port: int) -> socket.socket:
    """A socket that holds a port of the loopback address and does not listen."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((HOST, port))
    except OSError:
        sock.close()
        raise
    return sock
