"""The client of the WebSocket API: state, changes and pushes, over one connection after the other."""

from __future__ import annotations

import asyncio
import copy
import random
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, Self

from thunderagent.model.errors import ClientClosed, StreamFailed, TooManyChanges
from thunderagent.streams.connection.ending import Cause
from thunderagent.streams.connection.endpoint import EndpointSource
from thunderagent.streams.connection.governor import Governor
from thunderagent.streams.connection.pump import seen
from thunderagent.websocket_api.client.credentials import TokenSource, check_source
from thunderagent.websocket_api.client.events import Closed, CloseReason, Ended, Event, Handler, Publisher, hand_out
from thunderagent.websocket_api.client.options import CONNECTS_A_SECOND, ClientOptions, is_refusal
from thunderagent.websocket_api.client.replica import Change, Make, Replica
from thunderagent.websocket_api.client.session import Session
from thunderagent.websocket_api.client.submitter import Submitter
from thunderagent.websocket_api.client.talk import ASK_AGAIN_S


class Client:
    """A client of the WebSocket API: `async with Client(url, token) as client`. For one event loop.

    It connects by itself and stays connected. Changes wait while there is no server. Changes that a server of another
    region has lost are sent again.

    Args:
        url: of the API, `wss://…`; several, tried in turn; or a function that returns one for each attempt. Names are
            looked up for each attempt, so the client follows a fail-over by DNS.
        token: a token, or a function that returns one for each attempt. `attempt.auth_failed`: the last was refused.
        on_push: called with each message that was pushed; may be a coroutine function.
        on_state: called with the state and its version when they have changed.
        fleet: clients that may lose their connections together; the option of the same name.
        options: every number.
        governor: gives turns to connect, for many clients in one process.
        clock: epoch seconds, for events.

    Raises:
        ConfigurationError: the URL is none, or the options cannot work.
    """

    def __init__(
        self,
        url: EndpointSource,
        token: TokenSource,
        *,
        on_push: Handler | None = None,
        on_state: Handler | None = None,
        fleet: int | None = None,
        options: ClientOptions | None = None,
        governor: Governor | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        check_source(url)
        options = options or ClientOptions()
        self.options = options if fleet is None else replace(options, fleet=fleet)
        self._on_push, self._on_state = on_push, on_state
        governor = governor or Governor(spread_s=1.0 / CONNECTS_A_SECOND, fleet=lambda: self.options.fleet)
        self._replica = Replica(self.options, self._settled)
        self._publisher = Publisher(self._replica, self.options.max_events, clock)
        self._session = Session(
            url,
            token,
            self.options,
            replica=self._replica,
            publisher=self._publisher,
            governor=governor,
            again=lambda: self._submitter.wake(),
            rng=random.Random(governor.rng.random()),
        )
        self._submitter = Submitter(
            self._replica, self._session, settled=self._settled, rng=random.Random(governor.rng.random())
        )
        self._answers: dict[str, asyncio.Future[int]] = {}
        self._asked, self._progress = asyncio.Event(), asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self._handing: asyncio.Task[None] | None = None

    # Its life

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def start(self) -> None:
        """Begin to connect, as `async with` does."""
        if self._running is None and self.closed is None:
            loop = asyncio.get_running_loop()
            self._handing = loop.create_task(
                hand_out(self._publisher.subscribe(), self._on_push, self._on_state), name="WebSocket client: handlers"
            )
            self._running = loop.create_task(self._run(), name="WebSocket client")

    async def close(self, *, flush_s: float = 0.0) -> CloseReason:
        """End, within `flush_s` and four times `close_timeout_s`.

        Args:
            flush_s: longest wait for acknowledgements of changes.
        """
        if flush_s and self.closed is None:
            with suppress(TimeoutError, ClientClosed):
                await self.flush(flush_s)
        self._asked.set()
        if self._running is None and self.closed is None:
            self._end(CloseReason(ended=Ended.ASKED))
        return await self.wait_closed()

    async def wait_closed(self) -> CloseReason:
        """Wait for the end of the client and return its reason."""
        await self._session.wait_ended()
        if self._running is not None and asyncio.current_task() is not self._handing:
            await asyncio.wait((self._running,))
        assert self.closed is not None
        return self.closed

    @property
    def closed(self) -> CloseReason | None:
        """Why the client has ended; None while it has not."""
        return self._session.closed

    # The state

    @property
    def state(self) -> dict[str, Any]:
        """A copy of the state, with the changes that are not acknowledged yet."""
        return copy.deepcopy(self._replica.state)

    @property
    def version(self) -> int:
        """The last version that a server sent; 0 before the first."""
        return self._replica.version

    @property
    def region(self) -> str | None:
        """The region of that server."""
        return self._replica.region

    @property
    def unacknowledged(self) -> tuple[Change, ...]:
        """Changes that no server has, oldest first."""
        return self._replica.unacknowledged

    async def get(self, timeout_s: float | None = 30.0) -> dict[str, Any]:
        """Ask the server for the state, and wait for a server if there is none.

        Raises:
            TimeoutError: no server answered in time.
            ClientClosed: the client has ended.
        """
        async with _bound(timeout_s, "no server has sent the state; the client goes on"):
            while not await self._session.read(await self._session.connection()):  # noqa: ASYNC110
                await asyncio.sleep(ASK_AGAIN_S)
        return self.state

    async def set(self, patch: Mapping[str, Any], *, version: int | None = None, timeout_s: float | None = None) -> int:
        """Change the state, wait until a server acknowledges it, and return the version that it made.

        The patch overwrites the same members of other clients, and a list is one value. To compute from the state, use
        `update`.

        Args:
            patch: a JSON merge patch (RFC 7396): None removes a member, objects are merged.
            version: the only version of the state that the change may be made upon; None: any.
            timeout_s: longest wait; None: until it is acknowledged or the client ends.

        Raises:
            TimeoutError: not acknowledged yet; the change stays and will be sent.
            ChangeRefused: no server will take it.
            VersionConflict: the state has another version than `version`.
            TooManyChanges, MessageTooLarge, TypeError, ValueError, ClientClosed: see `submit`.
        """
        return await self._acknowledged(self.submit(patch, version=version), timeout_s)

    def submit(self, patch: Mapping[str, Any], *, version: int | None = None) -> asyncio.Future[int]:
        """Change the state without waiting. The future is done when `set` would return.

        Raises:
            TooManyChanges: too many changes wait for a server.
            MessageTooLarge: the patch cannot be sent.
            TypeError, ValueError: the patch is no JSON object or too deep, or the version is none.
            ClientClosed: the client has ended.
        """
        if not isinstance(patch, Mapping):
            raise TypeError(f"the patch is a {type(patch).__name__}; a JSON merge patch of a state is an object")
        if version is not None and not (type(version) is int and 0 <= version < 1 << 53):
            raise ValueError(f"version is {version!r}; give the one that you have seen, such as client.version")
        return self._add(patch, version)

    async def update(self, make: Make, *, timeout_s: float | None = None) -> int:
        """Change the state by a function of it, and wait as `set` does.

        The function gets a copy of the state and returns a merge patch. It is called again for each new state until a
        server takes a patch for the state that it has. So it overwrites nothing that it has not seen. It must only
        compute, and quickly.

            await client.update(lambda state: {"todo": [*state.get("todo", []), "milk"]})

        Args:
            make: returns the patch for a state. Its error ends the update; then nothing changes.
            timeout_s: longest wait; None: until it is acknowledged or the client ends.

        Raises:
            Exception: an error of the function.
            ChangeRefused: no server will take it, or it is unknown whether it was made.
            TimeoutError, TooManyChanges, MessageTooLarge, TypeError, ValueError, ClientClosed: see `set`.
        """
        if not callable(make):
            raise TypeError(f"update takes a function that returns a patch for a state, and no {type(make).__name__}")
        return await self._acknowledged(self._add(make), timeout_s)

    async def flush(self, timeout_s: float | None = None) -> None:
        """Wait until a server has every change, also those that are sent again.

        Raises:
            TimeoutError: some are not acknowledged; they stay.
            ClientClosed: the client has ended.
        """
        async with _bound(timeout_s, "some changes are not acknowledged yet; they stay"):
            while self.unacknowledged:
                self._session.check()
                self._progress.clear()
                await self._progress.wait()

    # The connection

    @property
    def is_connected(self) -> bool:
        """True while a connection is live."""
        return self._session.is_live

    @property
    def latency_s(self) -> float | None:
        """Seconds of the last ping; None before the first."""
        return self._session.latency_s

    @property
    def story(self) -> deque[Event]:
        """The last events of the connection, with their times."""
        return self._publisher.story

    async def ready(self, timeout_s: float | None = None) -> None:
        """Wait until a connection is live and the state is known.

        Raises:
            TimeoutError: there is none yet; the client goes on.
            ClientClosed: the client has ended.
        """
        async with _bound(timeout_s, "there is no connection; the client goes on connecting"):
            await self._session.connection()

    def reconnect(self, reason: str = "asked to") -> None:
        """Drop the connection and connect again at once, for example when the network has changed."""
        connection = self._session.pump.connection
        if connection is not None:
            connection.cut(Cause.ASKED, reason)

    async def events(self) -> AsyncGenerator[Event, None]:
        """Every event from the begin of the iteration to `Closed`."""
        subscription = self._publisher.subscribe()
        try:
            async for event in subscription:
                yield event
        finally:
            self._publisher.unsubscribe(subscription)

    # Inside

    def _add(self, patch: Mapping[str, Any] | Make, version: int | None = None) -> asyncio.Future[int]:
        self._session.check()
        if self._replica.is_full:
            raise TooManyChanges(
                f"{self.options.max_unacknowledged} changes wait for a server (max_unacknowledged): "
                "wait for one of them, or raise the limit"
            )
        change_id = str(uuid.uuid4())
        self._replica.add(change_id, patch, expected=version)
        answer = self._answers[change_id] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(_seen)
        self._publisher.publish_state()
        self._submitter.wake()
        return answer

    async def _acknowledged(self, answer: asyncio.Future[int], timeout_s: float | None) -> int:
        async with _bound(timeout_s, "the change is not acknowledged yet; it stays, and will be sent"):
            return await asyncio.shield(answer)

    def _settled(self, change: Change, result: int | Exception) -> None:
        self._progress.set()
        answer = self._answers.pop(change.id, None)
        if answer is None and isinstance(result, Exception) and self.closed is None:
            lost = "a change that a server had acknowledged may be lost with it: it cannot be made again"
            asyncio.get_running_loop().call_exception_handler({"message": lost, "exception": result})
        elif answer is not None and not answer.done():
            if isinstance(result, int):
                answer.set_result(result)
            else:
                answer.set_exception(result)
        self._publisher.publish_state()

    async def _run(self) -> None:
        session, timeout_s = self._session, self.options.close_timeout_s
        parts = (session.pump.run(), session.take_all(), session.catch_up(), self._submitter.run(), self._asked.wait())
        tasks: list[asyncio.Task[Any]] = [asyncio.ensure_future(part) for part in parts]
        reason = CloseReason(ended=Ended.INTERNAL, detail="the task of the client was cancelled")
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            reason = self._why(tasks)
            connection, session.pump.connection = session.pump.connection, None  # or the end of its task would cut it
            await _end_tasks(tasks, timeout_s)
            if connection is not None:
                await connection.close()
        finally:
            session.pump.abort()
            for task in tasks:
                task.cancel()
            self._end(reason)
            if self._handing is not None:
                await _end_tasks((self._handing,), timeout_s, grace_s=timeout_s)

    def _why(self, tasks: list[asyncio.Task[Any]]) -> CloseReason:
        if self._asked.is_set():
            return CloseReason(ended=Ended.ASKED)
        part = next(task for task in tasks if task.done())
        error = None if part.cancelled() else part.exception()
        if not isinstance(error, StreamFailed):
            return CloseReason(ended=Ended.INTERNAL, detail=f"a part of the client died: {error!r}")
        last = self._session.last_end
        if last is not None and is_refusal(last):
            detail = f"{error}; look at issuer, audience and expiry of the token"
            return CloseReason(ended=Ended.REFUSED, detail=detail)
        is_wrong = last is not None and last.cause is Cause.CONFIGURATION
        return CloseReason(ended=Ended.CONFIGURATION if is_wrong else Ended.FAILED, detail=str(error))

    def _end(self, reason: CloseReason) -> None:
        reason = replace(reason, unacknowledged=len(self.unacknowledged))
        self._session.end(reason)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(ClientClosed(f"the client has ended: {reason}"))
        self._answers.clear()
        self._progress.set()
        self._publisher.publish(Closed(at=self._publisher.clock(), reason=reason))


@asynccontextmanager
async def _bound(timeout_s: float | None, what: str) -> AsyncIterator[None]:
    """`asyncio.timeout` whose error has a text; None: no bound.

    Raises:
        TimeoutError: the time is over.
    """
    try:
        async with asyncio.timeout(timeout_s) as limit:
            yield
    except TimeoutError:
        if limit.expired():
            raise TimeoutError(f"{what} (waited {timeout_s:g} s)") from None
        raise


async def _end_tasks(tasks: Iterable[asyncio.Task[Any]], timeout_s: float, *, grace_s: float = 0.0) -> None:
    """Let tasks end for `grace_s`, cancel the others, and wait no longer than `timeout_s` for them."""
    tasks = list(tasks)
    if grace_s:
        await asyncio.wait(tasks, timeout=grace_s)
    for task in tasks:
        task.add_done_callback(seen)
        task.cancel()
    await asyncio.wait(tasks, timeout=timeout_s)


def _seen(answer: asyncio.Future[Any]) -> None:
    """Take the error of an answer that nothing awaits, or asyncio would report it."""
    if not answer.cancelled():
        answer.exception()
