"""Requests and their answers over the live connection, in chunks if they are long."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from websockets.exceptions import ConnectionClosed

from thunderagent.streams.connection.connection import Connection
from thunderagent.websocket_api.protocol import Action, ChunkRefused, Joiner, Kind, Problem, encode, frames

LONGEST_PAUSE_S: Final = 30.0
"""Longest pause that the API can ask for."""

ASK_AGAIN_S: Final = 0.1
"""Delay before a client asks again for a state that it did not get."""


Message = dict[str, Any]


@dataclass(slots=True, kw_only=True)
class Request:
    id: str
    connection: Connection
    answer: asyncio.Future[Message | None]
    """None: the connection ended first."""


class Talk:
    """Sends requests, joins chunks, and finds the request of each answer.

    Args:
        timeout_s: longest time for sending a request and its answer together.
        on_throttled: called with the seconds of a pause that the server asks for.
    """

    def __init__(self, timeout_s: float, on_throttled: Callable[[float], None] = lambda pause_s: None) -> None:
        self._timeout_s = timeout_s
        self._on_throttled = on_throttled
        self._quiet_until = 0.0
        self._numbers = itertools.count(1)
        self._open: dict[str, Request] = {}
        self._joiner = Joiner()
        self.strange = 0
        """Messages that could not be read."""

    def __len__(self) -> int:
        return len(self._open)

    async def ask(self, connection: Connection, action: Action, **members: Any) -> Message | None:
        """The answer to a request, after a pause if the server asked for one; None: it did not come."""
        await self.pause()
        request = self.begin(connection)
        try:
            async with asyncio.timeout(self._timeout_s):
                await self.send(request, action, **members)
                return await request.answer
        except (TimeoutError, ConnectionClosed, OSError):
            return None
        finally:
            self.forget(request)

    async def pause(self) -> None:
        """Wait for the end of a pause that the server asked for."""
        loop = asyncio.get_running_loop()
        while (left_s := self._quiet_until - loop.time()) > 0:  # noqa: ASYNC110 - the time moves, and sets no event
            await asyncio.sleep(left_s)

    def begin(self, connection: Connection) -> Request:
        """Expect an answer; `forget` the request afterwards."""
        request = Request(
            id=str(next(self._numbers)), connection=connection, answer=asyncio.get_running_loop().create_future()
        )
        self._open[request.id] = request
        return request

    async def send(self, request: Request, action: Action, **members: Any) -> None:
        """Send a request, in chunks if it is long. Chunks have its id: an error of one of them answers it.

        Raises:
            MessageTooLarge: it cannot be sent.
            websockets.exceptions.ConnectionClosed: the connection has ended.
        """
        text = encode({"action": action, "id": request.id, **members})
        for frame in frames(text, request.id, to_server=True):
            await request.connection.send(frame)

    def forget(self, request: Request) -> None:
        self._open.pop(request.id, None)

    def take(self, raw: str | bytes) -> Message | None:
        """Read what came. Returns a message that answers no request, such as a push; None for all else."""
        message = self._read(raw)
        if message is not None and message.get("type") == Kind.CHUNK:
            message = self._joined(message)
        if message is None:
            return None
        if is_throttled(message):
            pause_s = max(ASK_AGAIN_S, pause_of(message))
            self._quiet_until = asyncio.get_running_loop().time() + pause_s
            self._on_throttled(pause_s)
        number = message.get("id")
        request = self._open.get(number) if isinstance(number, str) else None
        if request is None or message.get("type") == Kind.PUSH:
            return message
        if not request.answer.done():
            request.answer.set_result(message)
        return None

    def lost(self, live: Connection | None = None) -> None:
        """End the requests over all connections but the live one: they will not be answered."""
        for request in list(self._open.values()):
            if request.connection is not live and not request.answer.done():
                request.answer.set_result(None)

    def _joined(self, chunk: Mapping[str, Any]) -> Message | None:
        try:
            text = self._joiner.add(chunk)
        except ChunkRefused:
            self.strange += 1
            return None
        return None if text is None else self._read(text)

    def _read(self, raw: str | bytes) -> Message | None:
        try:
            message = json.loads(raw)
        except (ValueError, RecursionError):
            message = None
        if isinstance(message, dict):
            return message
        self.strange += 1
        return None


def is_throttled(answer: Message | None) -> bool:
    """Whether the server asks for a pause instead of an answer."""
    return answer is not None and answer.get("type") == Kind.ERROR and answer.get("error") == Problem.THROTTLED


def pause_of(answer: Message) -> float:
    """Seconds that an error asks to wait, at most `LONGEST_PAUSE_S`."""
    asked = answer.get("retry_after_s")
    return float(min(asked, LONGEST_PAUSE_S)) if isinstance(asked, (int, float)) and asked > 0 else 0.0


def text_of(value: object) -> str | None:
    """The value if it is a text, else None."""
    return value if isinstance(value, str) else None
