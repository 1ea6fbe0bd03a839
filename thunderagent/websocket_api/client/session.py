"""The connections of a client, one after the other. Each begins with the state and then brings answers and pushes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Final

from thunderagent.model.clock import since_boot
from thunderagent.model.errors import ClientClosed
from thunderagent.model.pacing import Backoff
from thunderagent.streams.connection.buffer import Buffer
from thunderagent.streams.connection.connection import Connection, Peer
from thunderagent.streams.connection.ending import CAUGHT_UP, ConnectionEnd, State
from thunderagent.streams.connection.endpoint import EndpointSource
from thunderagent.streams.connection.governor import Governor
from thunderagent.streams.connection.pump import Pump
from thunderagent.streams.connection.verdicts import Verdict
from thunderagent.streams.cursor import Cursor
from thunderagent.websocket_api.client.credentials import Credentials, TokenSource
from thunderagent.websocket_api.client.events import CloseReason, Connected, Disconnected, Publisher, Throttled
from thunderagent.websocket_api.client.options import ClientOptions
from thunderagent.websocket_api.client.replica import Replica
from thunderagent.websocket_api.client.talk import Message, Request, Talk, is_throttled, text_of
from thunderagent.websocket_api.protocol import Action, Kind

PASSING: Final = Backoff(base_s=0.2, cap_s=10.0)
"""Before a client of the WebSocket API sends a change again that was not answered, or could not be taken for now."""

PASSING_LEAST_S: Final = 0.01
"""… and the least of it."""


_MESSAGES: Final = 256
_BYTES: Final = 8 << 20


class Session:
    """Keeps a connection, with the machinery of streams. `again` is called when changes must be sent again."""

    def __init__(
        self,
        url: EndpointSource,
        token: TokenSource,
        options: ClientOptions,
        *,
        replica: Replica,
        publisher: Publisher,
        governor: Governor,
        again: Callable[[], None],
        rng: random.Random,
    ) -> None:
        self._options = options
        self._replica = replica
        self._publisher = publisher
        self._send_again = again
        self._rng = rng
        self._live, self._ended, self._behind = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._was_live = False
        self._buffer = Buffer(_MESSAGES, _BYTES, "pause")
        self.talk = Talk(
            options.request_timeout_s,
            on_throttled=lambda pause_s: publisher.publish(Throttled(at=publisher.clock(), pause_s=pause_s)),
        )
        self.pump = Pump(
            Peer(
                endpoint=Credentials(url, token).endpoint,
                options=replace(options.streaming, classify=self._judge),
                on_open=self._greet,
                overlap=True,
            ),
            governor=governor,
            buffer=self._buffer,
            resume=lambda: None,
            moved=self._moved,
            begin_at=lambda place: None,
            guard=lambda: None,
            pings=lambda connection: Beats(self.talk, connection, self._heard),
        )
        self.last_end: ConnectionEnd | None = None
        """The end of the last connection or attempt."""
        self.latency_s: float | None = None
        """Seconds of the last ping."""
        self.closed: CloseReason | None = None
        """Why the session has ended; None while it lives."""

    @property
    def is_live(self) -> bool:
        return self._live.is_set()

    async def connection(self) -> Connection:
        """Wait for a live connection; raises `ClientClosed` when the session ends."""
        while True:
            self.check()
            if self.pump.connection is not None and self._live.is_set():
                return self.pump.connection
            self._live.clear()
            waits = [asyncio.ensure_future(one.wait()) for one in (self._live, self._ended)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for one in waits:
                    one.cancel()

    async def wait_ended(self) -> None:
        """Wait for the end of the session."""
        await self._ended.wait()

    def check(self) -> None:
        """Raise `ClientClosed` if the session has ended."""
        if self.closed is not None:
            raise ClientClosed(f"the client has ended: {self.closed}")

    def end(self, reason: CloseReason) -> None:
        """End the session; all waits end."""
        self.closed = reason
        self._live.clear()
        self.talk.lost()
        self._ended.set()

    async def take_all(self) -> None:
        """Take all messages until the task is cancelled. Handlers cannot hold it up."""
        while True:
            raw = self._buffer.get()
            if raw is None:
                await self._buffer.wait_for_some()
            else:
                self._receive(raw)

    async def catch_up(self) -> None:
        """Read the state whenever a notice of a change is not enough, until the task is cancelled."""
        failures = 0
        while True:
            await self._behind.wait()
            self._behind.clear()
            if await self.read(await self.connection()):
                failures = 0
                continue
            self._behind.set()
            await asyncio.sleep(max(PASSING_LEAST_S, PASSING.delay(failures, self._rng)))
            failures += 1

    async def read(self, connection: Connection) -> bool:
        """Ask for the state. False: there was no answer, or an error."""
        answer = await self.talk.ask(connection, Action.GET_STATE, known_version=self._replica.version)
        return self._observe(answer)

    def again(self, changes: int, is_certain: bool) -> None:
        """Send acknowledged changes again, if there are any."""
        if changes:
            self._publisher.publish_resubmission(changes, is_certain=is_certain)
            self._send_again()
        self._publisher.publish_state()

    # Inside

    async def _greet(self, connection: Connection, _: Cursor | None) -> None:
        """Learn the state over a new connection before it is used."""
        while is_throttled(answer := await self._first(connection)):
            pass
        if not self._observe(answer):
            problem = answer and (answer.get("error") or answer.get("type"))
            raise ConnectionError(f"getState was answered with {str(problem)[:100]!r}")
        old = self.pump.connection
        if old is not None:  # its answer comes behind all that the server sent over it before
            with suppress(TimeoutError):
                async with asyncio.timeout(self._options.close_timeout_s):
                    await self.talk.ask(old, Action.PING)

    async def _first(self, connection: Connection) -> Message | None:
        """The answer to the first request over a connection, before `take_all` reads from it."""
        await self.talk.pause()  # the last connection may have been throttled
        request = self.talk.begin(connection)
        try:
            await self.talk.send(request, Action.GET_STATE, known_version=self._replica.version)
            while not request.answer.done():
                self._receive(await connection.recv())
            return request.answer.result()
        finally:
            self.talk.forget(request)

    def _moved(self, state: State, reason: str) -> None:
        if state is State.PAUSED or reason == CAUGHT_UP:
            return
        if state is not State.LIVE:
            self._live.clear()
            self.talk.lost()
            if state is State.BACKOFF:
                was, self._was_live = self._was_live, False
                self._publisher.publish(Disconnected(at=self._publisher.clock(), reason=reason, was_connected=was))
            return
        self._was_live = True
        self.talk.lost(self.pump.connection)
        self._live.set()
        region, version = self._replica.region, self._replica.version
        self._publisher.publish(
            Connected(at=self._publisher.clock(), region=region, version=version, is_rotated=bool(reason))
        )
        self._publisher.publish_state()

    def _judge(self, end: ConnectionEnd) -> Verdict | None:
        self.last_end = end
        return self._options.verdict(end)

    def _heard(self, took_s: float) -> None:
        self._replica.heard(since_boot())
        self.latency_s = took_s

    def _receive(self, raw: str | bytes) -> None:
        match self.talk.take(raw):
            case {"type": Kind.PUSH, **push}:
                self._publisher.publish_push(push.get("id"), push.get("message"))
            case {"type": Kind.CHANGED, "version": int(version), "change": str(change), **others}:
                patch = others.get("patch")
                known = patch if isinstance(patch, dict) else None
                if self._replica.changed(change, version, known, text_of(others.get("region"))):
                    self._behind.set()
                self._publisher.publish_state()

    def _observe(self, answer: Message | None) -> bool:
        match answer or {}:
            case {"type": Kind.STATE, "version": int(version), "state": dict(state), **others}:
                region = text_of(others.get("region"))
                is_behind = others.get("client_ahead") is True
                found = self._replica.observed(state, version, region, since_boot(), is_behind=is_behind)
                self.again(*found)
                return True
        return False


class Beats:
    """Pings that the functions of the API answer, for the watch of a connection. `heard` gets the seconds of an answer.

    The gateway would answer a ping of the WebSocket protocol, even without functions.
    """

    __slots__ = ("_connection", "_heard", "_talk")

    def __init__(self, talk: Talk, connection: Connection, heard: Callable[[float], None]) -> None:
        self._talk = talk
        self._connection = connection
        self._heard = heard

    async def ping(self) -> Awaitable[float]:
        """Send a ping; the answer is awaited for the pong."""
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
