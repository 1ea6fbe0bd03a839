"""Events on their way to a handler: as many as are kept, whatever the handler does."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Self

from thunderagent.websocket_api.client.happenings import Closed, Dropped, Event, Pushed, StateChanged

Handler = Callable[..., Awaitable[object] | object]


class Outlet:
    """A bounded queue of events for one reader, and an iterator over them that ends with the client.

    A state that nobody has taken yet is replaced by a newer one. When the queue is full the oldest push goes, or the
    oldest event if none is a push; how many went is told before the next event.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._events: deque[Event] = deque()
        self._dropped = 0
        self._some = asyncio.Event()
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._events)

    def put(self, event: Event) -> None:
        """Add an event; never waits."""
        if self._is_closed:
            return
        if isinstance(event, StateChanged) and self._events and isinstance(self._events[-1], StateChanged):
            self._events.pop()
        elif len(self._events) >= self._limit:
            self._make_room()
        self._events.append(event)
        self._is_closed = isinstance(event, Closed)
        self._some.set()

    def close(self) -> None:
        """The reader wants no more."""
        self._is_closed = True
        self._some.set()

    def _make_room(self) -> None:
        oldest = next((place for place, one in enumerate(self._events) if isinstance(one, Pushed)), 0)
        self._dropped += isinstance(self._events[oldest], Pushed)
        del self._events[oldest]

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        while not self._events:
            if self._is_closed:
                raise StopAsyncIteration
            self._some.clear()
            await self._some.wait()
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            return Dropped(at=time.time(), pushes=dropped)
        return self._events.popleft()


async def hand_out(outlet: Outlet, on_push: Handler | None, on_state: Handler | None) -> None:
    """Call the handlers, one event after the other; an error of one is told as asyncio tells those of callbacks."""
    async for event in outlet:
        match event:
            case Pushed() if on_push is not None:
                await _call(on_push, event.message)
            case StateChanged() if on_state is not None:
                await _call(on_state, event.state, event.version)


async def _call(handler: Handler, *arguments: Any) -> None:
    try:
        answer = handler(*arguments)
        if inspect.isawaitable(answer):
            await answer
    except Exception as error:
        context = {"message": "a handler of the WebSocket client failed; it goes on", "exception": error}
        asyncio.get_running_loop().call_exception_handler(context)
