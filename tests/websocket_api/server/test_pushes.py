"""Pushes to the connections of a user: from a job, within bounds, and what becomes of connections that are gone."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

from tests.support.engine import serving
from tests.websocket_api.server.support import LONG_S, make_gateway
from thunderagent.jobs.context import Context
from thunderagent.jobs.job import job
from thunderagent.model.errors import (
    AccessDenied,
    ConfigurationError,
    CredentialsMissing,
    MessageTooLarge,
    PushFailed,
    StoreError,
)
from thunderagent.settings import load_settings
from thunderagent.stores.sqlite.engine import MEMORY, SqliteEngine
from thunderagent.streams.context import StreamContext
from thunderagent.streams.job import stream
from thunderagent.testing import make_lease, run_stream
from thunderagent.testing.faulty_engine import Fault, FaultyEngine
from thunderagent.websocket_api.gateway.gateway import Gateway, in_thread
from thunderagent.websocket_api.gateway.issuer import Issuer
from thunderagent.websocket_api.protocol import FRAME_BYTES, MESSAGE_BYTES, Joiner
from thunderagent.websocket_api.push import AT_ONCE, ManagementApi, Pusher
from thunderagent.websocket_api.records import connection_id_of, connections_id
from thunderagent.websocket_api.server.connections import Connections

ISSUER = Issuer()


class World:
    """A pusher, and the connections that it finds."""

    def __init__(self, *connections: str, user: str = "ada") -> None:
        self.engine = FaultyEngine(SqliteEngine(MEMORY))
        self.listed = Connections(self.engine, self.engine.clock.now)
        for one in connections:
            assert self.listed.open(one, user)
        self.sent: list[tuple[str, str]] = []
        self.does: dict[str, Callable[[], bool]] = {}
        self.pusher = Pusher(self._post, lambda: self.engine, timeout_s=LONG_S)

    def _post(self, connection: str, text: str) -> bool:
        answer = self.does.get(connection, lambda: True)()
        if answer:
            self.sent.append((connection, text))
        return answer


@pytest.fixture
def worlds() -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(*connections: str) -> World:
        made.append(World(*connections))
        return made[-1]

    yield make
    for one in made:
        one.pusher.close()


def failing(error: Exception) -> Callable[[], bool]:
    def do() -> bool:
        raise error

    return do


def test_a_message_reaches_every_connection_of_its_user_and_no_other(worlds: Callable[..., World]) -> None:
    world = worlds("c1", "c2")
    world.listed.open("b1", "bob")
    assert world.pusher.push("ada", {"b": [1, None], "a": "ä"}) == 2
    assert {one for one, _ in world.sent} == {"c1", "c2"}
    [text] = {text for _, text in world.sent}  # with one id on both, so that a client that has two drops one
    pushed = json.loads(text)
    assert pushed == {"type": "push", "id": pushed["id"], "message": {"a": "ä", "b": [1, None]}}
    assert len(pushed["id"]) == 32


def test_a_user_who_is_not_connected_is_no_error(worlds: Callable[..., World]) -> None:
    world = worlds()
    assert world.pusher.push("ada", 1) == 0
    world.listed.open("c1", "ada")
    world.listed.close("c1", "ada")
    assert world.pusher.push("ada", 1) == 0
    assert world.sent == []


def test_a_large_message_goes_in_chunks_in_their_order(worlds: Callable[..., World]) -> None:
    world = worlds("c1", "c2")
    assert world.pusher.push("ada", "ä" * 50_000) == 2
    for connection in ("c1", "c2"):
        texts = [text for one, text in world.sent if one == connection]
        assert [json.loads(text)["index"] for text in texts] == [0, 1, 2, 3]
        assert max(len(text.encode()) for text in texts) <= FRAME_BYTES
        joiner = Joiner()
        whole = [joiner.add(json.loads(text)) for text in texts][-1]
        assert json.loads(whole or "")["message"] == "ä" * 50_000


def test_a_message_that_is_too_large_is_refused_before_anything_is_sent(worlds: Callable[..., World]) -> None:
    world = worlds("c1")
    room = MESSAGE_BYTES - len('{"type":"push","id":"","message":""}') - 32
    assert world.pusher.push("ada", "x" * room) == 1
    sent = len(world.sent)
    with pytest.raises(MessageTooLarge, match=r"131073 bytes.*reference"):
        world.pusher.push("ada", "x" * (room + 1))
    for bad in (object(), float("nan"), {1, 2}, "\ud800"):
        with pytest.raises(ValueError, match="the message is not JSON data"):
            world.pusher.push("ada", bad)
    assert len(world.sent) == sent


def test_a_connection_that_is_gone_is_taken_from_the_list(worlds: Callable[..., World]) -> None:
    world = worlds("c1", "c2", "c3")
    world.does["c2"] = lambda: False
    assert world.pusher.push("ada", 1) == 2
    assert world.listed.of("ada") == {"c1", "c3"}
    assert world.engine.get([connection_id_of("c2")]) == {}
    assert world.pusher.push("ada", 1) == 2


def test_a_connection_that_goes_between_two_chunks_was_not_reached(worlds: Callable[..., World]) -> None:
    world = worlds("c1")
    answers = iter([True, False])
    world.does["c1"] = lambda: next(answers)
    assert world.pusher.push("ada", "x" * 50_000) == 0
    assert world.listed.of("ada") == set()


def test_rows_that_cannot_be_taken_out_now_are_found_by_the_next_push(worlds: Callable[..., World]) -> None:
    world = worlds("c1")
    world.does["c1"] = lambda: False
    world.engine.fail("remove connection", Fault.LOST_REQUEST)
    world.engine.fail("forget connection", Fault.BROKEN_CALL)
    assert world.pusher.push("ada", 1) == 0
    assert world.pusher.push("ada", 1) == 0
    assert world.listed.of("ada") == set()


def test_a_connection_that_fails_leaves_the_others_reached(worlds: Callable[..., World]) -> None:
    world = worlds("c1", "c2")
    world.does["c1"] = failing(PushFailed("busy"))
    assert world.pusher.push("ada", 1) == 1
    assert world.listed.of("ada") == {"c1", "c2"}  # it may live


def test_when_none_is_reached_for_a_reason_the_reason_is_raised(worlds: Callable[..., World]) -> None:
    world = worlds("c1", "c2")
    world.does |= {"c1": failing(AccessDenied("no")), "c2": lambda: False}
    with pytest.raises(AccessDenied):
        world.pusher.push("ada", 1)


def test_a_list_that_cannot_be_read_is_an_error_and_nothing_is_sent(worlds: Callable[..., World]) -> None:
    world = worlds("c1")
    world.engine.fail("get", Fault.LOST_REQUEST)
    with pytest.raises(StoreError):
        world.pusher.push("ada", 1)
    assert world.sent == []


def test_at_most_so_many_connections_are_pushed_to_at_one_moment(worlds: Callable[..., World]) -> None:
    world = worlds(*(f"c{number}" for number in range(3 * AT_ONCE)))
    guard, at_once, most = threading.Lock(), [0], [0]

    def do() -> bool:
        with guard:
            at_once[0] += 1
            most[0] = max(most[0], at_once[0])
        time.sleep(0.002)
        with guard:
            at_once[0] -= 1
        return True

    world.does = {f"c{number}": do for number in range(3 * AT_ONCE)}
    assert world.pusher.push("ada", 1) == 3 * AT_ONCE
    assert 1 < most[0] <= AT_ONCE


def test_a_push_takes_no_longer_than_its_time() -> None:
    world, release = World("c1", "c2"), threading.Event()
    world.does["c1"] = lambda: release.wait(LONG_S)
    pusher = Pusher(world._post, lambda: world.engine, timeout_s=0.1)
    begun = time.monotonic()
    assert pusher.push("ada", 1) == 1
    world.listed.close("c2", "ada")
    with pytest.raises(PushFailed, match=r"over 0\.1 s"):
        pusher.push("ada", 1)
    assert time.monotonic() - begun < LONG_S / 2
    release.set()
    pusher.close()


# The management API


def test_an_endpoint_must_be_one() -> None:
    for endpoint in (
        "wss://x.execute-api.eu-central-1.amazonaws.com/p",
        "http://example.com",
        "x",
        "",
        "https://[",
        "https://",
    ):
        with pytest.raises(ConfigurationError, match=r"https://API\.execute-api"):
            ManagementApi(endpoint)


def test_a_push_without_credentials_or_region_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with pytest.raises(CredentialsMissing, match="execute-api:ManageConnections"):
        ManagementApi("https://x.execute-api.eu-central-1.amazonaws.com/p").post("c", "x")
    with pytest.raises(ConfigurationError, match="AWS_DEFAULT_REGION"):
        ManagementApi("https://ws.example.com/p").post("c", "x")


@pytest.mark.slow
def test_an_api_that_is_not_there_is_told() -> None:
    with pytest.raises(PushFailed, match=r"127\.0\.0\.1:9"):
        ManagementApi("http://127.0.0.1:9").post("c", "x")


# From jobs


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[tuple[Gateway, str]]:
    """A gateway in a thread, and the URL of its connections; agents in this process read the same file."""
    engine = SqliteEngine(str(tmp_path / "connections.db"))
    one = make_gateway(ISSUER, connections=engine)
    with in_thread(one):
        yield one, engine.url
    engine.close()


def client_of(gateway: Gateway, user: str = "ada") -> ClientConnection:
    return connect(
        gateway.url,
        subprotocols=["thunderagent.v1", f"bearer.{ISSUER.token(user)}"],  # type: ignore[list-item]
        compression=None,
    )


@job("push.plain")
def push_plain(ctx: Context, payload: dict[str, Any]) -> int:
    return ctx.push("ada", payload)


@job("push.alone", isolation="process")
def push_alone(ctx: Context, payload: dict[str, Any]) -> int:
    return ctx.push("ada", payload)


@job("push.async")
async def push_async(ctx: Context, payload: dict[str, Any]) -> list[int]:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    reached = await ctx.push_async("ada", payload)
    ticking.cancel()
    with pytest.raises(RuntimeError, match=r"await ctx\.push_async"):
        ctx.push("ada", payload)
    return [reached, ticks]


@stream("push.stream")
async def push_stream(ctx: StreamContext, payload: dict[str, Any]) -> int:
    return await ctx.push_async("ada", payload)


@pytest.mark.slow
def test_jobs_and_streams_push_through_the_api_that_the_settings_name(gateway: tuple[Gateway, str]) -> None:
    one, connections = gateway
    settings: dict[str, Any] = {"push_endpoint": one.push_endpoint, "push_connections": connections}
    with serving(push_plain, push_async, push_alone, push_stream, **settings) as stage, client_of(one) as client:
        for name, wanted in (("plain", 1), ("alone", 1), ("async", [1, 2]), ("stream", 1)):
            task = stage.end_of(stage.client.enqueue(f"push.{name}", {"from": name}))
            assert task.error is None
            result = task.result if name != "async" else [task.result[0], min(2, task.result[1])]
            assert result == wanted
            assert json.loads(client.recv(LONG_S))["message"] == {"from": name}
        client.close()
        task = stage.end_of(stage.client.enqueue("push.plain", {}))
        assert task.result == 0


def test_a_push_without_settings_is_an_error_that_names_them() -> None:
    with pytest.raises(ConfigurationError, match=r"THUNDERAGENT_PUSH_ENDPOINT and THUNDERAGENT_PUSH_CONNECTIONS"):
        Context(make_lease()).push("ada", 1)
    with pytest.raises(ConfigurationError, match=r"docs/guides/websocket-api\.md"):
        asyncio.run(StreamContext(make_lease()).push_async("ada", 1))


def test_a_test_of_a_stream_gives_it_what_pushes() -> None:
    told: list[Any] = []

    @stream("push.test")
    async def handler(ctx: StreamContext, payload: dict[str, Any]) -> None:
        told.append(await ctx.push_async("ada", payload))

    asyncio.run(run_stream(handler, {"a": 1}, until=lambda ctx: told, push=lambda user, message: 2))
    assert told == [2]


def test_a_test_of_a_handler_gives_it_what_pushes() -> None:
    told: list[Any] = []

    def push(user: str, message: Any) -> int:
        told.append((user, message))
        return 3

    assert push_plain.handler(Context(make_lease(), push=push), {"a": 1}) == 3
    assert told == [("ada", {"a": 1})]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"push_endpoint": "https://x.example.com/p"}, "go together"),
        ({"push_connections": "sqlite:///c.db"}, "go together"),
        ({"push_endpoint": "wss://x.example.com/p", "push_connections": "sqlite:///c.db"}, "PUSH_ENDPOINT is 'wss"),
    ],
)
def test_settings_that_cannot_work_are_told(settings: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        load_settings(**settings)


def test_the_list_of_a_user_is_found_under_its_name() -> None:
    assert connections_id("ada") == "connections:ada"
