"""Opens and closes WebSocket connections with `websockets`: one TLS context, fresh addresses, bounded ends."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, Final

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import NegotiationError
from websockets.proxy import get_proxy

from thunderagent.model.errors import ConfigurationError
from thunderagent.model.forks import of_this_process
from thunderagent.streams.connection.endpoint import Endpoint
from thunderagent.streams.connection.options import StreamOptions
from thunderagent.streams.connection.resolver import Resolver

KEEPALIVE: Final[tuple[tuple[str, int], ...]] = (
    ("TCP_KEEPIDLE", 10),
    ("TCP_KEEPINTVL", 5),
    ("TCP_KEEPCNT", 3),
    ("TCP_USER_TIMEOUT", 30_000),
)
"""Finds a dead host within 25 s while a full buffer keeps our own pings silent."""


@cache
def shared_context() -> ssl.SSLContext:
    """The TLS context of this process. One for each connection costs 1.1 MB and 26 ms of CPU, measured."""
    return ssl.create_default_context()


class _Connect(connect):
    """One attempt; it ends with what a redirect changed."""

    def __init__(
        self, endpoint: Endpoint, options: StreamOptions, resolver: Resolver, reached: Callable[[], object]
    ) -> None:
        self._options = options
        self._resolver = resolver
        self._reached = reached
        super().__init__(
            endpoint.url,
            additional_headers=dict(endpoint.headers),
            subprotocols=list(endpoint.subprotocols) or None,  # type: ignore[arg-type] # a NewType over str
            compression="deflate" if options.compression else None,  # Amazon's API Gateway misbehaves with it
            proxy=options.proxy or None,
            open_timeout=options.open_timeout_s,
            ping_interval=None,  # the library's own cuts healthy connections of slow handlers
            close_timeout=options.close_timeout_s,
            max_size=options.max_size,
        )

    async def open_tcp_connection(self) -> ClientConnection:
        before, asked = self.create_connection_kwargs, self.proxy
        extra: dict[str, Any] = {"ssl": self._options.ssl or shared_context()} if self.ws_uri.secure else {}
        if asked is True:
            self.proxy = get_proxy(self.ws_uri)  # here, or the library would look at the environment once more
        failure: OSError | None = None
        try:
            addresses: list[str | None] = [None] if self.proxy else [*await self._addresses()]
            share_s = self._options.open_timeout_s / len(addresses) if len(addresses) > 1 else None
            for address in addresses:
                self.create_connection_kwargs = {**before, **extra}
                if address is not None:
                    self.create_connection_kwargs |= {"host": address, "port": self.ws_uri.port}
                try:
                    async with asyncio.timeout(share_s):  # one that drops packets must leave time for the next
                        opened = await super().open_tcp_connection()
                    self._reached()
                    return opened
                except ssl.SSLError:
                    raise
                except OSError as error:
                    failure = failure or error
        finally:  # or a redirect to another host would be refused, or take the wrong proxy
            self.create_connection_kwargs, self.proxy = before, asked
        raise failure or OSError(f"{self.ws_uri.host} has no address")

    async def _addresses(self) -> list[str]:
        return await self._resolver.addresses(self.ws_uri.host, self.ws_uri.port, self._options.dns_timeout_s)


async def open_connection(
    endpoint: Endpoint, options: StreamOptions, resolver: Resolver, *, reached: Callable[[], object] = lambda: None
) -> ClientConnection:
    """Connect and shake hands.

    Args:
        reached: called after TCP and TLS, before the handshake.

    Raises:
        ConfigurationError: a subprotocol is required, and the endpoint names none.
        OSError: no network, no name, no answer, or no acceptable certificate.
        websockets.exceptions.InvalidHandshake: the peer answered otherwise.
        websockets.exceptions.InvalidURI: the URL is none.
    """
    if options.require_subprotocol and not endpoint.subprotocols:
        raise ConfigurationError("require_subprotocol is set: answer with an Endpoint(url, subprotocols=[…])")
    connection = await _Connect(endpoint, options, resolver, reached)
    if options.require_subprotocol and connection.subprotocol is None:
        abort_connection(connection)
        raise NegotiationError(  # without their names: some peers take a token as one
            f"the peer chose none of {len(endpoint.subprotocols)} subprotocols, and require_subprotocol is set"
        )
    try:
        _set_up(connection.transport.get_extra_info("socket"))
        of_this_process(connection, _close_copy)
    except OSError:  # it has ended already
        abort_connection(connection)
        raise
    return connection


def _set_up(sock: socket.socket | None) -> None:
    if sock is None:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _close_copy(connection: ClientConnection) -> None:
    """Close the socket of a connection in a forked child, without a word to the peer."""
    sock = connection.transport.get_extra_info("socket")
    inner = getattr(sock, "_sock", None)
    if inner is not None:  # asyncio's own class wraps it, and cannot close it
        inner.close()
    elif sock is not None and not connection.transport.is_closing():  # uvloop's keeps its number when it is closed
        os.close(sock.fileno())


async def close_connection(connection: ClientConnection, options: StreamOptions, *, code: int = 1000) -> None:
    """Close politely; cut the connection when the peer does not answer in time or we are cancelled."""
    try:
        async with asyncio.timeout(options.close_timeout_s):
            if not connection.transport.is_closing():
                connection.transport.resume_reading()  # paused, it would not read the answer behind messages either
            await connection.close(code)
    except (TimeoutError, OSError, AttributeError):
        pass  # the peer is mute, or has ended already: what follows needs no answer
    finally:
        abort_connection(connection)


def abort_connection(connection: ClientConnection) -> None:
    with suppress(AttributeError):  # asyncio's, when a closed transport has ended as its last bytes were flushed
        connection.transport.abort()
