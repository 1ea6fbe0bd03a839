"""Events of the router and of the WebSocket API."""

from __future__ import annotations

from dataclasses import dataclass

from thunderagent.model.bus import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRouted(Event):
    """A router made tasks of an event, or found those of an earlier delivery."""

    route: str
    event_id: str
    task_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRefused(Event):
    """A router rejected an event; `reason` holds none of its values."""

    route: str
    event_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EventFailed(Event):
    """A router could not handle a request, through no fault of the sender."""

    route: str
    event_id: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionRefused(Event):
    """A client may not connect; `reason` holds no token."""

    connection: str
    status: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionOpened(Event):
    connection: str
    user: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageRefused(Event):
    """A message was answered with an error of its sender."""

    connection: str
    user: str
    error: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionFlooded(Event):
    """A connection was closed, as it went on sending too much."""

    connection: str
    user: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageFailed(Event):
    """A message could not be handled, through no fault of its sender."""

    connection: str
    user: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NotificationFailed(Event):
    """A change is saved, but the user's other connections may not hear of it."""

    user: str
    version: int
    error: str
