"""A local gateway: serves the WebSocket API on the loopback address as Amazon's API Gateway does.

The authorizer and the handler of Lambda get the same events under the same limits: 32 KB a frame, 128 KB a message, ten
minutes of silence, two hours of life. It also serves the browser's client and the demo page, and on a second port the
management API for pushes. For tests, drills and development.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http import HTTPStatus
from typing import Any, Final, Self, TypeVar

from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from thunderagent.model.edge_events import MessageFailed
from thunderagent.model.errors import PushFailed
from thunderagent.stores.engine import Engine
from thunderagent.websocket_api.gateway import events as gateway_events
from thunderagent.websocket_api.gateway.door import CLOSE_S, HOST, Door, Peer, Socket
from thunderagent.websocket_api.gateway.events import Limits
from thunderagent.websocket_api.gateway.management import Management
from thunderagent.websocket_api.gateway.pages import Pages
from thunderagent.websocket_api.server.authorizer import Authorizer, Unauthorized
from thunderagent.websocket_api.server.handler import PROTOCOL_HEADER, WebSocketApi

THREADS: Final = 16
"""Events that are handled at once."""
SEND_S: Final = 5.0
"""Longest wait for a client that does not read."""

T = TypeVar("T")
Answer = dict[str, Any]


class Gateway:
    """A WebSocket API of one region. Use it in `async with`, or in a thread with `in_thread`.

    Args:
        states: the table of states.
        connections: the table of connections of this region.
        region: its name.
        authorizer: checks tokens; the gateway uses its bus.
        clock: epoch seconds, for rows and for the end of tokens.
        limits: those of API Gateway, or less.
        ports: of WebSockets and pages, and of the management API; 0: a free one.
        pages: what browsers get.
    """

    def __init__(
        self,
        states: Engine,
        connections: Engine,
        *,
        region: str = "local",
        authorizer: Authorizer,
        clock: Callable[[], float] = time.time,
        limits: Limits | None = None,
        ports: tuple[int, int] = (0, 0),
        pages: Pages | None = None,
    ) -> None:
        self.region = region
        self.bus = authorizer.bus
        self.limits = limits or Limits()
        self.rotate_after_s = self.limits.rotate_after_s
        """Longest life of a connection; a change counts for open ones too."""
        self.is_cut = False
        self.pages = pages or Pages()
        self._now = clock
        self._connections = connections
        self._authorizer = authorizer
        self._api = WebSocketApi(
            states,
            connections,
            region=region,
            post=self.post,
            end=self.close_connection,
            now=clock,
            bus=self.bus,
            rates=self.limits,
        )
        self._peers: dict[str, Peer] = {}
        self._management = Management(self, ports[1])
        self._door = Door(
            ports[0],
            serve=self._serve,
            request=self._request,
            max_size=(self.limits.message_bytes, self.limits.frame_bytes),
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._tasks = set[asyncio.Task[None]]()
        self._tokens, self._filled_at = self.limits.connects_per_s, 0.0

    # What it is

    @property
    def url(self) -> str:
        """URL for clients."""
        return f"ws://{HOST}:{self._door.port}/"

    @property
    def http_url(self) -> str:
        """URL of the demo page."""
        return f"http://{HOST}:{self._door.port}/"

    @property
    def push_endpoint(self) -> str:
        """URL of the management API, for `THUNDERAGENT_PUSH_ENDPOINT`."""
        return f"http://{HOST}:{self._management.port}"

    @property
    def connections(self) -> int:
        """Number of connected clients."""
        return len(self._peers)

    @property
    def connection_ids(self) -> list[str]:
        """Ids of their connections, oldest first."""
        return list(self._peers)

    # Its life

    async def start(self) -> None:
        """Listen; the ports are known then."""
        self._loop = asyncio.get_running_loop()
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="gateway")
        await self._listen()

    async def close(self) -> None:
        """Close every connection in bounded time, as API Gateway does when a stage is deleted, and stop."""
        await self._door.close()
        self._management.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_S)
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._api.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def cut(self) -> None:
        """Lose the region: reset sockets, refuse new ones, without `$disconnect`. Any thread."""
        self._in_loop(self._cut)

    def mend(self) -> None:
        """Bring the region back on the same ports. Any thread."""
        self._in_loop(self._mend)

    def rotate(self) -> None:
        """Close all connections as after two hours. Any thread."""
        self._in_loop(self._rotate)

    def post(self, connection: str, text: str) -> bool:
        """Send a text to a connection, from another thread. False: it is gone.

        Raises:
            PushFailed: the client does not read it.
        """
        return self._from_thread(self.send(connection, text), connection)

    def close_connection(self, connection: str) -> bool:
        """Close a connection, from another thread. False: it is gone."""
        return self._from_thread(self.end(connection), connection)

    def _from_thread(self, coroutine: Coroutine[Any, Any, bool], connection: str) -> bool:
        assert self._loop is not None, "the gateway is not started"
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(SEND_S + 1)
        except TimeoutError:
            raise PushFailed(f"the client of {connection} does not read") from None

    async def send(self, connection: str, text: str) -> bool:
        """Send a text to a connection. False: it is gone."""
        peer = self._peers.get(connection)
        if peer is None or peer.socket is None:
            return False
        try:
            async with asyncio.timeout(SEND_S):
                await peer.socket.send(text)
        except ConnectionClosed:
            return False
        self._touch(peer)
        return True

    async def end(self, connection: str) -> bool:
        """Close a connection. False: it is gone."""
        peer = self._peers.get(connection)
        if peer is None or peer.socket is None:
            return False
        self._spawn(peer.socket.close(1000))
        return True

    def since(self, connection: str) -> float | None:
        """Epoch seconds at which a connection was opened; None: it is gone."""
        peer = self._peers.get(connection)
        return peer.opened_at if peer else None

    # Listening

    async def _listen(self) -> None:
        await self._door.open()
        await self._management.open()
        if self.is_cut:  # meanwhile
            self._slam()

    def _cut(self) -> None:
        if not self.is_cut:
            self.is_cut = True
            for peer in self._peers.values():
                peer.is_lost = True
            self._slam()

    def _slam(self) -> None:
        self._door.slam()
        self._management.slam()

    def _mend(self) -> None:
        if self.is_cut:
            self.is_cut = False
            self._door.unlock()
            self._spawn(self._listen())

    def _rotate(self) -> None:
        for peer in self._peers.values():
            if peer.socket is not None:
                self._spawn(peer.socket.close(1001, "Going away"))

    # Connecting

    async def _request(self, connection: Socket, request: Request) -> Response | None:
        headers = dict(request.headers.raw_items())
        if request.headers.get("Upgrade", "").lower() != "websocket":
            return self._page(connection, request, headers)
        if not self._may_connect():
            return connection.respond(HTTPStatus.TOO_MANY_REQUESTS, "Limit Exceeded\n")
        event = gateway_events.connect_event(gateway_events.new_connection_id(), request.path, headers, now=self._now())
        try:
            status, peer = await self._run(lambda: self._connect(event))
        except RuntimeError:  # the gateway is closing
            return connection.respond(HTTPStatus.SERVICE_UNAVAILABLE, "Service Unavailable\n")
        if peer is None:
            return connection.respond(status, f"{HTTPStatus(status).phrase}\n")
        connection.peer = peer
        return None

    def _connect(self, event: Answer) -> tuple[int, Peer | None]:
        """Authorizer and `$connect`, in a thread: the status, and the peer if it may connect."""
        about = event["requestContext"]
        try:
            policy = self._authorizer.authorize(event)
        except Unauthorized:
            return HTTPStatus.UNAUTHORIZED, None
        except Exception as error:
            return self._failed(about["connectionId"], error), None
        if policy["policyDocument"]["Statement"][0]["Effect"] != "Allow":
            return HTTPStatus.FORBIDDEN, None
        authorizer = {**policy["context"], "principalId": policy["principalId"]}
        try:
            answer = self._api.handle({**event, "requestContext": {**about, "authorizer": authorizer}})
        except Exception as error:
            return self._failed(about["connectionId"], error), None
        if not 200 <= answer["statusCode"] < 300:
            return answer["statusCode"], None
        protocol = answer.get("headers", {}).get(PROTOCOL_HEADER)
        return HTTPStatus.SWITCHING_PROTOCOLS, Peer(about["connectionId"], authorizer, protocol, self._now())

    def _page(self, connection: Socket, request: Request, headers: Mapping[str, str]) -> Response:
        page = self.pages.answer(request.method, request.path, headers)
        response = connection.respond(page.status, page.body)
        del response.headers["Content-Type"]
        response.headers["Content-Type"] = page.kind
        response.headers["Cache-Control"] = "no-store"
        if page.origin is not None:
            response.headers["Access-Control-Allow-Origin"] = page.origin
        return response

    def _may_connect(self) -> bool:
        """Take a token from the bucket of connects, which holds those of one second."""
        now, rate = asyncio.get_running_loop().time(), self.limits.connects_per_s
        self._tokens = min(rate, self._tokens + (now - self._filled_at) * rate)
        self._filled_at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    # Connected

    async def _serve(self, connection: Socket) -> None:
        peer, opened = connection.peer, asyncio.get_running_loop().time()
        peer.socket = connection
        self._touch(peer)
        self._peers[peer.id] = peer
        try:
            while (left := self._left(peer, opened)) > 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        data = await connection.recv()
                    self._touch(peer)
                    while len(peer.handling) >= self.limits.at_once:
                        await asyncio.wait(peer.handling, return_when=asyncio.FIRST_COMPLETED)
                    peer.handling.add(task := self._spawn(self._handle(peer, data)))
                    task.add_done_callback(peer.handling.discard)
            await connection.close(1001, "Going away")
        except ConnectionClosed:
            pass
        finally:
            self._peers.pop(peer.id, None)
            if not peer.is_lost:
                self._spawn(self._disconnected(peer, connection))

    def _left(self, peer: Peer, opened: float) -> float:
        """Seconds until the connection ends if it stays silent."""
        now = asyncio.get_running_loop().time()
        return min(opened + self.rotate_after_s, peer.active_at + self.limits.idle_s) - now

    async def _handle(self, peer: Peer, data: str | bytes) -> None:
        event = gateway_events.message_event(peer.id, data, peer.authorizer, now=self._now())
        try:
            async with asyncio.timeout(self.limits.answer_s):
                body = (await self._run(lambda: self._api.handle(event))).get("body")
        except TimeoutError:
            body = gateway_events.failure(peer.id, event, "Endpoint request timed out")
        except Exception as error:
            self._failed(peer.id, error)
            body = gateway_events.failure(peer.id, event, "Internal server error")
        if body:
            with suppress(TimeoutError):
                await self.send(peer.id, body)

    def _failed(self, connection: str, error: Exception) -> HTTPStatus:
        """Emit the error of a function: its client learns as little as from API Gateway."""
        self.bus.emit(MessageFailed(connection=connection, user="", error=f"{type(error).__name__}: {error}"))
        return HTTPStatus.INTERNAL_SERVER_ERROR

    async def _disconnected(self, peer: Peer, connection: Socket) -> None:
        code, reason = connection.close_code or 1006, connection.close_reason or ""
        event = gateway_events.disconnect_event(peer.id, peer.authorizer, code=code, reason=reason, now=self._now())
        with suppress(Exception):  # API Gateway's is best effort too
            await self._run(lambda: self._api.handle(event))

    def _touch(self, peer: Peer) -> None:
        peer.active_at = asyncio.get_running_loop().time()

    # Threads

    async def _run(self, call: Callable[[], T]) -> T:
        assert self._pool is not None
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)

    def _spawn(self, coroutine: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # taken, or asyncio would report the error of a client that is gone

    def _in_loop(self, call: Callable[[], None]) -> None:
        assert self._loop is not None, "the gateway is not started"
        try:
            is_here = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            is_here = False
        if is_here:
            call()
            return

        async def do() -> None:
            call()

        asyncio.run_coroutine_threadsafe(do(), self._loop).result(SEND_S)


@contextmanager
def in_thread(*gateways: Gateway) -> Iterator[None]:
    """Run gateways in an event loop in a thread of its own, for code without a loop."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="gateway", daemon=True)
    thread.start()

    def do(coroutine: Any) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, loop).result(10 * CLOSE_S)

    try:
        for one in gateways:
            do(one.start())
        yield
    finally:
        for one in gateways:
            with suppress(Exception):
                do(one.close())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10 * CLOSE_S)
        loop.close()
