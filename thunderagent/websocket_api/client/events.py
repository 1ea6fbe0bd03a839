"""Events of a client: what they say, and how they reach its handlers and iterators."""

from __future__ import annotations

import asyncio
import copy
import inspect
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Self

from thunderagent.websocket_api.client.replica import Replica

PUSHES_KNOWN: Final = 100
"""Ids of pushes that are recognised when they come again, over a second connection for example."""
STORY: Final = 100
"""Events of the connection that are kept."""


class Ended(StrEnum):
    """Why a client ended."""

    ASKED = "asked"
    """`close()` was called."""
    REFUSED = "refused"
    """Its credentials were refused again and again, fresh ones too."""
    CONFIGURATION = "configuration"
    """The URL or the token cannot work; no attempt would."""
    FAILED = "failed"
    """The peer refuses for another reason, again and again."""
    INTERNAL = "internal"
    """A part of the client died; please report it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseReason:
    """Why a client ended, and what is lost with it."""

    ended: Ended
    detail: str = ""
    """What happened and what to do, without secrets."""
    unacknowledged: int = 0
    """Changes that no server has acknowledged; `client.unacknowledged` has them."""

    def __str__(self) -> str:
        lost = f"; {self.unacknowledged} changes were not acknowledged" if self.unacknowledged else ""
        return (f"{self.ended}: {self.detail}" if self.detail else self.ended.value) + lost


@dataclass(frozen=True, slots=True, kw_only=True)
class Connected:
    """A connection is live, and the state is known."""

    at: float
    """Epoch seconds, as in every event."""
    region: str | None
    version: int
    is_rotated: bool
    """It took the place of a connection that neared the peer's limit on its age."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disconnected:
    """There is no connection; the client connects again by itself."""

    at: float
    reason: str
    """How it ended, and in how many seconds the next attempt begins."""
    was_connected: bool
    """False: an attempt failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChanged:
    """The state changed. Of several changes that wait in a subscription only the last stays."""

    at: float
    state: dict[str, Any]
    version: int
    region: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """The application's servers sent a message to this user."""

    at: float
    message: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Resubmitted:
    """Acknowledged changes are sent again: the server does not have them, or may not."""

    at: float
    changes: int
    """How many; of what is certainly lost, if anything is."""
    region: str | None
    is_certain: bool
    """True: the server has an earlier version. False: another region answers, and may lack them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Throttled:
    """The server asks for a pause, because this client or its user sent too much. Changes wait for its end."""

    at: float
    pause_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """Pushes were dropped: the handler is too slow for them."""

    at: float
    pushes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """The client has ended; the last event."""

    at: float
    reason: CloseReason


Event = Connected | Disconnected | StateChanged | Pushed | Resubmitted | Throttled | Dropped | Closed

Handler = Callable[..., Awaitable[object] | object]


class Subscription:
    """A bounded queue of events for one reader, and an iterator over them that ends with the client.

    A newer state replaces one that waits. A full queue drops its oldest push, or its oldest event if none is a push;
    the number of dropped pushes is the next event.
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


class Publisher:
    """Gives each event, and each new state of the replica, to all subscriptions. `limit`: events that wait in one."""

    def __init__(self, replica: Replica, limit: int, clock: Callable[[], float]) -> None:
        self._replica = replica
        self._limit = limit
        self.clock = clock
        self._subscriptions: list[Subscription] = []
        self._pushes: deque[str] = deque(maxlen=PUSHES_KNOWN)
        self._published: tuple[dict[str, Any], int] = ({}, 0)
        self._last: Closed | None = None
        self.story: deque[Event] = deque(maxlen=STORY)

    def subscribe(self) -> Subscription:
        """A subscription to every event from now on."""
        subscription = Subscription(self._limit)
        self._subscriptions.append(subscription)
        if self._last is not None:
            subscription.put(self._last)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)

    def publish(self, event: Event) -> None:
        if isinstance(event, Closed):
            self._last = event
        if not isinstance(event, (Pushed, StateChanged)):
            self.story.append(event)
        for subscription in self._subscriptions:
            subscription.put(event)

    def publish_state(self) -> None:
        """Publish the state unless it was published last."""
        replica = self._replica
        state, version = replica.state, replica.version
        if (state, version) != self._published:
            self._published = copy.deepcopy(state), version
            own = copy.deepcopy(state)  # a handler may change it
            self.publish(StateChanged(at=self.clock(), state=own, version=version, region=replica.region))

    def publish_push(self, push_id: object, message: Any) -> None:
        """Publish a message that was pushed, unless its id came before."""
        if isinstance(push_id, str):
            if push_id in self._pushes:
                return
            self._pushes.append(push_id)
        self.publish(Pushed(at=self.clock(), message=message))

    def publish_resubmission(self, changes: int, *, is_certain: bool) -> None:
        self.publish(Resubmitted(at=self.clock(), changes=changes, region=self._replica.region, is_certain=is_certain))


async def hand_out(subscription: Subscription, on_push: Handler | None, on_state: Handler | None) -> None:
    """Call the handlers for one event after the other. Their errors go to the exception handler of the event loop."""
    async for event in subscription:
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
