"""The server: listens on 127.0.0.1, hands out behaviours to connections, and answers handshakes."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import Counter
from contextlib import suppress
from typing import Any, Final, Literal, Self

from thunderagent.model.errors import ConfigurationError
from thunderagent.testing.chaos import certificates
from thunderagent.testing.chaos.behaviours import (
    Behaviour,
    BrokenTls,
    Ending,
    Feed,
    Garbage,
    HangUp,
    Redirect,
    Refuse,
    Silence,
    TlsFault,
)
from thunderagent.testing.chaos.connection import CHUNK, Connection, Stream, reset_on_close
from thunderagent.testing.chaos.frames import Request, accepting, parse_request, response
from thunderagent.testing.chaos.history import Encode, History, Message, encode_json
from thunderagent.testing.chaos.observations import Attempt, Observations, OpenSocket

_HOST: Final = "127.0.0.1"
_BACKLOG: Final = 1024
_END_S: Final = 2.0


class ChaosServer(Observations):
    """A WebSocket feed on 127.0.0.1 that fails by script; use it in `async with`.

    The n-th connection that TCP accepts gets the n-th behaviour, and the last one repeats; without any the feed is
    healthy. A healthy feed answers pings. On `{"op": "subscribe", "since": N, "epoch": E}` it answers
    `{"op": "subscribed"}` and sends the messages after N, kept ones and new ones, as
    `{"epoch": E, "seq": N, "data": …}`. With `since` null it sends what is published from then on; a position of
    another epoch means all of this epoch.

    It listens from the beginning of its `async with`.

    Args:
        behaviours: what the connections meet, in order.
        per_key: count connections for each stream, by the parameter `stream` of the query or else by the path.
        from_start: a subscription with `since` null gets all that is kept.
        auto_subscribe: every connection is fed without asking.
        most_per_key: WebSockets of one stream that may be open; one more is refused with status 429.
        keep: messages kept for replay; None keeps all.
        tls: with TLS, and a certificate that `client_context` trusts or not.
        port: the port; 0 takes a free one.
        encode: makes the text of a message of its epoch, sequence number and data.
        epochs: what the names of epochs begin with.

    Raises:
        ConfigurationError: a behaviour does not go with an option, or the package `cryptography` is missing.
    """

    def __init__(
        self,
        *behaviours: Behaviour,
        per_key: bool = False,
        from_start: bool = False,
        auto_subscribe: bool = False,
        most_per_key: int | None = None,
        keep: int | None = None,
        tls: Literal["good", "untrusted"] | None = None,
        port: int = 0,
        encode: Encode = encode_json,
        epochs: str = "epoch",
    ) -> None:
        super().__init__()
        self._per_key = per_key
        self._from_start = from_start
        self._auto_subscribe = auto_subscribe
        self._most_per_key = most_per_key
        self._port = port
        self._contexts = certificates.contexts() if tls else None
        self._trusted = tls == "good"
        self._history = History(self._wake, keep, encode=encode, name=epochs)
        self._tasks: dict[asyncio.Task[None], Connection | None] = {}
        self._failures: list[BaseException] = []
        self._listener: socket.socket | None = None
        self._is_listening = False
        self.script(*behaviours)

    def script(self, *behaviours: Behaviour) -> None:
        """Replace the script: the next connection (of each stream) gets the first of these. Open ones go on."""
        for one in behaviours:
            if isinstance(one, BrokenTls) and (self._contexts is None or self._per_key):
                raise ConfigurationError(f"{one} needs a server with tls and without per_key")
        self._script = behaviours or (Feed(),)
        self._dealt = Counter[str | None]()

    @property
    def url(self) -> str:
        return f"{'wss' if self._contexts else 'ws'}://{_HOST}:{self._port}/"

    @property
    def client_context(self) -> ssl.SSLContext | None:
        """For clients: it trusts a server with `tls="good"`. None without TLS, so that it can always be passed."""
        return self._contexts.client if self._contexts else None

    @property
    def epoch(self) -> str:
        return self._history.epoch

    @property
    def last_seq(self) -> int:
        """The number of the newest message of this epoch; 0: there is none."""
        return self._history.last_seq

    @property
    def messages(self) -> list[Message]:
        """The messages that are kept, in order."""
        return self._history.messages()

    def publish(self, data: Any) -> int:
        """Append a message and send it to its subscribers; returns its number."""
        self._history.extend([data])
        return self.last_seq

    def publish_many(self, count: int) -> int:
        """Publish so many messages with the data 1, 2, 3, …, counted over all."""
        first = self._history.published + 1
        self._history.extend(range(first, first + count))
        return self.last_seq

    def new_epoch(self) -> str:
        """Lose the history and number from 1 again, as after the loss of a disk."""
        self._history.new_epoch()
        return self.epoch

    def forget(self) -> None:
        """Lose the history but not the numbering: a returning client finds a gap."""
        self._history.forget()

    def drop_all(self, ending: Ending) -> None:
        """End every connection now: `Close(…)`, `Cut()`, or `Silence()`, which leaves them open for ever.

        Connections that are no WebSocket (yet) are reset, but a `Silence` leaves them as they are.
        """
        for task, connection in self._tasks.items():
            if connection is not None:
                connection.end(ending)
            elif not isinstance(ending, Silence):
                task.cancel()

    def stop_listening(self) -> None:
        """Refuse connects from now on. Open connections and the port stay."""
        self._unlisten()
        self._listener = self._bound()

    def listen_again(self) -> None:
        if not self._is_listening:
            assert self._listener, "the server is not in its `async with`"
            self._listener.listen(_BACKLOG)
            asyncio.get_running_loop().add_reader(self._listener, self._accept)
            self._is_listening = True

    async def __aenter__(self) -> Self:
        self._listener = self._bound()
        self._port = self._listener.getsockname()[1]
        self.listen_again()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Reset what is open and wait for its end.

        Raises:
            ExceptionGroup: the server itself failed while it served.
        """
        self._unlisten()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_END_S)
        if self._failures:
            raise BaseExceptionGroup("the chaos server failed", self._failures)

    def _bound(self) -> socket.socket:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # of TCP by name: asyncio looks
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((_HOST, self._port))
        except OSError:
            sock.close()
            raise
        return sock

    def _unlisten(self) -> None:
        if self._listener:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
        self._listener = None
        self._is_listening = False

    def _wake(self) -> None:
        for connection in self._tasks.values():
            if connection:
                connection.wake()

    def _accept(self) -> None:
        assert self._listener
        with suppress(BlockingIOError, ConnectionAbortedError):
            while True:
                sock, _ = self._listener.accept()
                sock.setblocking(False)
                task = asyncio.create_task(self._serve(sock, self.came()), name="chaos connection")
                self._tasks[task] = None
                task.add_done_callback(self._served)

    def _served(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not task.cancelled() and (failure := task.exception()):
            self._failures.append(failure)

    def _deal(self, key: str | None) -> Behaviour:
        """The behaviour of the next connection, of this stream if there is one."""
        number = self._dealt[key]
        self._dealt[key] += 1
        return self._script[min(number, len(self._script) - 1)]

    async def _serve(self, sock: socket.socket, opened: OpenSocket) -> None:
        now = asyncio.get_running_loop().time()
        behaviour = None if self._per_key else self._deal(None)
        stream: Stream | None = None
        try:
            if isinstance(behaviour, HangUp):
                self._note(now, None, behaviour)
                if behaviour.reset:
                    reset_on_close(sock)
            elif isinstance(behaviour, BrokenTls) and behaviour.fault is not TlsFault.UNTRUSTED:
                self._note(now, None, behaviour)
                await _break_tls(sock, behaviour.fault)
            else:
                context = self._context(behaviour)
                try:
                    stream = await Stream.of(sock, context)
                    request = await _request(stream)
                except (OSError, EOFError, asyncio.LimitOverrunError):
                    request = None
                behaviour = behaviour or self._deal(request.key if request else None)
                accepted = self._note(now, request, behaviour, opened)
                if stream and request:
                    await self._answer(stream, request, behaviour, accepted, opened)
        finally:
            await _finish(sock, stream)
            self.went(opened)

    def _context(self, behaviour: Behaviour | None) -> ssl.SSLContext | None:
        if self._contexts is None:
            return None
        is_good = self._trusted and not isinstance(behaviour, BrokenTls)
        return self._contexts.good if is_good else self._contexts.untrusted

    def _note(
        self, time: float, request: Request | None, behaviour: Behaviour, opened: OpenSocket | None = None
    ) -> bool:
        """Record an attempt; True when it is to become a WebSocket."""
        key = request.key if request else None
        has_room = self._most_per_key is None or key is None or self.open_of(key) < self._most_per_key
        accepted = isinstance(behaviour, Feed) and key is not None and has_room
        path, headers = (request.path, request.headers) if request else ("", {})
        self.attempts.append(
            Attempt(time=time, key=key, path=path, headers=headers, accepted=accepted, behaviour=behaviour)
        )
        if accepted and opened and key is not None:
            self.opened(opened, key)
        self.notify()
        return accepted

    async def _answer(
        self, stream: Stream, request: Request, behaviour: Behaviour, accepted: bool, opened: OpenSocket
    ) -> None:
        writer = stream.writer
        match behaviour:
            case Feed() if accepted:
                await self._feed(stream, request, behaviour, opened)
            case Feed():
                writer.write(response(429, {}, "too many connections of this stream"))
            case Refuse(status=status, headers=headers, retry_after=retry_after, body=body):
                extra = {} if retry_after is None else {"Retry-After": str(retry_after)}
                writer.write(response(status, extra | dict(headers), body))
            case Redirect(to=to, status=status):
                writer.write(response(status, {"Location": to}))
            case Garbage(data=data):
                writer.write(data)
            case HangUp(reset=True):
                stream.reset()
            case HangUp():
                pass
            case _:
                with suppress(OSError):
                    while await stream.reader.read(CHUNK):
                        pass

    async def _feed(self, stream: Stream, request: Request, feed: Feed, opened: OpenSocket) -> None:
        if feed.handshake_s:
            await asyncio.sleep(feed.handshake_s)
        connection = Connection(
            stream,
            feed,
            history=self._history,
            observations=self,
            opened=opened,
            from_start=self._from_start,
        )
        stream.writer.write(accepting(request, right=feed.right_accept))
        task = asyncio.current_task()
        assert task
        self._tasks[task] = connection
        if self._auto_subscribe:
            connection.subscribe(None, None)
        await connection.run()


async def _request(stream: Stream) -> Request | None:
    return parse_request(await stream.reader.readuntil(b"\r\n\r\n"))


async def _break_tls(sock: socket.socket, fault: TlsFault) -> None:
    """Reset after the client's hello, or read for ever and answer nothing."""
    loop = asyncio.get_running_loop()
    with suppress(OSError):
        while await loop.sock_recv(sock, CHUNK) and fault is not TlsFault.RESET:
            pass
        if fault is TlsFault.RESET:
            reset_on_close(sock)


async def _finish(sock: socket.socket, stream: Stream | None) -> None:
    """Close after all is sent; a cancelled task resets."""
    if stream is None:
        sock.close()
        return
    try:
        task = asyncio.current_task()
        if task and not task.cancelling():
            stream.writer.close()
            await stream.lost.wait()
    finally:
        stream.reset()
        async with asyncio.timeout(_END_S):
            await stream.lost.wait()
