"""The local gateway: it behaves as API Gateway does, loses its region on request, and pushes."""

from __future__ import annotations

import asyncio
import http.client
import json
import urllib.error
import urllib.request
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import Close

from tests.websocket_api.server.support import LONG_S, Asking, asking, make_gateway, until
from thunderagent.model.bus import Event
from thunderagent.model.edge_events import ConnectionRefused, MessageFailed
from thunderagent.model.errors import PushFailed
from thunderagent.stores.sqlite.engine import MEMORY, SqliteEngine
from thunderagent.testing.faulty_engine import ANY, Fault, FaultyEngine
from thunderagent.websocket_api.gateway.events import Limits
from thunderagent.websocket_api.gateway.gateway import Gateway, in_thread
from thunderagent.websocket_api.gateway.issuer import Issuer
from thunderagent.websocket_api.gateway.pages import Pages
from thunderagent.websocket_api.protocol import MESSAGE_BYTES, frames
from thunderagent.websocket_api.push import ManagementApi
from thunderagent.websocket_api.records import MOST_CONNECTIONS, connections_id, holders_of

pytestmark = pytest.mark.slow

ISSUER = Issuer()


def run(test: Any) -> Any:
    """A test that is a coroutine function, within a bound."""

    def bounded(*arguments: Any, **options: Any) -> None:
        async def all_of_it() -> None:
            async with asyncio.timeout(3 * LONG_S):
                await test(*arguments, **options)

        asyncio.run(all_of_it())

    bounded.__name__, bounded.__doc__ = test.__name__, test.__doc__
    return bounded


def token(user: str = "ada", **options: Any) -> str:
    return ISSUER.token(user, **options)


async def closed(client: Asking) -> Close | None:
    """What the server closes with; None: the socket was reset."""
    with pytest.raises(ConnectionClosed) as caught:
        async with asyncio.timeout(LONG_S):
            while True:
                await client.socket.recv()
    return caught.value.rcvd


async def status_of(url: str, **headers: str) -> int:
    """The status that a handshake is refused with."""
    with pytest.raises(InvalidStatus) as caught:
        await connect(url, additional_headers=headers)
    return int(caught.value.response.status_code)


def listed(gateway: Gateway, user: str = "ada") -> frozenset[str]:
    row_id = connections_id(user)
    return holders_of(gateway._connections.get([row_id]).get(row_id))


@run
async def test_a_client_connects_changes_its_state_and_leaves_nothing_behind() -> None:
    async with make_gateway(ISSUER, region="eu-west-1") as gateway:
        async with asking(gateway, token()) as client:
            assert client.socket.subprotocol == "thunderagent.v1"
            assert await client.ask("setState", id=1, version=0, patch={"a": 1}, change="c") == {
                "type": "saved",
                "id": 1,
                "version": 1,
                "region": "eu-west-1",
            }
            assert (await client.ask("getState"))["state"] == {"a": 1}
            assert (await client.ask("dance"))["error"] == "unknown_route"
            assert gateway.connections == 1
            assert listed(gateway) == set(gateway.connection_ids)
        await until(lambda: not listed(gateway))
        assert gateway.connections == 0


@run
async def test_who_has_no_good_token_is_refused_with_a_status() -> None:
    async with make_gateway(ISSUER) as gateway:
        told: list[Event] = []
        gateway.bus.subscribe(told.append)
        url = gateway.url
        assert await status_of(url) == 401
        assert await status_of(url, Authorization="Bearer x") == 401
        assert await status_of(url, Authorization=f"Bearer {token(expires_s=-60)}") == 401
        assert await status_of(url, Authorization=f"Bearer {token('a b')}") == 403
        assert await status_of(f"{url}?token={token()}") == 401
        assert len([one for one in told if isinstance(one, ConnectionRefused)]) == 5
        assert gateway.connections == 0


@run
async def test_a_function_that_raises_is_told_and_its_client_hears_that_it_failed() -> None:
    def raises(event: Any) -> Any:
        raise KeyError("no")

    async with make_gateway(ISSUER) as gateway:
        told: list[Event] = []
        gateway.bus.subscribe(told.append)
        async with asking(gateway, token()) as client:
            gateway._api.handle = raises  # type: ignore[method-assign]
            await client.socket.send(json.dumps({"action": "ping", "id": 1}))
            answer = json.loads(await client.socket.recv())
            assert answer["message"] == "Internal server error"
            assert await status_of(gateway.url, Authorization=f"Bearer {token()}") == 500
            assert [one.error for one in told if isinstance(one, MessageFailed)] == ["KeyError: 'no'"] * 2


