"""Where to connect, and how: URLs, headers, TLS, proxies, addresses, and what the socket is set to."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosedError, ConnectionClosedOK, NegotiationError

from tests.support.connections import PROMPT, Keeper, governor, now, run, streaming, subscribe
from thunderagent.model.errors import ConfigurationError, StreamFailed
from thunderagent.streams.connection import transport
from thunderagent.streams.connection.connection import Connection, Peer
from thunderagent.streams.connection.ending import Cause, State, end_of
from thunderagent.streams.connection.endpoint import Attempt, Endpoint, EndpointSource, resolve_endpoint
from thunderagent.streams.connection.options import StreamOptions
from thunderagent.streams.connection.resolver import Resolver
from thunderagent.streams.cursor import Cursor
from thunderagent.testing.chaos import ChaosServer, Close, Cut, Feed, Refuse, Silence
from thunderagent.testing.chaos.frames import accepting, parse_request

pytestmark = pytest.mark.slow

FIRST = Attempt(number=1)


def resolved(source: EndpointSource, attempt: Attempt = FIRST) -> Endpoint:
    return asyncio.run(resolve_endpoint(source, attempt))


async def later(attempt: Attempt) -> str:
    await asyncio.sleep(0)
    return f"wss://peer.test/{attempt.number}"


def test_an_endpoint_is_a_url_an_object_a_list_a_function_or_a_coroutine() -> None:
    one = Endpoint("ws://peer.test/", {"Authorization": "secret"})
    assert resolved("ws://peer.test/") == Endpoint("ws://peer.test/")
    assert resolved(one) is one
    assert resolved(lambda attempt: one) is one
    assert resolved(lambda attempt: f"ws://peer.test/{attempt.number}").url == "ws://peer.test/1"
    assert resolved(later).url == "wss://peer.test/1"
    urls = [resolved(["ws://a/", one, "ws://c/"], Attempt(number=number)).url for number in range(1, 6)]
    assert urls == ["ws://a/", "ws://peer.test/", "ws://c/", "ws://a/", "ws://peer.test/"]


@pytest.mark.parametrize("source", ["http://peer.test/", "peer.test", "", lambda attempt: None, lambda attempt: 3])
def test_what_is_no_url_of_a_websocket_is_told(source: Any) -> None:
    with pytest.raises(ConfigurationError, match="is no URL of a WebSocket: it must begin with ws:// or wss://"):
        resolved(source)


def test_an_empty_list_is_told() -> None:
    with pytest.raises(ConfigurationError, match="list of endpoints is empty"):
        resolved([])


def test_credentials_are_never_shown() -> None:
    endpoint = Endpoint("ws://peer.test/", {"Authorization": "secret"})
    assert "secret" not in f"{endpoint!r} {endpoint}"


def test_an_endpoint_that_cannot_work_ends_the_stream_at_once() -> None:
    async def main() -> None:
        async with streaming("http://peer.test/") as stand:
            error = await stand.failure()
            assert isinstance(error, StreamFailed)
            assert str(error).startswith("configuration: ConfigurationError: the endpoint 'http://peer")

    run(main(), fast=True)


def test_headers_and_subprotocols_are_sent_and_each_attempt_asks_anew() -> None:
    async def main() -> None:
        attempts: list[Attempt] = []
        async with ChaosServer(
            Refuse(status=401), Feed(ending=Cut(after_messages=2)), Feed(), from_start=True
        ) as server:
            server.publish_many(5)

            async def endpoint(attempt: Attempt) -> Endpoint:
                attempts.append(attempt)
                return Endpoint(server.url, {"Authorization": f"token {len(attempts)}"}, ("chat", "json"))

            async with streaming(endpoint) as stand:
                await stand.until_handled(5)
            assert [one.headers["authorization"] for one in server.attempts] == ["token 1", "token 2", "token 3"]
            assert {one.headers["sec-websocket-protocol"] for one in server.attempts} == {"chat, json"}
            assert "permessage-deflate" not in server.attempts[0].headers.get("sec-websocket-extensions", "")
            assert [one.number for one in attempts] == [1, 2, 3]
            assert [one.auth_failed for one in attempts] == [False, True, False]
            assert [one.cursor for one in attempts] == [None, None, Cursor(2, "epoch-1")]
            assert [str(one.last_end)[:8] for one in attempts] == ["None", "http 401", "closed 1"]

    run(main(), fast=True)


@asynccontextmanager
async def a_peer(**options: Any) -> AsyncIterator[str]:
    """A server of the library `websockets` that sends each message of a client back eight times over."""

    async def echo(connection: ServerConnection) -> None:
        async for message in connection:
            await connection.send(str(message) * 8)

    async with serve(echo, "127.0.0.1", 0, **options) as server:
        yield f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}/"


async def opened(url: str, **options: Any) -> Connection:
    wanted = replace(PROMPT, **options)
    endpoint = Endpoint(url, subprotocols=("v2.json", "v1.json"))
    return Connection(
        await transport.open_connection(endpoint, wanted, Resolver()), Peer(endpoint=endpoint, options=wanted)
    )


def test_messages_are_compressed_if_that_is_wanted_and_the_peer_can() -> None:
    async def main() -> None:
        for ours, theirs in ((True, "deflate"), (True, None), (False, "deflate")):
            async with a_peer(compression=theirs) as url:
                connection = await opened(url, compression=ours)
                is_compressed = "permessage-deflate" in connection.response_headers.get("Sec-WebSocket-Extensions", "")
                assert is_compressed is (ours and theirs is not None)
                await connection.send("tick" * 1000)
                assert await connection.recv() == "tick" * 8000
                await connection.close()

    run(main())


def test_a_small_message_that_becomes_a_large_one_is_too_large() -> None:
    async def main() -> None:
        async with a_peer(compression="deflate") as url:
            connection = await opened(url, compression=True, max_size=20_000)
            await connection.send("tick" * 1000)
            with pytest.raises(ConnectionClosedError) as caught:
                await connection.recv()
            assert end_of(caught.value, State.LIVE, now=0.0).kind == "message_too_big 1009"
            connection.abort()

    run(main())


def test_a_peer_that_chose_no_subprotocol_is_refused_if_one_is_required() -> None:
    async def main() -> None:
        async with a_peer(subprotocols=["v1.json"]) as url:
            connection = await opened(url, require_subprotocol=True)
            assert connection.subprotocol == "v1.json"
            await connection.close()
        async with a_peer() as url:
            connection = await opened(url)
            assert connection.subprotocol is None
            await connection.close()
            with pytest.raises(NegotiationError, match="chose none of 2 subprotocols") as caught:
                await opened(url, require_subprotocol=True)
            assert end_of(caught.value, State.CONNECTING, now=0.0).cause is Cause.PROTOCOL
            with pytest.raises(ConfigurationError, match=r"answer with an Endpoint\(url, subprotocols="):
                await transport.open_connection(Endpoint(url), replace(PROMPT, require_subprotocol=True), Resolver())

    run(main())


def test_a_process_has_one_context_of_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    """https://github.com/python-websockets/websockets/issues/1644: one for each connection costs 1.1 MB and 26 ms."""
    made: list[ssl.SSLContext] = []

    async def main() -> None:
        async with ChaosServer(Feed(ending=Cut(after_messages=1)), tls="good", from_start=True) as server:
            server.publish_many(3)
            good = server.client_context
            assert good

            def create(*_: Any, **__: Any) -> ssl.SSLContext:
                made.append(good)
                return good

            monkeypatch.setattr(ssl, "create_default_context", create)
            transport.shared_context.cache_clear()
            async with streaming(server.url) as first, streaming(server.url) as second:
                await first.until_handled(3)
                await second.until_handled(3)
            assert len(server.attempts) == 6

    try:
        run(main(), fast=True)
    finally:
        transport.shared_context.cache_clear()
    assert len(made) == 1


