"""The management API of the local gateway: `POST /@connections/ID` sends a text, `DELETE` closes, `GET` looks.

`ctx.push` uses it. It has a port of its own on the loopback address, and does not check signatures.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import Final, Protocol
from urllib.parse import unquote, urlsplit

from thunderagent.websocket_api.gateway.door import bound
from thunderagent.websocket_api.protocol import MESSAGE_BYTES

REQUEST_S: Final = 10.0
"""Longest time of a request."""
_HEAD_BYTES: Final = 16 * 1024
_MARK: Final = "/@connections/"


class Sockets(Protocol):
    async def send(self, connection: str, text: str) -> bool:
        """Send a text. False: there is no such connection."""

    async def end(self, connection: str) -> bool:
        """Close a connection. False: there is none."""

    def since(self, connection: str) -> float | None:
        """Epoch seconds at which it was opened; None: there is none."""


class Management:
    def __init__(self, sockets: Sockets, port: int) -> None:
        self.port = port
        self._sockets = sockets
        self._server: asyncio.Server | None = None
        self._held: socket.socket | None = None
        self._open: set[asyncio.StreamWriter] = set()

    async def open(self) -> None:
        """Listen; the port is known then.

        Raises:
            OSError: the port is taken.
        """
        sock, self._held = self._held or bound(self.port), None
        self.port = sock.getsockname()[1]
        self._server = await asyncio.start_server(self._serve, sock=sock, limit=_HEAD_BYTES)

    def slam(self) -> None:
        """Stop listening and reset what is open; keep the port."""
        self._end()
        self._held = self._held or bound(self.port)

    def close(self) -> None:
        """Stop listening, reset what is open, and free the port."""
        self._end()
        if self._held is not None:
            self._held.close()

    def _end(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for writer in list(self._open):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            while await self._one(reader, writer):
                pass
        except (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the client is gone, or speaks no HTTP
        finally:
            self._open.discard(writer)
            writer.transport.abort() if writer.transport.is_closing() else writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request. False: the connection ends."""
        head = await reader.readuntil(b"\r\n\r\n")
        request, *lines = head.decode("latin-1").split("\r\n")
        method, path, _ = request.split(" ", 2)
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        async with asyncio.timeout(REQUEST_S):
            if headers.get("expect", "").lower() == "100-continue":
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            length = int(headers.get("content-length") or 0)
            if not 0 <= length <= MESSAGE_BYTES:
                status, body = HTTPStatus.REQUEST_ENTITY_TOO_LARGE, '{"message":"Message too long"}'
            else:
                status, body = await self._answer(method, path, await reader.readexactly(length))
            kind = "GoneException" if status == HTTPStatus.GONE else status.phrase
            answer = f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json\r\n"
            answer += f"x-amzn-ErrorType: {kind}\r\n" if status >= HTTPStatus.BAD_REQUEST else ""
            answer += f"Content-Length: {len(body.encode())}\r\n\r\n{body}"
            writer.write(answer.encode())
            await writer.drain()
        return status != HTTPStatus.REQUEST_ENTITY_TOO_LARGE and headers.get("connection", "").lower() != "close"

    async def _answer(self, method: str, path: str, body: bytes) -> tuple[HTTPStatus, str]:
        _, mark, rest = urlsplit(path).path.partition(_MARK)
        if not mark:
            return HTTPStatus.NOT_FOUND, '{"message":"Not Found"}'
        connection = unquote(rest)
        does: Mapping[str, Callable[[], Awaitable[tuple[HTTPStatus, str] | None]]] = {
            "POST": lambda: self._post(connection, body),
            "DELETE": lambda: self._delete(connection),
            "GET": lambda: self._get(connection),
        }
        if method not in does:
            return HTTPStatus.METHOD_NOT_ALLOWED, '{"message":"Method Not Allowed"}'
        return await does[method]() or (HTTPStatus.GONE, '{"message":"Gone"}')

    async def _post(self, connection: str, body: bytes) -> tuple[HTTPStatus, str] | None:
        return (HTTPStatus.OK, "") if await self._sockets.send(connection, body.decode(errors="replace")) else None

    async def _delete(self, connection: str) -> tuple[HTTPStatus, str] | None:
        return (HTTPStatus.NO_CONTENT, "") if await self._sockets.end(connection) else None

    async def _get(self, connection: str) -> tuple[HTTPStatus, str] | None:
        since = self._sockets.since(connection)
        return None if since is None else (HTTPStatus.OK, json.dumps({"connectedAt": since}))
