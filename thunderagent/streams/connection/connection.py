"""One live connection: its reader, its liveness, and what `on_open` may do with it."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from websockets.asyncio.client import ClientConnection
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed, ConnectionClosedError
from websockets.http11 import Response
from websockets.protocol import OPEN
from websockets.typing import Data

from thunderagent.model.arguments import seconds_problem
from thunderagent.model.errors import ConfigurationError
from thunderagent.model.redaction import Redactor
from thunderagent.streams.connection.buffer import Buffer
from thunderagent.streams.connection.ending import Cause, ConnectionEnd, FunctionFailed, State, end_of
from thunderagent.streams.connection.endpoint import EndpointSource
from thunderagent.streams.connection.liveness import Liveness, Pings
from thunderagent.streams.connection.options import StreamOptions
from thunderagent.streams.connection.transport import abort_connection, close_connection
from thunderagent.streams.cursor import Cursor, GapAction, OnGap, PositionOf, Snapshot

ANSWER_S: Final = 10.0
"""Longest time in which a peer takes no answer to its ping; then it is given up."""

_ACCEPTED: Final = Response(101, "", Headers())
_NOTHING: Final = object()
_SHOWN: Final = 3
_SHOWN_LETTERS: Final = 90


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """What is particular to a peer. The fields are arguments of `StreamContext.connect`.

    Raises:
        ConfigurationError: one of them cannot work.
    """

    endpoint: EndpointSource
    options: StreamOptions
    decode: Callable[[Any], Any] | None = None
    answer: Callable[[Any], Any] | None = None
    keepalive: tuple[Any, float] | None = None
    on_open: OnOpen | None = None
    position: PositionOf | None = None
    on_gap: OnGap = GapAction.CONTINUE
    snapshot: Snapshot | None = None
    overlap: bool = False
    """A connection may be replaced by a second one before it is closed."""

    def __post_init__(self) -> None:
        if problem := self._problem():
            raise ConfigurationError(problem)

    def _problem(self) -> str | None:
        if inspect.iscoroutinefunction(self.answer):
            return "answer is a coroutine function: make it a plain one, as the reader waits for it"
        if self.keepalive is None:
            return None
        if not isinstance(self.keepalive, tuple) or len(self.keepalive) != 2:
            return f"keepalive is {self.keepalive!r}; give the message and the seconds between two: (message, every_s)"
        message, every_s = self.keepalive
        if inspect.iscoroutinefunction(message):
            return "the message of keepalive is a coroutine function: make it a plain one"
        try:
            None if callable(message) else encoded(message)
        except (TypeError, ValueError) as error:
            return f"the message of keepalive cannot be sent: {error}"
        return seconds_problem("every_s of keepalive", every_s, least=1e-3)

    def decoded(self, message: Data) -> Any:
        """The message as the handler gets it; `_NOTHING` where the handler meets an error."""
        try:
            return message if self.decode is None else self.decode(message)
        except BaseException:  # SystemExit too, which would end the loop
            return _NOTHING

    def value_with(self, members: Mapping[str, Any], message: Data) -> Any:
        """The message decoded, else as JSON, if it has these members; `_NOTHING` if not.

        `decode` often drops or refuses what a peer says of itself.
        """
        for value in (self.decoded(message), _from_json(message)):
            if value is not _NOTHING and all(_member(value, name) == wanted for name, wanted in members.items()):
                return value
        return _NOTHING

    def reply_to(self, message: Data) -> str | bytes | None:
        """The reply that is sent at once; None for a message that the handler gets.

        Raises:
            FunctionFailed: `answer` has raised.
        """
        if self.answer is None:
            return None
        if (value := self.decoded(message)) is _NOTHING:
            return None
        try:
            reply = self.answer(value)
            return None if reply is None else encoded(reply)
        except BaseException as error:  # SystemExit too, which would end the loop
            raise FunctionFailed("answer") from error


def encoded(value: Any) -> str | bytes:
    """A message as it is sent: text and bytes as they are, any other value as JSON."""
    return value if isinstance(value, (str, bytes)) else json.dumps(value, separators=(",", ":"))


class Connection:
    """An open WebSocket. `on_open` gets it to authenticate and subscribe; handlers send with their feed."""

    def __init__(
        self,
        opened: ClientConnection,
        peer: Peer,
        pings: Callable[[Connection], Pings] | None = None,
    ) -> None:
        self._socket = opened
        self._peer = peer
        self._options = peer.options
        self._cut: tuple[Cause, str] | None = None
        self._failed: FunctionFailed | None = None
        self._took: list[Data] = []
        self._awaited: tuple[Mapping[str, Any], int] | None = None
        """What `expect` waits for, and the number of messages taken before."""
        self.is_unanswered = False
        """True while `recv` or `expect` waits and only pings have come since it began."""
        self._liveness = Liveness(pings(self) if pings else opened, peer.options, self.cut)

    @property
    def subprotocol(self) -> str | None:
        return self._socket.subprotocol

    @property
    def response_headers(self) -> Mapping[str, str]:
        """Headers of the peer's answer to the handshake; in `on_open` alone."""
        response = self._socket.response
        return response.headers if response is not None else {}

    async def send(self, message: str | bytes) -> None:
        """Send a message; waits while the peer takes nothing.

        Raises:
            websockets.exceptions.ConnectionClosed: the connection has ended; the feed connects again by itself.
        """
        try:
            await self._socket.send(message)
        except AttributeError as error:  # asyncio's, see `abort_connection`
            raise ConnectionClosedError(None, None) from error

    async def send_json(self, value: Any) -> None:
        await self.send(json.dumps(value, separators=(",", ":")))

    async def recv(self) -> Data:
        """The next message; for `on_open` alone: the handler does not get it."""
        self.is_unanswered = True
        message = await self._socket.recv()
        self.is_unanswered = False
        return message

    async def expect(self, **members: Any) -> Any:
        """Wait for a message with these members or attributes; earlier messages go to the handler.

        The message is decoded as those of the stream, else as JSON. The wait is bounded by `subscribe_timeout_s` and by
        `max_pending` messages. If it does not come, the end of the attempt says what came instead.

        Raises:
            LookupError: too many other messages came before it.
            FunctionFailed: `answer` has raised; the handler gets its error.
        """
        self._awaited = members, len(self._took)
        self.is_unanswered = True
        while True:
            message = await self._socket.recv()
            if (reply := self._peer.reply_to(message)) is not None:
                await self._answer(reply)
                continue
            self.is_unanswered = False
            value = self._peer.value_with(members, message)
            if value is not _NOTHING:
                self._awaited = None
                return value
            if len(self._took) >= self._options.max_pending:
                raise LookupError(f"{len(self._took)} messages came, and none with {_named(members)}")
            self._took.append(message)

    # For the pump

    @property
    def is_open(self) -> bool:
        """False once one side has closed it."""
        return self._socket.state is OPEN

    @property
    def missing(self) -> str:
        """What `expect` waits for and what came instead; empty when it waits for nothing."""
        if self._awaited is None:
            return ""
        members, begin = self._awaited
        came = self._took[begin:]
        more = [f"{len(came) - _SHOWN} more"] if len(came) > _SHOWN else []
        shown = " and ".join([*map(self._shown, came[:_SHOWN]), *more])
        return f"instead of {_named(members)} came {shown or 'nothing'}"

    def _shown(self, message: Data) -> str:
        if isinstance(message, str):
            text = message
        else:
            value = self._peer.decoded(message)
            text = f"{len(message)} bytes" if isinstance(value, bytes) or value is _NOTHING else repr(value)
        text = Redactor().text(" ".join(text.split()))  # before it is cut: half a secret looks like none
        return text if len(text) <= _SHOWN_LETTERS else text[: _SHOWN_LETTERS - 1] + "…"

    def forget_handshake(self) -> None:
        """Drop the headers of the handshake: 4 KiB that `on_open` alone needs."""
        for message in (self._socket.request, self._socket.response):
            if message is not None:
                message.headers.clear()  # the library's parser keeps the message itself
        self._socket.request, self._socket.response = None, _ACCEPTED

    async def read(self, buffer: Buffer, paused: Callable[[bool], None]) -> ConnectionEnd:
        """Read until the connection ends; the answer is its end. A cancel leaves the connection open.

        Args:
            paused: called with True when the buffer is full, with False when it has room again.

        Raises:
            StreamFailed: the buffer is full and `on_full` is "fail".
            FunctionFailed: a function given to `connect` has raised.
        """
        liveness = self._liveness
        liveness.start()
        recv, put = self._socket.recv, buffer.put
        reply_to = self._peer.reply_to if self._peer.answer is not None else None
        keepalive = self._start_keepalive()
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
                if reply_to is not None and (reply := reply_to(message)) is not None:
                    liveness.heard(is_ping=True)
                    await self._answer(reply)
                    continue
                liveness.heard()
                put(message)
        except ConnectionClosed as error:
            if self._failed is not None:
                raise self._failed from self._failed.__cause__
            if self._cut is not None:
                cause, detail = self._cut
                return ConnectionEnd(cause=cause, state=state, detail=detail)
            return end_of(error, state, now=0.0)
        finally:
            liveness.stop()
            if keepalive is not None:
                keepalive.cancel()

    async def _answer(self, reply: str | bytes) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                await self.send(reply)
        except TimeoutError:
            self.cut(Cause.ZOMBIE, f"it took no answer to its ping for {ANSWER_S:g} s")

    def _start_keepalive(self) -> asyncio.Task[None] | None:
        wanted = self._peer.keepalive
        return None if wanted is None else asyncio.get_running_loop().create_task(self._keep_alive(*wanted))

    async def _keep_alive(self, message: Any, every_s: float) -> None:
        """Send the message each interval, even while the reader waits for room."""
        while True:
            await asyncio.sleep(every_s)
            try:
                text = encoded(message() if callable(message) else message)
            except BaseException as error:  # SystemExit too, which would end the loop
                self._failed = FunctionFailed("keepalive")
                self._failed.__cause__ = error
                self.abort()
                return
            with suppress(ConnectionClosed):  # the reader reports the end
                await self.send(text)

    @property
    def is_drained(self) -> bool:
        """True while the reader waits for the peer: all that has come is in the buffer."""
        return self._liveness.is_listening

    def cut(self, cause: Cause, detail: str) -> None:
        """End the connection at once with this cause, which `read` answers."""
        self._cut = self._cut or (cause, detail)
        abort_connection(self._socket)

    def abort(self) -> None:
        abort_connection(self._socket)

    async def close(self) -> None:
        """End the connection politely, within `close_timeout_s`."""
        await close_connection(self._socket, self._options)


OnOpen = Callable[[Connection, Cursor | None], Awaitable[object]]
"""Authenticates and subscribes; gets the connection and the place to go on from."""


def _from_json(message: Data) -> Any:
    try:
        return json.loads(message)
    except ValueError:
        return _NOTHING


def _member(value: Any, name: str) -> Any:
    return value.get(name, _NOTHING) if isinstance(value, Mapping) else getattr(value, name, _NOTHING)


def _named(members: Mapping[str, Any]) -> str:
    return Redactor().text(", ".join(f"{name}={wanted!r}" for name, wanted in members.items()))
