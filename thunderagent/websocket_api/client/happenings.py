"""What a client tells its application: events, and why it ended."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


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
    """The state is another one. Of several changes that nobody has taken yet only the last is told."""

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
    """The server does not have, or may not have, changes that were acknowledged: they are sent again."""

    at: float
    changes: int
    """How many; of what is certainly lost, if anything is."""
    region: str | None
    is_certain: bool
    """True: its version is below ours. False: another region answers, and it is asked to be sure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Throttled:
    """The server asks for a pause, as this client or its user sent too much. Changes wait until it is over."""

    at: float
    pause_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """Pushes were dropped before they were told: the handler is slower than they come."""

    at: float
    pushes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """The client has ended; the last event."""

    at: float
    reason: CloseReason


Event = Connected | Disconnected | StateChanged | Pushed | Resubmitted | Throttled | Dropped | Closed
