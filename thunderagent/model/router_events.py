"""What a router tells: the events that it took, refused, or could not handle."""

from __future__ import annotations

from dataclasses import dataclass

from thunderagent.model.events import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRouted(Event):
    """A router made tasks of an event, or found those of an earlier delivery."""

    route: str
    event_id: str
    task_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRefused(Event):
    """A router rejected an event; the reason holds no values of it."""

    route: str
    event_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EventFailed(Event):
    """A router could not handle a request, which is not the sender's fault."""

    route: str
    event_id: str
    error: str