@pytest.mark.parametrize("tls", [None, "good"])
def test_tcp_finds_a_dead_host_while_our_pings_are_silent(tls: Any) -> None:
    async def main() -> None:
        async with ChaosServer(tls=tls) as server:
            options = replace(PROMPT, ssl=server.client_context)
            opened = await transport.open_connection(Endpoint(server.url), options, Resolver())
            sock = opened.transport.get_extra_info("socket")
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            for name, value in transport.KEEPALIVE:
                if hasattr(socket, name):
                    assert sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) == value
            await transport.close_connection(opened, options)

    run(main())


def test_a_connection_that_ended_at_once_is_an_error_of_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(_: socket.socket | None) -> None:
        raise OSError(9, "bad file descriptor")

    monkeypatch.setattr(transport, "_set_up", gone)

    async def main() -> None:
        async with ChaosServer() as server:
            with pytest.raises(OSError, match="bad file"):
                await transport.open_connection(Endpoint(server.url), PROMPT, Resolver())
            await server.wait_for(lambda: not server.open)

    run(main())


def test_a_mute_peer_holds_up_a_close_for_no_longer_than_allowed() -> None:
    async def main() -> None:
        async with ChaosServer(Feed(ending=Silence())) as server:
            options = replace(PROMPT, close_timeout_s=0.5)
            opened = await transport.open_connection(Endpoint(server.url), options, Resolver())
            start = now()
            await transport.close_connection(opened, options)
            assert 0.4 <= now() - start <= 0.6
            await server.wait_for(lambda: not server.open)

    run(main(), fast=True)


