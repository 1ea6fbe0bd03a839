"""One WebSocket of a chaos server, fed and spoiled by its `Feed`."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import struct
from collections import deque
from contextlib import suppress
from typing import Any, Final

from thunderagent.testing.chaos.behaviours import Close, Cut, Ending, Feed, Silence, Violate
from thunderagent.testing.chaos.frames import (
    Frame,
    FrameParser,
    Opcode,
    close_code,
    close_frame,
    text_frame,
    violating_frame,
)
from thunderagent.testing.chaos.history import History, Position
from thunderagent.testing.chaos.observations import Observations, OpenSocket, Received, Subscription

CHUNK: Final = 1 << 16
_TURN: Final = 32
"""Messages in a row before other tasks get their turn."""


def reset_on_close(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


class Stream(asyncio.StreamReaderProtocol):
    """The two directions of a socket that was accepted."""

    @classmethod
    async def of(cls, sock: socket.socket, context: ssl.SSLContext | None) -> Stream:
        """The stream of a socket, which it owns from now on; with a context, after the handshake of TLS.

        Raises:
            OSError: TLS did not come about.
        """
        loop = asyncio.get_running_loop()
        transport, stream = await loop.connect_accepted_socket(
            lambda: cls(asyncio.StreamReader(CHUNK)), sock, ssl=context
        )
        stream.writer = asyncio.StreamWriter(transport, stream, stream.reader, loop)
        return stream

    def __init__(self, reader: asyncio.StreamReader) -> None:
        super().__init__(reader)
        self.reader = reader
        self.writer: asyncio.StreamWriter
        self.lost = asyncio.Event()
        """Both directions have ended, and the socket is closed."""

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.lost.set()

    def reset(self) -> None:
        if self.lost.is_set():
            return  # abort() of a transport that has flushed its last bytes and closed fails
        if not self.writer.transport.is_closing():
            reset_on_close(self.writer.get_extra_info("socket"))
        self.writer.transport.abort()


class Connection:
    """A WebSocket after its handshake. One task reads and one sends; either may begin the ending."""

    def __init__(
        self,
        stream: Stream,
        feed: Feed,
        *,
        history: History,
        observations: Observations,
        opened: OpenSocket,
        from_start: bool,
    ) -> None:
        self._stream, self._feed = stream, feed
        self._reader, self._writer = stream.reader, stream.writer
        self._history, self._observations, self._opened = history, observations, opened
        self._from_start = from_start
        self._loop = asyncio.get_running_loop()
        self._since = self._loop.time()
        self._moved = asyncio.Event()
        self._position: Position | None = None
        self._waiting: deque[bytes] = deque()
        self._parts: list[bytes] = []
        self._taken = self._sent = 0
        self._ready_at = 0.0
        self._epoch_changed = False
        self._ended = False
        self._close_sent = False
        self._close_came = False
        self._silent = False

    async def run(self) -> None:
        """Serve until the client's side ends or the close handshake is done; a mute peer never ends."""
        async with asyncio.TaskGroup() as group:
            sender = group.create_task(self._send(), name="chaos sender")
            with suppress(OSError):
                await self._receive()
            sender.cancel()
        if (self._silent or (self._close_came and not self._feed.answers_close)) and not self._writer.is_closing():
            self._observations.went(self._opened)
            await self._stream.lost.wait()

    def wake(self) -> None:
        self._moved.set()

    def subscribe(self, since: int | None, epoch: str | None) -> None:
        """Feed the messages after this position."""
        if self._feed.sends_data:
            self._position = self._history.start(since, epoch, from_start=self._from_start)
        if self._feed.burst:
            first = self._history.published + 1
            self._history.extend(range(first, first + self._feed.burst))
        self.wake()

    def end(self, ending: Ending) -> None:
        """Begin this ending now; a silent peer can only be cut."""
        is_cut = isinstance(ending, Cut)
        if not is_cut and (self._silent or self._writer.is_closing()):
            return
        self._ended = True
        self.wake()
        match ending:
            case Close(code=code, reason=reason):
                self._send_close(close_frame(code, reason))
            case Cut(reset=True):
                self._stream.reset()
            case Cut():
                self._writer.close()
            case Silence():
                self._silent = True
            case Violate(violation=violation):
                self._writer.write(violating_frame(violation))

    async def _send(self) -> None:
        self._writer.transport.set_write_buffer_limits(high=1, low=0)  # with 0 a drain of TLS never ends
        with suppress(OSError):
            while not self._ended:
                now = self._loop.time()
                if self._is_ending_due(now):
                    assert self._feed.ending
                    self.end(self._feed.ending)
                elif now >= self._ready_at and (frame := self._next()):
                    self._writer.write(frame)
                    self._sent += 1
                    self._ready_at = now + self._feed.spacing_s
                    await self._writer.drain()
                    if self._sent % _TURN == 0:
                        await asyncio.sleep(0)
                else:
                    await self._wait(now)

    async def _wait(self, now: float) -> None:
        """Wait until a message may be sent or the ending may be due."""
        moments = [self._ready_at, self._since + self._feed.ending.after_s if self._feed.ending else now]
        self._moved.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(min((one for one in moments if one > now), default=None)):
                await self._moved.wait()

    def _is_ending_due(self, now: float) -> bool:
        ending = self._feed.ending
        return ending is not None and self._sent >= ending.after_messages and now >= self._since + ending.after_s

    def _next(self) -> bytes | None:
        is_time = self._taken == self._feed.new_epoch_after and not self._waiting and not self._epoch_changed
        if is_time and self._position:
            self._epoch_changed = True
            self._history.new_epoch(keep_after=self._position.seq)
        while not self._waiting and self._position and (message := self._history.after(self._position)):
            self._position = Position(message.epoch, message.seq)
            if message.seq in self._feed.skip:
                continue
            self._taken += 1
            is_big = self._taken == 1 and self._feed.big_bytes
            self._waiting.append(message.padded(self._feed.big_bytes) if is_big else message.frame)
            if self._feed.duplicate_each and self._taken % self._feed.duplicate_each == 0:
                self._waiting.append(self._waiting[-1])
        return self._waiting.popleft() if self._waiting else None

    async def _receive(self) -> None:
        parser = FrameParser()
        while data := await self._reader.read(CHUNK):
            for frame in parser.feed(data):
                self._take(frame)
            self._observations.notify()
            if self._close_came and self._feed.answers_close and not self._silent:
                return

    def _take(self, frame: Frame) -> None:
        match frame.opcode:
            case Opcode.PING:
                self._observations.pings += 1
                if self._feed.answers_pings:
                    self._answer(Frame(opcode=Opcode.PONG, payload=frame.payload).encode())
            case Opcode.CLOSE:
                self._observations.close_codes.append(close_code(frame))
                self._close_came = self._ended = True
                self.wake()
                if self._feed.answers_close and not self._silent:
                    self._send_close(Frame(opcode=Opcode.CLOSE, payload=frame.payload[:2]).encode())
            case Opcode.TEXT | Opcode.BINARY | Opcode.CONTINUATION:
                self._parts.append(frame.payload)
                if frame.last:
                    whole = b"".join(self._parts)
                    self._parts.clear()
                    self._hear(whole)

    def _hear(self, data: bytes) -> None:
        key, now = self._opened.key or "", self._loop.time()
        text = data.decode(errors="replace")
        self._observations.received.append(Received(time=now, key=key, data=text))
        with suppress(ValueError):
            wish = json.loads(text)
            if isinstance(wish, dict) and wish.get("op") == "subscribe":
                self._subscribed(key, now, wish)

    def _subscribed(self, key: str, now: float, wish: dict[str, Any]) -> None:
        since, epoch = wish.get("since"), wish.get("epoch")
        self._observations.subscriptions.append(Subscription(time=now, key=key, since=since, epoch=epoch))
        if self._feed.acknowledgement is not None and not self._ended:
            self._answer(text_frame(json.dumps(dict(self._feed.acknowledgement))))
            self.subscribe(since, epoch)

    def _answer(self, frame: bytes) -> None:
        is_deaf = self._silent or self._close_sent or self._close_came
        if not is_deaf and not self._writer.is_closing():
            self._writer.write(frame)

    def _send_close(self, frame: bytes) -> None:
        if not self._close_sent:
            self._close_sent = True
            self._writer.write(frame)
