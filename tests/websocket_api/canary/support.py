"""What the tests of the canary share: a WebSocket API in a thread that does as it is told, or answers wrongly."""

from __future__ import annotations

import asyncio
import http
import json
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from thunderagent.websocket_api.protocol import merge_patch

REGION: Final = "eu-central-1"
LIMIT_S: Final = 20.0
"""No run of a test is longer; none takes more than a fraction of it on a machine that is not overloaded."""

T = TypeVar("T")
Answer = dict[str, Any] | str | None
"""A message, a text that is none, or silence."""
Change = Callable[[dict[str, Any], dict[str, Any]], Answer]
"""Makes of a question and its right answer the one that is sent."""


class Api:
    """A WebSocket API on 127.0.0.1, in a thread of its own.

    `changes` has for an action what its answers are made into; `status` refuses every handshake; `token` is asked for;
    `is_deaf_at_end` answers no close.
    """

    def __init__(self, region: str | None = REGION) -> None:
        self.region = region
        self.token: str | None = None
        self.status: int | None = None
        self.changes: dict[str, Change] = {}
        self.is_deaf_at_end = False
        self.state: dict[str, Any] = {}
        self.version = 0
        self.extra: list[str] = []
        """Texts that are sent before the next answer."""
        self.open = 0
        self.seen: list[dict[str, Any]] = []
        self.authorizations: list[str | None] = []
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._end = asyncio.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()), daemon=True)

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(LIMIT_S)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()
        self._loop.close()

    async def _serve(self) -> None:
        server: Server
        async with serve(
            self._talk, "127.0.0.1", 0, process_request=self._admit, ping_interval=None, close_timeout=0.1
        ) as server:
            self.url = f"ws://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}/prod"
            self._ready.set()
            await self._end.wait()

    def _admit(self, connection: ServerConnection, request: Request) -> Response | None:
        given = request.headers.get("Authorization")
        self.authorizations.append(given)
        status = self.status
        if status is None and self.token is not None and given != f"Bearer {self.token}":
            status = 401
        return None if status is None else connection.respond(http.HTTPStatus(status), "no\n")

    async def _talk(self, connection: ServerConnection) -> None:
        self.open += 1
        try:
            async for text in connection:
                asked = json.loads(text)
                self.seen.append(asked)
                right = {"id": asked["id"], "region": self.region, **self._answer(asked)}
                change = self.changes.get(asked["action"])
                answer = change(asked, right) if change else right
                while self.extra:
                    await connection.send(self.extra.pop(0))
                if self.is_deaf_at_end and asked["action"] == "getState":
                    await connection.send(json.dumps(answer))
                    connection.transport.pause_reading()
                    await self._end.wait()
                    connection.transport.abort()
                    return
                if answer is not None:
                    await connection.send(answer if isinstance(answer, str) else json.dumps(answer))
        except ConnectionClosed:
            pass
        finally:
            self.open -= 1

    def _answer(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        match asked["action"]:
            case "ping":
                return {"type": "pong"}
            case "getState":
                return {"type": "state", "state": self.state, "version": self.version}
            case _ if asked["version"] != self.version:
                return {"type": "conflict", "state": self.state, "version": self.version}
            case _:
                self.state = merge_patch(self.state, asked["patch"])
                self.version += 1
                return {"type": "saved", "version": self.version}


@contextmanager
def an_api(region: str | None = REGION) -> Iterator[Api]:
    """An API that is up."""
    api = Api(region)
    api.start()
    try:
        yield api
    finally:
        api.close()


def run(main: Coroutine[Any, Any, T], *, limit_s: float = LIMIT_S) -> T:
    """Run it in bounded time, with every task that it leaves behind and every unseen error as a failure."""

    async def whole() -> T:
        failures: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
        async with asyncio.timeout(limit_s):
            result = await main
        await asyncio.sleep(0)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left
        assert not failures
        return result

    return asyncio.run(whole())


async def until(condition: Callable[[], object]) -> None:
    """Wait in a loop until something holds that a thread brings about."""
    for _ in range(int(LIMIT_S / 0.005)):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not hold in time")