@asynccontextmanager
async def reading_late() -> AsyncIterator[tuple[str, asyncio.Event]]:
    """A peer that shakes hands and reads nothing before the event is set."""
    reads, gone = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            request = parse_request(await reader.readuntil(b"\r\n\r\n"))
            assert request
            writer.write(accepting(request, right=True))
            await reads.wait()
            while await reader.read(1 << 20):
                pass
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        gone.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}/", reads
    finally:
        reads.set()
        server.close()
        async with asyncio.timeout(5):
            await gone.wait()


@pytest.mark.parametrize("how", ["abort", "close"])
def test_a_connection_whose_last_bytes_were_flushed_can_be_ended_again(how: str) -> None:
    """There, a transport of asyncio raises AttributeError when it is aborted."""

    async def main() -> None:
        async with reading_late() as (url, reads):
            opened = await transport.open_connection(Endpoint(url), PROMPT, Resolver())
            sending = asyncio.create_task(opened.send("x" * 20_000_000))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            opened.transport.close()
            reads.set()
            await asyncio.wait_for(opened.wait_closed(), 5)
            await asyncio.wait((sending,))
            sending.exception()
            if how == "abort":
                transport.abort_connection(opened)
            else:
                await transport.close_connection(opened, PROMPT)

    run(main())


def test_a_peer_that_reads_nothing_holds_up_a_close_for_no_longer_than_allowed() -> None:
    async def main() -> None:
        async with reading_late() as (url, _):
            options = replace(PROMPT, close_timeout_s=0.5)
            opened = await transport.open_connection(Endpoint(url), options, Resolver())
            sending = asyncio.create_task(opened.send("x" * 20_000_000))
            await asyncio.sleep(0.05)
            start = now()
            await transport.close_connection(opened, options)
            assert now() - start <= 1.0
            await asyncio.wait((sending,))
            sending.exception()

    run(main())


