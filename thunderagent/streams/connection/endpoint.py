"""Where to connect: asked anew for every attempt."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from thunderagent.model.errors import ConfigurationError
from thunderagent.streams.connection.ending import ConnectionEnd
from thunderagent.streams.cursor import Cursor


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What is known when an attempt to connect begins."""

    number: int
    """From 1; it starts afresh when the stream has made progress."""
    cursor: Cursor | None = None
    """Where the stream is to be resumed."""
    auth_failed: bool = False
    """The peer did not accept the last credentials: fetch new ones."""
    last_end: ConnectionEnd | None = None
    """How the last connection or attempt ended."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A URL with what its handshake carries."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Often credentials: never logged."""
    subprotocols: Sequence[str] = ()


Target = str | Endpoint
EndpointSource = Target | Sequence[Target] | Callable[[Attempt], Target | Awaitable[Target]]
"""A URL; several, tried in turn; or a function that answers with one for each attempt, which may be a coroutine."""


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
