"""Where to connect, resolved for every attempt."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from thunderagent.model.errors import ConfigurationError
from thunderagent.streams.connection.ending import ConnectionEnd
from thunderagent.streams.cursor import Cursor


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What the endpoint function gets before an attempt to connect."""

    number: int
    """From 1; again from 1 when the stream has made progress."""
    cursor: Cursor | None = None
    """The place from which to resume the stream."""
    auth_failed: bool = False
    """True when the peer refused the last credentials: fetch new ones."""
    last_end: ConnectionEnd | None = None
    """The end of the last connection or attempt."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A URL, and what the handshake carries."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Often credentials: never logged."""
    subprotocols: Sequence[str] = ()


Target = str | Endpoint
EndpointSource = Target | Sequence[Target] | Callable[[Attempt], Target | Awaitable[Target]]
"""A URL, several to try in turn, or a function, also a coroutine function, that makes one for each attempt."""


async def resolve_endpoint(source: EndpointSource, attempt: Attempt) -> Endpoint:
    """The endpoint of this attempt. A redirect of an earlier one leaves no trace.

    Raises:
        ConfigurationError: the answer is no URL of a WebSocket.
    """
    target: object
    if isinstance(source, (str, Endpoint)):
        target = source
    elif callable(source):
        target = source(attempt)
        if inspect.isawaitable(target):
            target = await target
    else:
        if not source:
            raise ConfigurationError("the list of endpoints is empty: give at least one URL")
        target = source[(attempt.number - 1) % len(source)]
    endpoint = Endpoint(target) if isinstance(target, str) else target
    if not isinstance(endpoint, Endpoint) or not endpoint.url.startswith(("ws://", "wss://")):
        # Only its beginning: the rest may hold a token.
        shown = repr(endpoint.url[:12]) + "…" if isinstance(endpoint, Endpoint) else f"a {type(endpoint).__name__}"
        raise ConfigurationError(f"the endpoint {shown} is no URL of a WebSocket: it must begin with ws:// or wss://")
    return endpoint
