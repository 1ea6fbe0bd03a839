"""One live connection: its reader, its watch, and what `on_open` may do with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from websockets.asyncio.client import ClientConnection
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Response
from websockets.typing import Data

from thunderagent.errors import StreamFailed
from thunderagent.streaming.buffer import Buffer
from thunderagent.streaming.ending import Cause, ConnectionEnd, State, end_of
from thunderagent.streaming.liveness import Liveness, Pings
from thunderagent.streaming.options import StreamOptions
from thunderagent.streaming.transport import abort_connection, close_connection

_ACCEPTED: Final = Response(101, "", Headers())


class Connection:
    """An open WebSocket. `on_open` is given one to authenticate and to subscribe; handlers may send on it."""

    __slots__ = ("_cut", "_liveness", "_options", "_socket", "_took")

    def __init__(
        self, opened: ClientConnection, options: StreamOptions, pings: Callable[[Connection], Pings] | None = None
    ) -> None:
        self._socket = opened
        self._options = options
        self._cut: tuple[Cause, str] | None = None
        self._took: list[Data] = []
        self._liveness = Liveness(pings(self) if pings else opened, options, self.cut)

    @property
    def subprotocol(self) -> str | None:
        """The subprotocol that the peer chose."""
        return self._socket.subprotocol

    @property
    def response_headers(self) -> Mapping[str, str]:
        """Headers of the peer's answer to the handshake; in `on_open` alone, afterwards they are forgotten."""
        response = self._socket.response
        return response.headers if response is not None else {}

    async def send(self, message: str | bytes) -> None:
        """Send a message; waits while the peer takes nothing.

        Raises:
            websockets.exceptions.ConnectionClosed: the connection has ended; the feed connects again by itself.
        """
        await self._socket.send(message)

    async def send_json(self, value: Any) -> None:
        """Send a value as JSON text."""
        await self._socket.send(json.dumps(value, separators=(",", ":")))

    async def recv(self) -> Data:
        """The next message; for `on_open` alone, whose messages no handler sees."""
        return await self._socket.recv()

    async def expect(self, **members: Any) -> dict[str, Any]:
        """Wait for a JSON object with these members; what comes before it goes to the handler.

        Bounded by `subscribe_timeout_s`, and by `max_pending` messages.

        Raises:
            StreamFailed: too many other messages came before it.
        """
        while True:
            message = await self._socket.recv()
            try:
                value = json.loads(message)
            except ValueError:
                value = None
            if isinstance(value, dict) and members.items() <= value.items():
                return value
            if len(self._took) >= self._options.max_pending:
                raise StreamFailed(f"{len(self._took)} messages came, and none with {members}")
            self._took.append(message)

    # Inside

    def forget_handshake(self) -> None:
        """Let go of the headers that went to and fro: they are of use in `on_open` alone, and have 4 KiB."""
        for message in (self._socket.request, self._socket.response):
            if message is not None:
                message.headers.clear()  # the library's parser keeps the message itself
        self._socket.request, self._socket.response = None, _ACCEPTED

    async def read(self, buffer: Buffer, paused: Callable[[bool], None]) -> ConnectionEnd:
        """Read until the connection ends, and say how it ended. Cancelling it leaves the connection open.

        Args:
            buffer: where messages go.
            paused: told when the buffer is full, and when there is room again.

        Raises:
            StreamFailed: the buffer is full, and that is to be fatal.
        """
        liveness = self._liveness
        liveness.start()
        recv, put = self._socket.recv, buffer.put
        state = State.LIVE
        try:
            for message in self._took:
                put(message)
            self._took = []
            while True:
                if buffer.must_wait:
                    paused(True)
                    state = State.PAUSED
                    await buffer.wait_for_room()
                    paused(False)
                    state = State.LIVE
                liveness.listening()
                message = await recv()
                liveness.heard()
                put(message)
        except ConnectionClosed as error:
            if self._cut is not None:
                cause, detail = self._cut
                return ConnectionEnd(cause=cause, state=state, detail=detail)
            return end_of(error, state, now=0.0)
        finally:
            liveness.stop()

    @property
    def is_drained(self) -> bool:
        """True while the reader waits for the peer: everything that has come is in the buffer."""
        return self._liveness.is_listening

    def cut(self, cause: Cause, detail: str) -> None:
        """End the connection at once, for this reason; `read` tells it."""
        self._cut = self._cut or (cause, detail)
        abort_connection(self._socket)

    def abort(self) -> None:
        """End the connection at once."""
        abort_connection(self._socket)

    async def close(self) -> None:
        """End the connection politely, within `close_timeout_s`."""
        await close_connection(self._socket, self._options)