class Proxy:
    """A proxy that understands CONNECT."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.url = ""
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Proxy]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield self
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        self._tasks.add(task)
        with contextlib.suppress(asyncio.CancelledError, OSError):
            line = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[0].decode()
            self.asked.append(line)
            host, _, port = line.split()[1].rpartition(":")
            behind, ahead = await asyncio.open_connection(host, int(port))
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            try:
                await asyncio.gather(self._copy(reader, ahead), self._copy(behind, writer))
            finally:
                ahead.transport.abort()
        writer.transport.abort()

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            target.write(data)
        target.close()


@pytest.mark.parametrize("tls", [None, "good"])
@pytest.mark.parametrize("how", ["environment", "option", "switched off"])
def test_the_proxy_of_the_environment_is_used(tls: Any, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with ChaosServer(tls=tls, from_start=True) as server, Proxy().running() as proxy:
            for name in ("no_proxy", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy"):
                monkeypatch.delenv(name, raising=False)
            if how != "option":
                monkeypatch.setenv("https_proxy", proxy.url)
                monkeypatch.setenv("http_proxy", proxy.url)
            server.publish_many(1)
            proxied: dict[str, str | bool] = {"environment": True, "option": proxy.url, "switched off": False}
            async with streaming(server, options=replace(PROMPT, proxy=proxied[how])) as stand:
                await stand.until_handled(1)
            expected = f"CONNECT {server.url.split('/')[2]} HTTP/1.1"
            assert proxy.asked == ([] if how == "switched off" else [expected])

    run(main())


def test_an_address_that_drops_packets_leaves_time_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        with socket.socket() as hole:
            hole.bind(("127.0.0.2", 0))
            hole.listen(0)
            port = hole.getsockname()[1]
            async with ChaosServer(port=port, from_start=True) as server:
                server.publish_many(1)
                full = [socket.socket() for _ in range(3)]
                for one in full:  # its queue is full now: it answers no SYN
                    one.setblocking(False)
                    one.connect_ex(("127.0.0.2", port))
                chance = governor()
                asked: list[str] = []

                async def addresses(host: str, *_: Any) -> list[str]:
                    asked.append(host)
                    return ["127.0.0.2", "127.0.0.1"]

                monkeypatch.setattr(chance.resolver, "addresses", addresses)
                options = replace(PROMPT, open_timeout_s=1.0)
                async with streaming(f"ws://peer.test:{port}/", options=options, chance=chance) as stand:
                    start = now()
                    await stand.until_handled(1)
                    assert 0.4 <= now() - start <= 1.0
                    assert asked == ["peer.test"]
                    assert server.attempts[0].headers["host"] == f"peer.test:{port}"
                for one in full:
                    one.close()

    run(main())


def test_addresses_of_which_none_answers_are_an_error_of_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with ChaosServer() as server:
            server.stop_listening()
            chance = governor()

            async def addresses(*_: Any) -> list[str]:
                return ["127.0.0.1", "127.0.0.1"]

            async def nothing(*_: Any) -> list[str]:
                return []

            monkeypatch.setattr(chance.resolver, "addresses", addresses)
            async with streaming(server.url.replace("127.0.0.1", "peer.test"), chance=chance) as stand:
                await stand.keeper.until(State.BACKOFF)
                monkeypatch.setattr(chance.resolver, "addresses", nothing)
                await stand.keeper.until(State.BACKOFF, times=2)
                first, second = stand.keeper.reasons(State.BACKOFF)
                assert first.startswith("network (ConnectionRefusedError")
                assert second.startswith("network (OSError: peer.test has no address)")

    run(main(), fast=True)


def test_the_name_and_not_the_address_is_checked_against_the_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with ChaosServer(tls="good") as server:
            chance = governor()

            async def addresses(*_: Any) -> list[str]:
                return ["127.0.0.1"]

            monkeypatch.setattr(chance.resolver, "addresses", addresses)
            options = replace(PROMPT, ssl=server.client_context)
            url = server.url.replace("127.0.0.1", "peer.test")
            async with streaming(url, options=options, chance=chance) as stand:
                await stand.keeper.until(State.BACKOFF)
                assert "peer.test" in stand.keeper.reasons(State.BACKOFF)[0]

    run(main(), fast=True)


def test_on_open_can_talk_and_look_at_the_answer() -> None:
    seen: dict[str, Any] = {}

    async def on_open(connection: Connection, cursor: Cursor | None) -> None:
        seen["subprotocol"] = connection.subprotocol
        seen["upgrade"] = connection.response_headers["Upgrade"]
        await connection.send('{"op": "hello"}')
        await subscribe(connection, cursor)
        seen["first"] = await connection.recv()

    async def main() -> None:
        async with ChaosServer(from_start=True) as server:
            server.publish_many(2)
            async with streaming(server, on_open=on_open, keeper=Keeper(Cursor(0, "epoch-1"))) as stand:
                await stand.until_handled(1)
                assert stand.seqs == [2]
                assert await stand.feed.send_json({"op": "bye"})
                await server.wait_for(lambda: len(server.received) == 3)
            assert [one.data for one in server.received] == [
                '{"op": "hello"}',
                '{"op":"subscribe","since":0,"epoch":"epoch-1"}',
                '{"op":"bye"}',
            ]

    run(main(), fast=True)
    assert (seen["subprotocol"], seen["upgrade"]) == (None, "websocket")
    assert '"seq": 1' in seen["first"]


def test_sending_on_a_connection_that_has_ended_is_told() -> None:
    async def main() -> None:
        async with ChaosServer(Feed(ending=Close(code=1000))) as server:
            options = StreamOptions(proxy=False)
            socket = await transport.open_connection(Endpoint(server.url), options, Resolver())
            opened = Connection(socket, Peer(endpoint=server.url, options=options))
            with pytest.raises(ConnectionClosedOK):
                await opened.recv()
            with pytest.raises(ConnectionClosedOK):
                await opened.send("x")

    run(main())
