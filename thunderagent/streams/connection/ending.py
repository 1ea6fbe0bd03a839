"""How an attempt or a connection ended, as a value for verdicts and the journal."""

from __future__ import annotations

import math
import ssl
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from enum import StrEnum
from typing import Final

from websockets.exceptions import (
    ConnectionClosed,
    InvalidHandshake,
    InvalidProxy,
    InvalidStatus,
    InvalidURI,
    PayloadTooBig,
    SecurityError,
)

from thunderagent.model.errors import ConfigurationError


class State(StrEnum):
    RESOLVING = "resolving"
    """Asks for the endpoint, or waits for its turn to connect."""
    CONNECTING = "connecting"
    SUBSCRIBING = "subscribing"
    LIVE = "live"
    PAUSED = "paused"
    """The buffer is full: nothing is read until the handler has caught up."""
    BACKOFF = "backoff"
    CLOSED = "closed"
    FAILED = "failed"


CAUGHT_UP: Final = "the handler has caught up"
"""The reason of LIVE after a pause."""

NEXT_ATTEMPT: Final = "; next attempt in "
"""In a reason of BACKOFF: between the end and the seconds until the next attempt."""


class FunctionFailed(Exception):
    """A function given to `connect` has raised outside of the handler; its error is the cause of this one."""


class Cause(StrEnum):
    """Why a connection or an attempt ended; it decides the verdict."""

    CLOSED = "closed"
    """The peer closed; `code` says how."""
    HTTP = "http"
    """The handshake was answered with another status."""
    NETWORK = "network"
    """Refused, reset, unreachable, no name, no answer in time."""
    TLS = "tls_verify"
    """The certificate is not acceptable."""
    PROTOCOL = "protocol"
    """The peer broke the protocol."""
    TOO_BIG = "message_too_big"
    ZOMBIE = "zombie"
    """Pings were not answered."""
    IDLE = "idle"
    """No message for `idle_timeout_s`."""
    ROTATED = "rotated"
    """Ended by us before the peer's limit on its age."""
    ASKED = "asked"
    """`reconnect()` was called, or a gap asked for it."""
    ENDPOINT = "endpoint"
    """The endpoint function failed."""
    SUBSCRIBE = "subscribe"
    """`on_open` failed or took too long."""
    CONFIGURATION = "configuration"
    """The endpoint or a setting cannot work."""
    INTERNAL = "internal"
    """A task of the library died."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionEnd:
    """How an attempt or a connection ended."""

    cause: Cause
    state: State
    """The state in which it ended."""
    code: int | None = None
    """Close code (RFC 6455, section 7.4); 1006 without one."""
    status: int | None = None
    """HTTP status of the handshake."""
    retry_after_s: float | None = None
    detail: str = ""

    @property
    def kind(self) -> str:
        """The cause with its code or status: repetitions are counted by it."""
        if self.code is not None:
            return f"{self.cause} {self.code}"
        return f"{self.cause} {self.status}" if self.status is not None else self.cause.value

    def __str__(self) -> str:
        return f"{self.kind} ({self.detail})" if self.detail else self.kind


def end_of(error: BaseException, state: State, *, now: float, is_open: bool = False) -> ConnectionEnd:
    """The end that an exception means: one of the socket is of the network, any other is named by the feed's state.

    Args:
        is_open: True when our connection is open, so that another one has ended.
    """
    detail = _text(error)
    match error:
        case ConnectionClosed() if state is not State.RESOLVING and not is_open:
            return _closed(error, state)
        case InvalidURI() | InvalidProxy():  # its text has the URL, perhaps with a token or a password
            what = "endpoint" if isinstance(error, InvalidURI) else "proxy of the environment"
            return ConnectionEnd(cause=Cause.CONFIGURATION, state=state, detail=f"the {what} is no valid URL")
        case ConfigurationError():
            return ConnectionEnd(cause=Cause.CONFIGURATION, state=state, detail=detail)
        case _ if state is not State.CONNECTING:
            cause = {State.RESOLVING: Cause.ENDPOINT, State.SUBSCRIBING: Cause.SUBSCRIBE}.get(state, Cause.INTERNAL)
            return ConnectionEnd(cause=cause, state=state, detail=detail)
        case InvalidStatus():
            status, after = error.response.status_code, error.response.headers.get("Retry-After")
            return ConnectionEnd(
                cause=Cause.HTTP, state=state, status=status, retry_after_s=_retry_after(after, now), detail=detail
            )
        case PayloadTooBig():
            return ConnectionEnd(cause=Cause.TOO_BIG, state=state, code=1009, detail=detail)
        case SecurityError():
            return ConnectionEnd(cause=Cause.PROTOCOL, state=state, detail=detail)
        case ssl.SSLCertVerificationError():
            return ConnectionEnd(cause=Cause.TLS, state=state, detail=detail)
        case InvalidHandshake():
            return ConnectionEnd(cause=_network_or_protocol(error), state=state, detail=detail)
        case OSError() | EOFError():
            return ConnectionEnd(cause=Cause.NETWORK, state=state, detail=detail)
        case _:
            return ConnectionEnd(cause=Cause.INTERNAL, state=state, detail=detail)


def _closed(error: ConnectionClosed, state: State) -> ConnectionEnd:
    sent_first = error.sent is not None and not error.rcvd_then_sent
    close = error.sent if sent_first else error.rcvd
    if close is None:
        return ConnectionEnd(cause=Cause.CLOSED, state=state, code=1006, detail=_text(error.__cause__ or error))
    if sent_first and close.code == 1009:
        return ConnectionEnd(cause=Cause.TOO_BIG, state=state, code=1009, detail=close.reason)
    if sent_first and close.code in (1002, 1007):
        return ConnectionEnd(cause=Cause.PROTOCOL, state=state, code=close.code, detail=close.reason)
    return ConnectionEnd(cause=Cause.CLOSED, state=state, code=close.code, detail=close.reason)


def _network_or_protocol(error: BaseException) -> Cause:
    """A handshake that was cut off is an error of the network, one with wrong content an error of the peer."""
    return Cause.NETWORK if isinstance(error.__cause__, (OSError, EOFError)) else Cause.PROTOCOL


def _text(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:
        text = ""
    name = type(error).__name__
    return f"{name}: {text}"[:300] if text else name


def _retry_after(value: str | None, now: float) -> float | None:
    """Seconds of a header Retry-After: a number or a date (RFC 9110, section 10.2.3)."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - now
        except (ValueError, OverflowError):
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None
