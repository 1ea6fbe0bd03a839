"""What the tests of the WebSocket API have in common: an API in memory, events, and a client that asks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from websockets.asyncio.client import ClientConnection, connect

from thunderagent.model.bus import Event, EventBus
from thunderagent.model.errors import PushFailed
from thunderagent.stores.engine import Engine
from thunderagent.stores.sqlite.engine import MEMORY, SqliteEngine
from thunderagent.testing import FakeClock
from thunderagent.websocket_api.gateway import events as gateway_events
from thunderagent.websocket_api.gateway.gateway import Gateway
from thunderagent.websocket_api.gateway.issuer import Issuer
from thunderagent.websocket_api.protocol import Joiner
from thunderagent.websocket_api.server.handler import WebSocketApi
from thunderagent.websocket_api.server.throttle import Rates

LONG_S: Final = 10.0
"""No wait of a test is longer."""


class Api:
    """The handler on two engines, and what it pushed and told."""

    def __init__(
        self,
        states: Engine | None = None,
        connections: Engine | None = None,
        *,
        region: str = "eu-central-1",
        **limits: float,
    ) -> None:
        self.clock = FakeClock()
        self.states = states or SqliteEngine(MEMORY, clock=self.clock)
        self.connections = connections or SqliteEngine(MEMORY, clock=self.clock)
        self.bus = EventBus()
        self.told: list[Event] = []
        self.bus.subscribe(self.told.append)
        self.pushed: list[tuple[str, str]] = []
        self.gone = set[str]()
        self.failing = set[str]()
        self.ended: list[str] = []
        self.api = WebSocketApi(
            self.states,
            self.connections,
            region=region,
            post=self._post,
            end=self._end,
            now=self.clock.now,
            bus=self.bus,
            rates=Rates(**limits),
        )

    def _end(self, connection: str) -> bool:
        self.ended.append(connection)
        return True

    def _post(self, connection: str, text: str) -> bool:
        if connection in self.gone:
            return False
        if connection in self.failing:
            raise PushFailed("busy")
        self.pushed.append((connection, text))
        return True

    def connect(self, user: str | None = "ada", connection: str = "c1", **headers: str) -> dict[str, Any]:
        """The answer to `$connect`."""
        event = gateway_events.connect_event(connection, "/", headers, now=0.0)
        if user is not None:
            event["requestContext"]["authorizer"] = {"principalId": user}
        return self.api.handle(event)

    def disconnect(self, user: str = "ada", connection: str = "c1") -> dict[str, Any]:
        """The answer to `$disconnect`."""
        authorizer = {"principalId": user}
        return self.api.handle(gateway_events.disconnect_event(connection, authorizer, code=1000, reason="", now=0.0))

    def send(self, text: str | bytes, user: str | None = "ada", connection: str = "c1") -> dict[str, Any] | None:
        """The reply to a text, as its client reads it; None: nothing comes."""
        authorizer = {} if user is None else {"principalId": user}
        before = len(self.pushed)
        answer = self.api.handle(gateway_events.message_event(connection, text, authorizer, now=0.0))
        assert answer["statusCode"] == 200
        joiner = Joiner()
        for one, pushed in self.pushed[before:]:
            if one != connection:
                assert json.loads(pushed)["type"] == "changed"
                continue
            if json.loads(pushed)["type"] != "chunk":
                return dict(json.loads(pushed))
            if (whole := joiner.add(json.loads(pushed))) is not None:
                return dict(json.loads(whole))
        return dict(json.loads(answer["body"])) if "body" in answer else None

    def ask(self, action: str, *, user: str = "ada", connection: str = "c1", **fields: Any) -> dict[str, Any]:
        """The reply to a message."""
        reply = self.send(json.dumps({"action": action, "id": 1, **fields}), user, connection)
        assert reply is not None
        return reply

    def changes(self, connection: str) -> list[dict[str, Any]]:
        """What a connection was told of changes of others."""
        told = [json.loads(text) for one, text in self.pushed if one == connection]
        return [one for one in told if one["type"] == "changed"]

    def save(self, version: int, patch: dict[str, Any], change: str, **who: str) -> dict[str, Any]:
        """The reply to `setState`."""
        return self.ask("setState", version=version, patch=patch, change=change, **who)


class Asking:
    """A client of a gateway that waits for each reply."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self._joiner = Joiner()

    async def send(self, **message: Any) -> None:
        await self.socket.send(json.dumps(message))

    async def receive(self) -> dict[str, Any]:
        """The next message, chunks joined."""
        while True:
            data = json.loads(await asyncio.wait_for(self.socket.recv(), LONG_S))
            if data.get("type") != "chunk":
                return dict(data)
            if (whole := self._joiner.add(data)) is not None:
                return dict(json.loads(whole))

    async def ask(self, action: str, **fields: Any) -> dict[str, Any]:
        await self.send(action=action, **fields)
        return await self.receive()


def make_gateway(issuer: Issuer, **options: Any) -> Gateway:
    """A gateway on engines in memory."""
    states, connections = options.pop("states", None), options.pop("connections", None)
    return Gateway(
        states or SqliteEngine(MEMORY), connections or SqliteEngine(MEMORY), authorizer=issuer.authorizer(), **options
    )


@asynccontextmanager
async def asking(gateway: Gateway, token: str) -> AsyncIterator[Asking]:
    """A client that is connected as a browser would be."""
    async with connect(gateway.url, subprotocols=["thunderagent.v1", f"bearer.{token}"], compression=None) as socket:  # type: ignore[list-item]
        yield Asking(socket)


async def until(holds: Any) -> None:
    """Wait until something holds."""
    async with asyncio.timeout(LONG_S):
        while not holds():  # noqa: ASYNC110 - what is waited for sets no event
            await asyncio.sleep(0.005)
