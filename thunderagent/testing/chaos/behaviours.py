"""What a connection can meet. Before the WebSocket is open it is one thing; a `Feed` combines what comes after.

HangUp, Unanswered, Garbage, Refuse, Redirect, BrokenTls    the WebSocket never opens
Feed(…)                                                     it opens, and each field spoils one thing
Feed(ending=Close(…) | Cut(…) | Silence(…) | Violate(…))    … and the server ends it
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from thunderagent.model.errors import ConfigurationError
from thunderagent.testing.chaos.frames import Violation

SUBSCRIBED: Final[Mapping[str, Any]] = {"op": "subscribed"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """The behaviour of the server on one connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HangUp(Behaviour):
    """TCP is accepted and ended at once: reset, or closed with a FIN.

    The request is not read, so the attempt has no path; only a server that scripts per key has to read it first.
    """

    reset: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Unanswered(Behaviour):
    """The request is read and never answered; TCP stays open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Garbage(Behaviour):
    """The answer is no HTTP; then TCP is closed."""

    data: bytes = b"SSH-2.0-OpenSSH_9.6\r\n\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse(Behaviour):
    """The answer is this status of HTTP."""

    status: int = 503
    headers: Mapping[str, str] = field(default_factory=dict)
    retry_after: str | int | None = None
    """The header `Retry-After`: seconds, or a date of HTTP."""
    body: str = ""

    def __post_init__(self) -> None:
        if not 200 <= self.status <= 999:
            raise ConfigurationError(f"{self.status} is no final status of HTTP")


@dataclass(frozen=True, slots=True, kw_only=True)
class Redirect(Behaviour):
    """The answer names another URL."""

    to: str
    status: int = 302


class TlsFault(StrEnum):
    """How the handshake of TLS fails: a reset after the client's hello, no answer to it, or a strange certificate."""

    RESET = "reset"
    UNANSWERED = "unanswered"
    UNTRUSTED = "untrusted"


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenTls(Behaviour):
    """TLS fails. Needs a server with `tls` that does not script per key."""

    fault: TlsFault = TlsFault.RESET


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What the server does once both are reached; without any, right after the handshake."""

    after_messages: int = 0
    """Messages sent on this connection, with duplicates."""
    after_s: float = 0.0
    """Seconds since the handshake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Close(Ending):
    """A close frame; TCP is closed when the client has answered it."""

    code: int | None = 1000
    """None: an empty frame."""
    reason: str = ""

    def __post_init__(self) -> None:
        if self.code is not None and not 0 <= self.code < 1 << 16:
            raise ConfigurationError(f"{self.code} does not fit a close frame")
        if self.code is None and self.reason:
            raise ConfigurationError("a close frame without a code cannot give a reason")
        if len(self.reason.encode()) > 123:
            raise ConfigurationError("the reason in a close frame has at most 123 bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut(Ending):
    """The end of TCP without a close frame: reset, or closed with a FIN."""

    reset: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence(Ending):
    """No data, no pong, no answer to a close, no end of TCP: a dead peer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Violate(Ending):
    """A frame that the standard forbids, and no more data; pings and the client's close are answered."""

    violation: Violation = Violation.RESERVED_OPCODE


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed(Behaviour):
    """The WebSocket opens; by default this is a healthy feed."""

    handshake_s: float = 0.0
    """Seconds until the handshake is answered."""
    right_accept: bool = True
    """False: the answer of the handshake is that to another key."""
    acknowledgement: Mapping[str, Any] | None = field(default_factory=lambda: dict(SUBSCRIBED))
    """The answer to a subscription; None: no answer and no data."""
    sends_data: bool = True
    """False: a mute feed that answers subscriptions and pings."""
    answers_pings: bool = True
    answers_close: bool = True
    """False: after a close frame of the client nothing more is sent, and TCP stays open."""
    spacing_s: float = 0.0
    """Seconds between two messages."""
    burst: int = 0
    """Messages that are published at once, for all, when this connection subscribes."""
    duplicate_each: int = 0
    """Messages whose number on this connection is a multiple of it are sent twice; 0: none."""
    skip: Container[int] = range(0)
    """Sequence numbers that are not sent."""
    new_epoch_after: int | None = None
    """Messages on this connection after which the rest of the history gets a new epoch, for all: from 1 again."""
    big_bytes: int = 0
    """Bytes to which the first message is padded, by a field `padding`."""
    ending: Ending | None = None
    """How the connection ends; None: it does not."""
