"""A WebSocket API in the loop of a test, with faults on demand, and what it saw."""

from __future__ import annotations

import asyncio
import http
import json
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from thunderagent.websocket_api.protocol import Joiner, encode, frames, merge_patch

Message = dict[str, Any]
INTERNAL_ERROR = {"message": "Internal server error", "connectionId": "c", "requestId": "r"}
"""What API Gateway sends when the function behind it fails."""


def throttled(message: Message, pause_s: float) -> Message:
    """The answer to a message of one who sends too much."""
    about = {"error": "throttled", "message": "Too many messages", "retry_after_s": pause_s}
    return {"type": "error", "id": message["id"], **about}


@dataclass(slots=True)
class Row:
    """The state of the one user."""

    state: dict[str, Any] = field(default_factory=dict)
    version: int = 0
    changes: dict[str, int] = field(default_factory=dict)

    def copy(self) -> Row:
        """As it is now: what was replicated."""
        return Row(dict(self.state), self.version, dict(self.changes))

    def save(self, patch: Any, change: str) -> int:
        """A write of anybody."""
        self.state = merge_patch(self.state, patch)
        self.version += 1
        self.changes[change] = self.version
        return self.version


class Api:
    """Answers as the API does, over a row that several may share.

    `answer` may be replaced by a test: given the connection's number and the message, it returns the reply, several
    messages, or None for silence.
    """

    def __init__(self, row: Row | None = None, region: str = "eu-central-1") -> None:
        self.row = row or Row()
        self.region = region
        self.port = 0
        self.tokens: list[str] = []
        """The token of each handshake."""
        self.received: list[Message] = []
        """Messages in their order."""
        self.good: Callable[[str], bool] = lambda token: True
        self.status: http.HTTPStatus | None = None
        """What every handshake is answered with."""
        self.is_mute = False
        """Reads, and says nothing, not even to a close: a half-open connection."""
        self.chunks_refused = 0
        """So many chunks are answered with `throttled`."""
        self.is_broken = False
        """The function fails: everything is answered with what API Gateway says then."""
        self.answer: Callable[[int, Message], Message | list[Message] | None] = self.reply
        self.live: list[ServerConnection] = []
        self.opened = 0
        self._server: Server | None = None
        self._over = asyncio.Event()

    def lose_answer(self, action: str, meanwhile: Callable[[Message], None] = lambda message: None) -> None:
        """Carry out the next message of this action; its answer is lost with the connection, after `meanwhile`."""

        def lose(number: int, message: Message) -> Message | list[Message] | None:
            reply = self.reply(number, message)
            if message["action"] != action:
                return reply
            self.answer = self.reply
            meanwhile(message)
            self.drop()
            return None

        self.answer = lose

    async def __aenter__(self) -> Self:
        await self.mend()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.cut()

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}"

    async def mend(self) -> None:
        """Listen, again at the same port."""
        self._over.clear()
        self._server = await serve(
            self._serve,
            "127.0.0.1",
            self.port,
            process_request=self._handshake,
            ping_interval=None,
            compression=None,
            close_timeout=0.1,
        )
        self.port = next(iter(self._server.sockets)).getsockname()[1]

    async def cut(self) -> None:
        """End every connection without a word, and listen no more."""
        server, self._server = self._server, None
        if server is None:
            return
        self._over.set()
        self.drop()
        server.close()
        await server.wait_closed()

    def drop(self) -> None:
        """End every connection without a word."""
        for socket in self.live:
            socket.transport.abort()

    async def close_all(self, code: int, reason: str = "") -> None:
        """End every connection with this code."""
        for socket in list(self.live):
            await socket.close(code, reason)

    async def push(self, message: Any, push_id: str | None = None) -> None:
        """Push to all."""
        for socket in list(self.live):
            text = encode({"type": "push", "message": message} | ({"id": push_id} if push_id else {}))
            for frame in frames(text, uuid.uuid4().hex):
                await socket.send(frame)

    async def changed(self, patch: Message, change: str = "theirs", *, whole: bool = True, skip: int = 0) -> None:
        """Another connection makes a change, and all are told.

        Args:
            patch: of the change.
            change: its id.
            whole: tell the patch too.
            skip: so many changes before it are not told.
        """
        for number in range(skip):
            self.row.save({"skipped": number}, f"{change}{number}")
        told = {"type": "changed", "version": self.row.save(patch, change), "change": change, "region": self.region}
        for socket in list(self.live):
            await socket.send(encode(told | ({"patch": patch} if whole else {})))

    def actions(self, action: str) -> list[Message]:
        """Messages of one kind."""
        return [message for message in self.received if message.get("action") == action]

    async def until(self, predicate: Callable[[], bool], timeout_s: float = 10.0) -> None:
        """Wait until it holds."""
        async with asyncio.timeout(timeout_s):
            while not predicate():  # noqa: ASYNC110
                await asyncio.sleep(timeout_s / 500)

    def reply(self, number: int, message: Message) -> Message | None:
        """The right answer."""
        number_of, row = message.get("id"), self.row
        about = {"id": number_of, "region": self.region}
        match message:
            case {"action": "ping"}:
                return {"type": "pong", **about}
            case {"action": "getState", "known_version": known}:
                is_ahead = row.version < known
                return {"type": "state", "state": row.state, "version": row.version, "client_ahead": is_ahead, **about}
            case {"action": "setState", "version": version, "patch": patch, "change": change}:
                if change in row.changes:
                    return {"type": "saved", "version": row.changes[change], **about}
                if version != row.version:
                    return {"type": "conflict", "state": row.state, "version": row.version, **about}
                return {"type": "saved", "version": row.save(patch, change), **about}
        return {"type": "error", "id": number_of, "error": "unknown_route", "message": "no such action"}

    def _handshake(self, connection: ServerConnection, request: Request) -> Response | None:
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        self.tokens.append(token)
        if self.status is not None:
            return connection.respond(self.status, "")
        if not self.good(token):
            return connection.respond(http.HTTPStatus.UNAUTHORIZED, "")
        return None

    async def _serve(self, socket: ServerConnection) -> None:
        self.opened += 1
        number, joiner = self.opened, Joiner()
        self.live.append(socket)
        try:
            with suppress(ConnectionClosed):
                async for raw in socket:
                    message = json.loads(raw)
                    if message.get("action") == "chunk":
                        if self.chunks_refused:
                            self.chunks_refused -= 1
                            await socket.send(encode(throttled(message, 1.0)))
                            continue
                        text = joiner.add(message)
                        if text is None:
                            continue
                        message = json.loads(text)
                    self.received.append(message)
                    if self.is_mute:
                        await self._over.wait()
                        return
                    answer = INTERNAL_ERROR if self.is_broken else self.answer(number, message)
                    for one in answer if isinstance(answer, list) else [answer] if answer is not None else []:
                        for frame in frames(encode(one), uuid.uuid4().hex):
                            await socket.send(frame)
        finally:
            self.live.remove(socket)
