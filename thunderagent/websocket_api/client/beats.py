"""Pings of the application, for the watch of a connection."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from thunderagent.streams.connection.connection import Connection
from thunderagent.websocket_api.client.talk import Request, Talk, is_throttled
from thunderagent.websocket_api.protocol import Action, Kind


class Beats:
    """Pings that the API answers: its functions are alive then, not only the gateway that holds the sockets.

    Args:
        talk: where requests are sent and answered.
        connection: the connection that is watched.
        heard: told how many seconds an answer took.
    """

    __slots__ = ("_connection", "_heard", "_talk")

    def __init__(self, talk: Talk, connection: Connection, heard: Callable[[float], None]) -> None:
        self._talk = talk
        self._connection = connection
        self._heard = heard

    async def ping(self) -> Awaitable[float]:
        """Send a ping; what this answers is done when the pong is here.

        Raises:
            websockets.exceptions.ConnectionClosed: the connection has ended.
        """
        request = self._talk.begin(self._connection)
        sent_at = asyncio.get_running_loop().time()
        try:
            await self._talk.send(request, Action.PING)
        except BaseException:
            self._talk.forget(request)
            raise
        return self._pong(request, sent_at)

    async def _pong(self, request: Request, sent_at: float) -> float:
        try:
            answer = await request.answer
        finally:
            self._talk.forget(request)
        # A refusal is a sign of life.
        if answer is None or (answer.get("type") != Kind.PONG and not is_throttled(answer)):
            raise ConnectionError("the ping was not answered with a pong")
        took_s = asyncio.get_running_loop().time() - sent_at
        self._heard(took_s)
        return took_s