@run
async def test_a_handshake_that_the_store_does_not_take_is_refused_for_now() -> None:
    engine = FaultyEngine(SqliteEngine(MEMORY))
    async with make_gateway(ISSUER, connections=engine) as gateway:
        engine.fail("put", Fault.LOST_REQUEST)
        assert await status_of(gateway.url, Authorization=f"Bearer {token()}") == 503
        async with asking(gateway, token()):
            pass


@run
async def test_more_connects_in_a_second_than_are_allowed_are_refused() -> None:
    async with make_gateway(ISSUER, limits=Limits(connects_per_s=1.0)) as gateway:
        authorization = f"Bearer {token()}"
        answers = []
        for _ in range(4):
            try:
                async with connect(gateway.url, additional_headers={"Authorization": authorization}):
                    answers.append(101)
            except InvalidStatus as error:
                answers.append(error.response.status_code)
        assert answers[0] == 101
        assert 429 in answers


@run
async def test_a_frame_or_a_message_that_is_too_large_closes_the_connection_with_1009() -> None:
    async with make_gateway(ISSUER) as gateway:
        async with asking(gateway, token()) as client:
            await client.socket.send("x" * 32_769)
            close = await closed(client)
            assert close is not None and close.code == 1009
        async with asking(gateway, token()) as client:
            with suppress(ConnectionClosed):
                await client.socket.send(["x" * 32_768] * 4 + ["x"])
            close = await closed(client)
            assert close is not None and close.code == 1009
        async with asking(gateway, token()) as client:
            await client.socket.send(["x" * 32_768] * 4)
            assert (await client.receive())["error"] == "bad_request"


@run
async def test_the_largest_message_comes_in_chunks_and_its_answer_goes_in_chunks() -> None:
    async with make_gateway(ISSUER) as gateway, asking(gateway, token()) as client:
        text = json.dumps({"action": "setState", "id": 1, "version": 0, "change": "c", "patch": {"a": "ä" * 60_000}},
                          ensure_ascii=False)  # fmt: skip
        for frame in frames(text, "m1", to_server=True):
            await client.socket.send(frame)
        assert (await client.receive())["version"] == 1
        assert (await client.ask("getState"))["state"] == {"a": "ä" * 60_000}


@run
async def test_a_silent_connection_and_one_that_is_too_old_are_closed_with_1001() -> None:
    loop = asyncio.get_running_loop()
    async with make_gateway(ISSUER, limits=Limits(idle_s=0.6)) as gateway, asking(gateway, token()) as client:
        await asyncio.sleep(0.1)
        asked = loop.time()
        await client.ask("ping")
        assert await closed(client) == Close(1001, "Going away")
        assert loop.time() - asked >= 0.59
    async with make_gateway(ISSUER, limits=Limits(user_burst=1e6)) as gateway:
        gateway.rotate_after_s = 0.15
        async with asking(gateway, token()) as client:
            with pytest.raises(ConnectionClosed) as caught:
                while True:
                    await client.ask("ping")
            assert caught.value.rcvd == Close(1001, "Going away")
        async with asking(gateway, token()) as client:
            gateway.rotate()
            assert await closed(client) == Close(1001, "Going away")
        await until(lambda: not listed(gateway))


@run
async def test_replies_come_in_whatever_order_they_are_ready() -> None:
    engine = FaultyEngine(SqliteEngine(MEMORY))
    release = asyncio.Event()
    loop = asyncio.get_running_loop()

    class Slow(FaultyEngine):
        def get(self, task_ids: Any) -> Any:
            asyncio.run_coroutine_threadsafe(release.wait(), loop).result(LONG_S)
            return super().get(task_ids)

    async with make_gateway(ISSUER, states=Slow(engine)) as gateway, asking(gateway, token()) as client:
        await client.send(action="getState", id="slow")
        assert (await client.ask("ping", id="quick"))["id"] == "quick"
        release.set()
        assert (await client.receive())["id"] == "slow"


@run
async def test_a_handler_that_takes_too_long_is_answered_for() -> None:
    release = asyncio.Event()
    loop = asyncio.get_running_loop()

    class Mute(FaultyEngine):
        def get(self, task_ids: Any) -> Any:
            asyncio.run_coroutine_threadsafe(release.wait(), loop).result(LONG_S)
            return super().get(task_ids)

    states = Mute(SqliteEngine(MEMORY))
    async with make_gateway(ISSUER, states=states, limits=Limits(answer_s=0.1)) as gateway:
        async with asking(gateway, token()) as client:
            assert (await client.ask("getState"))["message"] == "Endpoint request timed out"
        release.set()


@run
async def test_a_region_that_is_cut_resets_its_sockets_refuses_new_ones_and_tells_nobody() -> None:
    async with make_gateway(ISSUER) as gateway, asking(gateway, token()) as client:
        url, push = gateway.url, gateway.push_endpoint
        gateway.cut()
        gateway.cut()
        assert await closed(client) is None
        with pytest.raises(OSError):
            await connect(url)
        with pytest.raises(PushFailed):
            await asyncio.to_thread(ManagementApi(push).post, "c", "x")
        await until(lambda: gateway.connections == 0)
        assert len(listed(gateway)) == 1  # nobody was told
        gateway.mend()
        gateway.mend()
        async with asking(gateway, token()) as other:
            assert (await other.ask("ping"))["type"] == "pong"
            assert (gateway.url, gateway.push_endpoint) == (url, push)
            assert len(listed(gateway)) == 2


@run
async def test_a_user_whose_connections_were_lost_without_a_word_can_connect_again() -> None:
    async with make_gateway(ISSUER) as gateway:
        async with AsyncExitStack() as stack:
            for _ in range(MOST_CONNECTIONS):
                await stack.enter_async_context(asking(gateway, token()))
            assert await status_of(gateway.url, Authorization=f"Bearer {token()}") == 429
            gateway.cut()
        gateway.mend()
        assert len(listed(gateway)) == MOST_CONNECTIONS
        async with asking(gateway, token()):
            assert listed(gateway) == set(gateway.connection_ids)


@run
async def test_a_region_can_be_cut_and_mended_in_any_order_at_once() -> None:
    async with make_gateway(ISSUER) as gateway:
        for _ in range(3):
            gateway.cut()
            gateway.mend()
            gateway.cut()
            await asyncio.sleep(0.01)
            with pytest.raises(OSError):
                await connect(gateway.url)
            gateway.mend()
            async with asking(gateway, token()) as client:
                assert (await client.ask("ping"))["type"] == "pong"
            gateway.cut()
            gateway.mend()
            async with asking(gateway, token()) as client:
                assert (await client.ask("ping"))["type"] == "pong"


@run
async def test_a_gateway_closes_its_connections_politely_and_its_ports() -> None:
    gateway = make_gateway(ISSUER)
    await gateway.start()
    async with asking(gateway, token()) as client:
        await gateway.close()
        close = await closed(client)
        assert close is not None and close.code == 1001
    for _ in range(2):
        other = make_gateway(ISSUER, ports=(int(gateway.url.rpartition(":")[2].strip("/")), 0))
        await other.start()
        await other.close()


@run
async def test_a_gateway_that_is_cut_can_be_closed() -> None:
    gateway = make_gateway(ISSUER)
    await gateway.start()
    gateway.cut()
    await gateway.close()


def test_a_gateway_runs_in_a_thread_for_code_that_has_no_loop() -> None:
    gateway = make_gateway(ISSUER)
    with in_thread(gateway):
        api = ManagementApi(gateway.push_endpoint)
        assert api.post("nobody", "x") is False
        gateway.cut()
        with pytest.raises(PushFailed):
            api.post("nobody", "x")
        gateway.mend()
        assert api.post("nobody", "x") is False
        api.close()


# The management API


@run
async def test_the_management_api_sends_tells_and_closes() -> None:
    async with make_gateway(ISSUER) as gateway, asking(gateway, token()) as client:
        [connection] = gateway.connection_ids

        def ask(method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
            address = gateway.push_endpoint.removeprefix("http://")
            http_client = http.client.HTTPConnection(address, timeout=LONG_S)
            try:
                http_client.request(method, path, body)
                response = http_client.getresponse()
                return response.status, response.read()
            finally:
                http_client.close()

        async def asked(*arguments: Any) -> tuple[int, bytes]:
            return await asyncio.to_thread(ask, *arguments)

        path = f"/stage/@connections/{connection.replace('=', '%3D')}"
        assert (await asked("POST", path, b'{"type":"push"}'))[0] == 200
        assert await client.receive() == {"type": "push"}
        assert (await asked("POST", path, b"x" * (MESSAGE_BYTES + 1)))[0] == 413
        assert json.loads((await asked("GET", path))[1])["connectedAt"] > 0
        assert (await asked("GET", "/@connections/nobody"))[0] == 410
        assert (await asked("POST", "/elsewhere"))[0] == 404
        assert (await asked("PUT", path))[0] == 405
        assert (await asked("DELETE", path))[0] == 204
        close = await closed(client)
        assert close is not None and close.code == 1000
        await until(lambda: gateway.connections == 0)
        assert (await asked("DELETE", path))[0] == 410


# Pages


def get(url: str, method: str = "GET", **headers: str) -> tuple[int, Any, Any]:
    request = urllib.request.Request(url, headers=headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=LONG_S) as response:
            return response.status, response.read().decode(), response.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(), error.headers


@run
async def test_the_page_of_a_demo_gets_tokens_and_can_cut_a_region() -> None:
    pages = Pages(issuer=ISSUER)
    async with (
        make_gateway(ISSUER, region="a", pages=pages) as one,
        make_gateway(ISSUER, region="b", pages=pages) as two,
    ):
        pages.regions = [one, two]

        async def ask(path: str, *arguments: Any, **headers: str) -> Any:
            status, body, _ = await asyncio.to_thread(get, f"{one.http_url}{path}", *arguments, **headers)
            assert status == 200, body
            return json.loads(body)

        told = (await ask("token?user=bob&expires_s=60"))["token"]
        async with asking(two, told) as client:
            assert [region["url"] for region in (await ask("demo.json"))["regions"]] == [one.url, two.url]
            cut = await ask("cut?region=b", "POST")
            assert [region["is_cut"] for region in cut["regions"]] == [False, True]
            assert await closed(client) is None
        status, body, _ = await asyncio.to_thread(get, f"{one.http_url}cut?region=a", "POST")
        assert status == 409 and "the last region" in body  # nobody could mend anything any more
        await ask("mend?region=b", "POST")
        async with asking(two, told) as client:
            await ask("rotate?region=b", "POST")
            assert await closed(client) == Close(1001, "Going away")
        status, _, headers = await asyncio.to_thread(get, f"{one.http_url}token", Origin="http://127.0.0.1:1234")
        assert (status, headers["Access-Control-Allow-Origin"]) == (200, "http://127.0.0.1:1234")


@run
async def test_pages_are_for_this_machine_and_tokens_for_demos_only() -> None:
    async with make_gateway(ISSUER) as plain, make_gateway(ISSUER, pages=Pages(issuer=ISSUER)) as demo:
        for url, status, headers in (
            (f"{plain.http_url}token", 404, {}),
            (f"{plain.http_url}../../setup.cfg", 404, {}),
            (f"{plain.http_url}nothing.js", 404, {}),
            (f"{demo.http_url}token", 403, {"Host": "evil.example"}),
            (f"{demo.http_url}token", 403, {"Origin": "https://evil.example"}),
            (f"{demo.http_url}token", 403, {"Origin": "null"}),
            (f"{demo.http_url}token?expires_s=x", 400, {}),
            (f"{demo.http_url}cut?region=x", 404, {}),
        ):
            assert (await asyncio.to_thread(get, url, **headers))[0] == status, url
        assert (await asyncio.to_thread(get, f"{demo.http_url}cut?region=x", "POST"))[0] == 404
        assert (await asyncio.to_thread(get, f"{demo.http_url}demo.json", "DELETE"))[0] == 405


@run
async def test_an_engine_that_never_answers_does_not_close_connections() -> None:
    engine = FaultyEngine(SqliteEngine(MEMORY))
    async with make_gateway(ISSUER, states=engine) as gateway, asking(gateway, token()) as client:
        engine.fail(ANY, *[Fault.LOST_REQUEST] * 5)
        for _ in range(5):
            assert (await client.ask("getState"))["error"] == "unavailable"
        assert (await client.ask("getState"))["type"] == "state"
