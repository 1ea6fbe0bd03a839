"""Every fault of the chaos server, seen from a client: the `websockets` library, or a bare socket.

That nothing comes is shown on a clock that jumps: an hour of it costs milliseconds.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import (
    ConnectionClosed,
    ConnectionClosedError,
    InvalidHandshake,
    InvalidMessage,
    InvalidStatus,
    PayloadTooBig,
)

from thunderagent.model.errors import ConfigurationError, WaitTimeout
from thunderagent.testing.chaos import (
    Behaviour,
    BrokenTls,
    ChaosServer,
    Close,
    Cut,
    Ending,
    Feed,
    Garbage,
    HangUp,
    Redirect,
    Refuse,
    Silence,
    TlsFault,
    Unanswered,
    Violate,
    Violation,
)
from thunderagent.testing.chaos.frames import Frame, FrameParser, Opcode, close_frame
from thunderagent.testing.fast_loop import run_fast

pytestmark = pytest.mark.slow

HOUR_S: Final = 3600.0
LIMIT_S: Final = 20.0


def run(main: Coroutine[Any, Any, None], *, fast: bool = False) -> None:
    """Run it in bounded time, on the real clock unless it is `fast`; nothing may be left running."""

    async def whole() -> None:
        loop = asyncio.get_running_loop()
        loop.set_debug(True)
        failures: list[dict[str, Any]] = []
        loop.set_exception_handler(lambda _, context: failures.append(context))
        await main
        await asyncio.sleep(0)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left
        assert not failures

    run_fast(whole(), limit_s=LIMIT_S, quiet_s=0.02 if fast else LIMIT_S)


def now() -> float:
    return asyncio.get_running_loop().time()


@asynccontextmanager
async def client(server: ChaosServer, stream: str = "s", **options: Any) -> AsyncIterator[ClientConnection]:
    """A client that takes care of nothing by itself."""
    options = {"ping_interval": None, "close_timeout": 0.1, "open_timeout": 10, "proxy": None} | options
    async with connect(f"{server.url}?stream={stream}", ssl=server.client_context, **options) as socket:
        yield socket


async def subscribe(socket: ClientConnection, since: int | None = 0, epoch: str | None = None) -> None:
    await socket.send(json.dumps({"op": "subscribe", "since": since, "epoch": epoch}))
    assert json.loads(await socket.recv()) == {"op": "subscribed"}


async def take(socket: ClientConnection, count: int) -> list[tuple[str, int]]:
    """Epoch and number of the next messages."""
    messages = [json.loads(await socket.recv()) for _ in range(count)]
    return [(message["epoch"].removeprefix("epoch-"), message["seq"]) for message in messages]


async def seqs(socket: ClientConnection, count: int) -> list[int]:
    return [seq for _, seq in await take(socket, count)]


async def rest(socket: ClientConnection) -> list[Any]:
    """Everything that comes until the end of the connection."""
    return [json.loads(message) async for message in until_closed(socket)]


async def until_closed(socket: ClientConnection) -> AsyncIterator[str | bytes]:
    try:
        while True:
            yield await socket.recv()
    except ConnectionClosed:
        return


async def closing(socket: ClientConnection) -> ConnectionClosed:
    """How the connection ends; no message may come before."""
    with pytest.raises(ConnectionClosed) as caught:
        await socket.recv()
    return caught.value


async def nothing_comes(wait: Callable[[], Awaitable[object]]) -> None:
    """An hour passes; for a loop that jumps."""
    start = now()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(HOUR_S):
            await wait()
    assert now() - start >= HOUR_S


REQUEST: Final = (
    b"GET /?stream=raw HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
Pipe = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def raw(server: ChaosServer, request: bytes = REQUEST) -> AsyncIterator[Pipe]:
    """A bare socket that has sent its request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rstrip("/").rpartition(":")[2]))
    try:
        writer.write(request)
        yield reader, writer
    finally:
        writer.transport.abort()
        await asyncio.sleep(0)


def masked(opcode: int, payload: bytes = b"", **fields: Any) -> bytes:
    return Frame(opcode=opcode, payload=payload, mask=b"abcd", **fields).encode()


# the healthy feed


def test_a_healthy_feed_replays_what_came_after_and_goes_on() -> None:
    async def main() -> None:
        async with ChaosServer() as server, client(server) as socket:
            assert server.publish_many(5) == 5
            await subscribe(socket, since=3)
            assert await take(socket, 2) == [("1", 4), ("1", 5)]
            assert server.publish({"price": 7}) == 6
            assert json.loads(await socket.recv()) == {"epoch": "epoch-1", "seq": 6, "data": {"price": 7}}

    run(main())


@pytest.mark.parametrize(("from_start", "expected"), [(False, [4]), (True, [1, 2, 3, 4])])
def test_without_a_position_a_feed_begins_now_or_at_the_start(from_start: bool, expected: list[int]) -> None:
    async def main() -> None:
        async with ChaosServer(from_start=from_start) as server, client(server) as socket:
            server.publish_many(3)
            await subscribe(socket, since=None)
            server.publish_many(1)
            assert await seqs(socket, len(expected)) == expected

    run(main())


def test_who_does_not_subscribe_gets_nothing_unless_the_server_does_it_for_all() -> None:
    async def main() -> None:
        for automatic in (False, True):
            async with ChaosServer(auto_subscribe=automatic) as server, client(server) as socket:
                await (await socket.ping())
                server.publish_many(2)
                await (await socket.ping())
                server.drop_all(Close())
                assert len(await rest(socket)) == (2 if automatic else 0)

    run(main())


def test_all_that_are_subscribed_get_what_is_published() -> None:
    async def main() -> None:
        async with ChaosServer() as server, client(server, "a") as one, client(server, "b") as other:
            await subscribe(one)
            await subscribe(other)
            server.publish_many(1000)
            assert await seqs(one, 1000) == await seqs(other, 1000) == list(range(1, 1001))

    run(main())


def test_a_new_epoch_numbers_from_one_again_and_an_old_position_means_nothing_there() -> None:
    async def main() -> None:
        async with ChaosServer() as server, client(server) as socket:
            server.publish_many(3)
            await subscribe(socket)
            assert await take(socket, 3) == [("1", 1), ("1", 2), ("1", 3)]
            assert server.new_epoch() == "epoch-2"
            server.publish_many(4)
            assert await take(socket, 4) == [("2", 1), ("2", 2), ("2", 3), ("2", 4)]
            await subscribe(socket, since=3, epoch="epoch-1")
            assert await seqs(socket, 4) == [1, 2, 3, 4]
            await subscribe(socket, since=3, epoch="epoch-2")
            assert await seqs(socket, 1) == [4]

    run(main())


def test_what_is_forgotten_or_not_kept_leaves_a_gap() -> None:
    async def main() -> None:
        async with ChaosServer(keep=3) as server:
            server.publish_many(10)
            async with client(server) as socket:
                await subscribe(socket)
                assert await seqs(socket, 3) == [8, 9, 10]
            server.forget()
            server.publish_many(1)
            async with client(server) as socket:
                await subscribe(socket, since=2)
                assert await seqs(socket, 1) == [11]
            assert [message.seq for message in server.messages] == [11]

    run(main())


def test_what_a_client_does_is_observed() -> None:
    async def main() -> None:
        async with ChaosServer() as server:
            before = now()
            async with client(server, "a", additional_headers={"X-Token": "secret"}) as socket:
                await subscribe(socket, since=2, epoch="epoch-1")
                await socket.send("héllo")
                await socket.send([b"in ", b"parts"])
                await (await socket.ping())
                [attempt] = server.attempts
                assert (attempt.key, attempt.path, attempt.accepted) == ("a", "/?stream=a", True)
                assert attempt.headers["x-token"] == "secret"
                assert before <= attempt.time <= now()
                [wish] = server.subscriptions
                assert (wish.key, wish.since, wish.epoch) == ("a", 2, "epoch-1")
                assert [one.data for one in server.received][1:] == ["héllo", "in parts"]
                assert server.pings == 1
                assert (server.open, server.open_of("a"), server.open_of("b")) == (1, 1, 0)
                await socket.close(4001)
            await server.wait_for(lambda: server.open == 0)
            assert server.close_codes == [4001]
            async with client(server, "a"), client(server, "a"), client(server, "b"):
                pass
            await server.wait_for(lambda: not server.open)
            async with client(server, "a"):
                assert server.most_open == {"a": 2, "b": 1}

    run(main())


def test_the_key_of_a_connection_without_a_parameter_is_its_path() -> None:
    async def main() -> None:
        async with ChaosServer() as server, connect(f"{server.url}ticks/7?x=1", proxy=None):
            assert server.attempts[0].key == "/ticks/7"

    run(main())


def test_waiting_ends_when_it_is_seen_or_when_the_time_is_over() -> None:
    async def main() -> None:
        async with ChaosServer() as server:
            waiting = asyncio.create_task(server.wait_for(lambda: server.open_of("late")))
            async with client(server, "late"):
                await waiting
            start = now()
            with pytest.raises(WaitTimeout, match="1 attempts"):
                await server.wait_for(lambda: server.pings, timeout_s=HOUR_S)
            assert now() - start >= HOUR_S

    run(main(), fast=True)


# the script


async def statuses(server: ChaosServer, keys: str) -> list[int]:
    """The answers of HTTP that these streams get, one after the other."""
    found = []
    for key in keys:
        try:
            async with client(server, key):
                found.append(101)
        except InvalidStatus as error:
            found.append(error.response.status_code)
    return found


def test_the_nth_connection_gets_the_nth_behaviour_and_the_last_repeats() -> None:
    async def main() -> None:
        async with ChaosServer(Refuse(status=500), Feed(), Refuse(status=404)) as server:
            assert await statuses(server, "abab") == [500, 101, 404, 404]
            server.script(Refuse(status=401), Feed())
            assert await statuses(server, "aba") == [401, 101, 101]
            assert [attempt.accepted for attempt in server.attempts] == [False, True, *[False] * 3, True, True]
            assert server.attempts[0].behaviour == Refuse(status=500)

    run(main())


def test_a_script_per_key_counts_each_stream_for_itself() -> None:
    async def main() -> None:
        async with ChaosServer(Refuse(status=500), Feed(), per_key=True) as server:
            assert await statuses(server, "ababa") == [500, 500, 101, 101, 101]

    run(main())


def test_a_stream_has_no_more_sockets_than_the_server_permits() -> None:
    async def main() -> None:
        async with ChaosServer(most_per_key=1) as server:
            async with client(server, "a"):
                assert await statuses(server, "ab") == [429, 101]
            await server.wait_for(lambda: not server.open)
            assert await statuses(server, "a") == [101]
            assert server.most_open == {"a": 1, "b": 1}

    run(main())


# the WebSocket never opens


def test_a_refusal_has_its_status_headers_and_time() -> None:
    async def main() -> None:
        async with ChaosServer(Refuse(status=429, headers={"X-Limit": "9"}, retry_after=30, body="slowly")) as server:
            with pytest.raises(InvalidStatus) as caught:
                async with client(server):
                    pass
            response = caught.value.response
            assert response.status_code == 429
            assert (response.headers["Retry-After"], response.headers["X-Limit"]) == ("30", "9")
            assert response.body == b"slowly"

    run(main())


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_leads_elsewhere(status: int) -> None:
    async def main() -> None:
        async with ChaosServer() as target, ChaosServer(Redirect(to=f"{target.url}there", status=status)) as server:
            async with client(server):
                assert target.open_of("/there") == 1
            assert [attempt.accepted for attempt in server.attempts] == [False]

    run(main())


def test_a_mute_server_keeps_tcp_open_and_answers_no_handshake() -> None:
    async def main() -> None:
        async with ChaosServer(Unanswered()) as server, raw(server) as (reader, _):
            await nothing_comes(lambda: reader.read(1))
            assert (server.open, server.open_of("raw"), server.attempts[0].key) == (1, 0, "raw")

    run(main(), fast=True)


@pytest.mark.parametrize("per_key", [False, True])
def test_tcp_is_reset_before_the_handshake(per_key: bool) -> None:
    async def main() -> None:
        async with ChaosServer(HangUp(), per_key=per_key) as server, raw(server) as (reader, _):
            with pytest.raises(ConnectionResetError):
                await reader.read()
            await server.wait_for(lambda: not server.open)
            assert [(one.accepted, one.key) for one in server.attempts] == [(False, "raw" if per_key else None)]

    run(main())


@pytest.mark.parametrize(("per_key", "request_text"), [(False, b""), (True, REQUEST)])
def test_tcp_is_closed_before_the_handshake(per_key: bool, request_text: bytes) -> None:
    async def main() -> None:
        feed = ChaosServer(HangUp(reset=False), per_key=per_key)
        async with feed as server, raw(server, request_text) as (reader, _):
            assert await reader.read() == b""

    run(main())


def test_garbage_is_no_answer_of_http() -> None:
    async def main() -> None:
        async with ChaosServer(Garbage(data=b"* OK IMAP4 ready\r\n")) as server:
            async with raw(server) as (reader, _):
                assert await reader.read() == b"* OK IMAP4 ready\r\n"
            with pytest.raises(InvalidMessage):
                async with client(server):
                    pass

    run(main())


def test_the_answer_to_another_key_opens_no_websocket() -> None:
    async def main() -> None:
        async with ChaosServer(Feed(right_accept=False)) as server:
            with pytest.raises(InvalidHandshake, match="Sec-WebSocket-Accept"):
                async with client(server):
                    pass

    run(main())


def test_a_handshake_may_be_late() -> None:
    async def main() -> None:
        async with ChaosServer(Feed(handshake_s=HOUR_S)) as server:
            start = now()
            async with client(server, open_timeout=HOUR_S * 2):
                assert HOUR_S <= now() - start < HOUR_S * 1.5

    run(main(), fast=True)


@pytest.mark.parametrize("request_text", [b"HELO there\r\n\r\n", b"x" * 200_000])
def test_what_is_no_request_is_no_websocket(request_text: bytes) -> None:
    async def main() -> None:
        async with ChaosServer() as server, raw(server, request_text):
            await server.wait_for(lambda: server.attempts)
            assert (server.attempts[0].accepted, server.attempts[0].path) == (False, "")

    run(main())


def test_a_client_that_leaves_before_its_request_is_an_attempt() -> None:
    async def main() -> None:
        async with ChaosServer() as server:
            async with raw(server, b"GET / HT"):
                await server.wait_for(lambda: server.open)
            await server.wait_for(lambda: not server.open)
            assert [attempt.key for attempt in server.attempts] == [None]

    run(main())


# the WebSocket opens


@pytest.mark.parametrize(("code", "reason"), [(1000, ""), (1008, "policy"), (1012, "restart"), (4001, "x" * 123)])
def test_a_flapping_server_closes_at_once(code: int, reason: str) -> None:
    async def main() -> None:
        async with ChaosServer(Feed(ending=Close(code=code, reason=reason))) as server:
            for _ in range(2):
                async with client(server) as socket:
                    frame = (await closing(socket)).rcvd
                    assert frame and (frame.code, frame.reason) == (code, reason)
            await server.wait_for(lambda: not server.open)
            assert server.close_codes == [code, code]

    run(main())


def test_a_close_may_have_no_code() -> None:
    async def main() -> None:
        async with ChaosServer(Feed(ending=Close(code=None))) as server, client(server) as socket:
            frame = (await closing(socket)).rcvd
            assert frame and frame.code == 1005

    run(main())


@pytest.mark.parametrize("ending", [Close(code=1001), Cut(), Cut(reset=False)])
def test_an_ending_comes_after_so_many_messages_and_none_of_them_is_lost(ending: Ending) -> None:
    async def main() -> None:
        kind = type(ending)
        fields = {name: getattr(ending, name) for name in ("code", "reset") if hasattr(ending, name)}
        async with ChaosServer(Feed(ending=kind(after_messages=3, **fields))) as server, client(server) as socket:
            server.publish_many(5)
            await subscribe(socket)
            assert [message["seq"] for message in await rest(socket)] == [1, 2, 3]

    run(main())


def test_an_ending_comes_after_so_many_seconds() -> None:
    async def main() -> None:
        async with ChaosServer(Feed(ending=Close(code=1001, after_s=2 * HOUR_S))) as server:
            start = now()
            async with client(server) as socket:
                await subscribe(socket)
                server.publish_many(1)
                assert await seqs(socket, 1) == [1]
                await closing(socket)
            assert 2 * HOUR_S <= now() - start < 2 * HOUR_S + 60

    run(main(), fast=True)


def test_an_ending_waits_for_its_messages_and_its_seconds() -> None:
    async def main() -> None:
        ending = Close(after_s=60, after_messages=2)
        async with ChaosServer(Feed(ending=ending), auto_subscribe=True) as server, client(server) as socket:
            start = now()
            await nothing_comes(socket.recv)
            server.publish_many(3)
            assert len(await rest(socket)) == 2
            assert now() - start < HOUR_S + 60

    run(main(), fast=True)


@pytest.mark.parametrize(("reset", "error"), [(True, ConnectionResetError), (False, EOFError)])
def test_a_cut_is_a_reset_or_an_end_without_a_close_frame(reset: bool, error: type) -> None:
    async def main() -> None:
        async with ChaosServer(Feed(ending=Cut(reset=reset))) as server, client(server) as socket:
            end = await closing(socket)
            assert (end.rcvd, end.sent) == (None, None)
            assert isinstance(end.__cause__, error)

    run(main())


def test_a_mute_feed_is_subscribed_and_answers_pings_and_sends_nothing() -> None:
    async def main() -> None:
        async with ChaosServer(Feed(sends_data=False)) as server, client(server) as socket:
            await subscribe(socket)
            server.publish_many(3)
            await nothing_comes(socket.recv)
            await (await socket.ping())

    run(main(), fast=True)


def test_a_subscription_may_never_be_acknowledged() -> None:
    async def main() -> None:
        async with ChaosServer(Feed(acknowledgement=None)) as server, client(server) as socket:
            await socket.send(json.dumps({"op": "subscribe", "since": 0}))
            server.publish_many(3)
            await nothing_comes(socket.recv)
            await (await socket.ping())
            assert len(server.subscriptions) == 1

    run(main(), fast=True)


def test_a_subscription_may_be_answered_with_something_else() -> None:
    async def main() -> None:
        async with ChaosServer(Feed(acknowledgement={"error": "no"})) as server, client(server) as socket:
            await socket.send(json.dumps({"op": "subscribe"}))
            assert json.loads(await socket.recv()) == {"error": "no"}

    run(main())


def test_pings_may_go_unanswered_while_data_comes() -> None:
    async def main() -> None:
        async with ChaosServer(Feed(answers_pings=False)) as server, client(server) as socket:
            await subscribe(socket)
            pong = await socket.ping()
            server.publish_many(2)
            assert await seqs(socket, 2) == [1, 2]
            await nothing_comes(lambda: asyncio.shield(pong))
            assert server.pings == 1

    run(main(), fast=True)


def test_a_silent_peer_answers_nothing_and_keeps_tcp_open() -> None:
    async def main() -> None:
        feed = Feed(ending=Silence(after_messages=1))
        async with ChaosServer(feed, auto_subscribe=True) as server, raw(server) as (reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            server.publish_many(3)
            parser, frames = FrameParser(), list[Frame]()
            while not frames:
                frames += parser.feed(await reader.read(1000))
            assert [json.loads(frame.payload)["seq"] for frame in frames] == [1]
            writer.write(masked(Opcode.PING) + masked(Opcode.TEXT, b"hi") + masked(Opcode.CLOSE, b"\x03\xe8"))
            await server.wait_for(lambda: server.close_codes)
            await nothing_comes(lambda: reader.read(1))
            assert (server.open, server.pings, len(server.received)) == (1, 1, 1)
            writer.write_eof()
            await server.wait_for(lambda: not server.open)
            await nothing_comes(lambda: reader.read(1))

    run(main(), fast=True)


def test_a_close_of_the_client_may_get_no_answer() -> None:
    async def main() -> None:
        async with ChaosServer(Feed(answers_close=False)) as server, raw(server) as (reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(masked(Opcode.PING, b"first") + masked(Opcode.CLOSE, b"\x03\xe8") + masked(Opcode.PING))
            await server.wait_for(lambda: server.pings == 2)
            [pong] = FrameParser().feed(await reader.readexactly(7))
            assert (pong.opcode, pong.payload) == (Opcode.PONG, b"first")
            await nothing_comes(lambda: reader.read(1))
            assert (server.open, server.close_codes) == (1, [1000])

    run(main(), fast=True)


def test_a_server_that_closes_may_leave_tcp_open() -> None:
    async def main() -> None:
        feed = Feed(answers_close=False, ending=Close(code=1001))
        async with ChaosServer(feed) as server, raw(server) as (reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(4) == close_frame(1001)
            writer.write(masked(Opcode.CLOSE, b"\x03\xe9"))
            await nothing_comes(lambda: reader.read(1))
            assert server.close_codes == [1001]

    run(main(), fast=True)


def test_messages_may_be_slow() -> None:
    async def main() -> None:
        async with ChaosServer(Feed(spacing_s=60.0)) as server, client(server) as socket:
            server.publish_many(4)
            await subscribe(socket)
            times = []
            for _ in range(4):
                await socket.recv()
                times.append(now())
            gaps = [after - before for before, after in itertools.pairwise(times)]
            assert all(59.0 < gap < 62.0 for gap in gaps)

    run(main(), fast=True)


def test_a_burst_is_published_when_somebody_subscribes() -> None:
    async def main() -> None:
        async with ChaosServer(Feed(burst=10_000), Feed()) as server, client(server) as socket:
            await subscribe(socket)
            assert await seqs(socket, 10_000) == list(range(1, 10_001))
            assert server.last_seq == 10_000

    run(main())


def test_a_client_that_does_not_read_stops_neither_the_server_nor_the_others() -> None:
    async def main() -> None:
        async with ChaosServer() as server, client(server, "slow", max_queue=1) as slow, client(server) as other:
            await subscribe(slow)
            await subscribe(other)
            for _ in range(20):
                server.publish("x" * 1_000_000)
            for _ in range(20):
                await other.recv()
            assert await seqs(slow, 20) == list(range(1, 21))

    run(main())


def test_each_kth_message_may_come_twice() -> None:
    async def main() -> None:
        async with ChaosServer(Feed(duplicate_each=3)) as server, client(server) as socket:
            server.publish_many(7)
            await subscribe(socket)
            assert await seqs(socket, 9) == [1, 2, 3, 3, 4, 5, 6, 6, 7]

    run(main())


def test_a_range_of_messages_may_be_missing() -> None:
    async def main() -> None:
        async with ChaosServer(Feed(skip=range(3, 6)), Feed()) as server:
            server.publish_many(7)
            for expected in ([1, 2, 6, 7], [1, 2, 3, 4, 5, 6, 7]):
                async with client(server) as socket:
                    await subscribe(socket)
                    assert await seqs(socket, len(expected)) == expected

    run(main())


def test_the_epoch_may_change_under_way_and_nothing_is_lost() -> None:
    async def main() -> None:
        async with ChaosServer(Feed(new_epoch_after=2), Feed()) as server:
            server.publish_many(5)
            async with client(server) as socket:
                await subscribe(socket)
                messages = [json.loads(await socket.recv()) for _ in range(5)]
                numbers = [(one["epoch"][-1], one["seq"], one["data"]) for one in messages]
                assert numbers == [("1", 1, 1), ("1", 2, 2), ("2", 1, 3), ("2", 2, 4), ("2", 3, 5)]
            async with client(server) as socket:
                await subscribe(socket, since=2, epoch="epoch-2")
                assert await take(socket, 1) == [("2", 3)]

    run(main())


def test_the_epoch_changes_once_on_a_connection_also_where_the_history_ends() -> None:
    async def main() -> None:
        async with ChaosServer(Feed(new_epoch_after=2)) as server, client(server) as socket:
            server.publish_many(2)
            await subscribe(socket)
            assert await take(socket, 2) == [("1", 1), ("1", 2)]
            await (await socket.ping())
            server.publish_many(3)
            assert await take(socket, 3) == [("2", 1), ("2", 2), ("2", 3)]

    run(main())


def test_one_message_may_be_too_big() -> None:
    async def main() -> None:
        async with ChaosServer(Feed(big_bytes=5000)) as server:
            server.publish_many(2)
            async with client(server) as socket:
                await subscribe(socket)
                sizes = [len(await socket.recv()) for _ in range(2)]
                assert sizes[0] == 5000 > 100 > sizes[1]
            async with client(server, max_size=4999) as socket:
                await subscribe(socket)
                assert isinstance((await closing(socket)).__cause__, PayloadTooBig)
            await server.wait_for(lambda: not server.open)
            assert server.close_codes == [1000, 1009]

    run(main())


@pytest.mark.parametrize("violation", Violation)
def test_a_frame_may_break_the_standard(violation: Violation) -> None:
    async def main() -> None:
        async with ChaosServer(Feed(ending=Violate(violation=violation))) as server:
            async with client(server) as socket:
                assert isinstance(await closing(socket), ConnectionClosedError)
            await server.wait_for(lambda: not server.open)
            assert server.close_codes == [1007 if violation is Violation.INVALID_TEXT else 1002]

    run(main())


def test_faults_combine() -> None:
    async def main() -> None:
        feed = Feed(
            skip={2}, duplicate_each=2, new_epoch_after=3, spacing_s=1.0, answers_pings=False, ending=Silence(after_s=9)
        )
        async with ChaosServer(feed) as server, client(server) as socket:
            server.publish_many(6)
            await subscribe(socket)
            assert await take(socket, 6) == [("1", 1), ("1", 3), ("1", 3), ("1", 4), ("2", 1), ("2", 1)]
            server.publish_many(9)
            assert await take(socket, 3) == [("2", 3), ("2", 4), ("2", 4)]
            await nothing_comes(socket.recv)

    run(main(), fast=True)


# TLS


def test_tls_with_a_certificate_that_the_client_trusts() -> None:
    async def main() -> None:
        async with ChaosServer(tls="good") as server, client(server) as socket:
            assert server.url.startswith("wss://127.0.0.1:")
            await subscribe(socket)
            server.publish_many(1000)
            assert await seqs(socket, 1000) == list(range(1, 1001))
            server.drop_all(Cut())
            assert (await closing(socket)).rcvd is None

    run(main())


def test_tls_with_a_certificate_that_nobody_trusts() -> None:
    async def main() -> None:
        async with ChaosServer(tls="untrusted") as server:
            with pytest.raises(ssl.SSLCertVerificationError):
                async with client(server):
                    pass
            await server.wait_for(lambda: server.attempts and not server.open)
            assert [attempt.accepted for attempt in server.attempts] == [False]

    run(main())


def test_tls_may_break_for_some_connections() -> None:
    async def main() -> None:
        script = [BrokenTls(fault=fault) for fault in (TlsFault.UNTRUSTED, TlsFault.RESET, TlsFault.UNANSWERED)]
        async with ChaosServer(*script, Feed(), tls="good") as server:
            for error in (ssl.SSLCertVerificationError, ConnectionResetError, TimeoutError):
                with pytest.raises(error):
                    async with client(server, open_timeout=1.0):
                        pass
            async with client(server) as socket:
                await (await socket.ping())
            assert [attempt.accepted for attempt in server.attempts] == [False, False, False, True]

    run(main())


@pytest.mark.parametrize("options", [{}, {"tls": "good", "per_key": True}])
def test_tls_that_is_not_there_cannot_break(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="BrokenTls"):
        ChaosServer(BrokenTls(), **options)


def test_without_the_package_for_certificates_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from thunderagent.testing.chaos import certificates

    certificates.contexts.cache_clear()
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(ConfigurationError, match="pip install cryptography"):
        ChaosServer(tls="good")


@pytest.mark.parametrize(
    "wrong",
    [
        partial(Refuse, status=101),
        partial(Close, code=70_000),
        partial(Close, code=None, reason="why"),
        partial(Close, reason="é" * 62),
    ],
)
def test_a_behaviour_that_cannot_be_is_an_error(wrong: Callable[[], Behaviour]) -> None:
    with pytest.raises(ConfigurationError):
        wrong()


# all at once


def test_all_connections_are_closed_with_a_code() -> None:
    async def main() -> None:
        async with ChaosServer() as server, client(server) as one, client(server) as other:
            server.drop_all(Close(code=1012, reason="restart"))
            for socket in (one, other):
                frame = (await closing(socket)).rcvd
                assert frame and (frame.code, frame.reason) == (1012, "restart")
            await server.wait_for(lambda: not server.open)

    run(main())


def test_all_connections_are_reset_also_those_that_are_no_websocket() -> None:
    async def main() -> None:
        async with ChaosServer(Feed(), Unanswered()) as server, client(server) as socket, raw(server) as (reader, _):
            await server.wait_for(lambda: len(server.attempts) == 2)
            server.drop_all(Cut())
            assert isinstance((await closing(socket)).__cause__, ConnectionResetError)
            with pytest.raises(ConnectionResetError):
                await reader.read()
            await server.wait_for(lambda: not server.open)

    run(main())


def test_all_connections_fall_silent_until_they_are_cut() -> None:
    async def main() -> None:
        async with ChaosServer() as server, client(server) as socket:
            await subscribe(socket)
            server.drop_all(Silence())
            server.publish_many(1)
            pong = asyncio.ensure_future(await socket.ping())
            server.drop_all(Close())
            await nothing_comes(socket.recv)
            assert not pong.done()
            pong.cancel()
            server.drop_all(Cut())
            assert isinstance((await closing(socket)).__cause__, ConnectionResetError)

    run(main(), fast=True)


def test_a_client_that_does_not_read_can_be_cut() -> None:
    async def main() -> None:
        async with ChaosServer(auto_subscribe=True) as server, raw(server) as (reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            server.publish_many(1)
            for _ in range(30):
                server.publish("x" * 1_000_000)
            server.drop_all(Close())
            server.drop_all(Cut())
            await server.wait_for(lambda: not server.open)

    run(main())


def test_an_outage_refuses_connects_and_the_port_stays() -> None:
    async def main() -> None:
        async with ChaosServer() as server, client(server) as kept:
            url = server.url
            server.stop_listening()
            server.stop_listening()
            for _ in range(3):
                with pytest.raises(ConnectionRefusedError):
                    async with client(server):
                        pass
            await (await kept.ping())
            server.listen_again()
            server.listen_again()
            assert server.url == url
            async with client(server):
                assert len(server.attempts) == 2

    run(main())


@pytest.mark.parametrize("tls", [None, "good"])
def test_leaving_ends_everything_whatever_the_connections_do(tls: Any) -> None:
    """`run` asserts that no task is left, and that no callback failed."""

    async def main() -> None:
        script = [Feed(), Unanswered(), Feed(ending=Silence()), Feed(handshake_s=HOUR_S), Feed(answers_close=False)]
        async with ChaosServer(*script, tls=tls, auto_subscribe=True) as server:
            pipes = []
            for _ in script:
                port = int(server.url.rstrip("/").rpartition(":")[2])
                pipes.append(await asyncio.open_connection("127.0.0.1", port, ssl=server.client_context))
                pipes[-1][1].write(REQUEST)
            await server.wait_for(lambda: len(server.attempts) == len(script))
            server.publish("x" * 10_000_000)
            start = now()
        assert now() - start < 2.0
        assert server.open == 0
        for reader, writer in pipes:
            with pytest.raises(ConnectionResetError):
                while await reader.read(1000):
                    pass
                raise ConnectionResetError
            writer.transport.abort()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)

    run(main())


def test_leaving_gives_the_port_back() -> None:
    async def main() -> None:
        async with ChaosServer() as first, client(first):
            port = int(first.url.rstrip("/").rpartition(":")[2])
        async with ChaosServer(port=port) as second, client(second):
            assert second.url == first.url
            with pytest.raises(OSError, match="in use"):
                async with ChaosServer(port=port):
                    pass

    run(main())


def test_a_fault_of_the_server_itself_is_raised_when_it_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        with pytest.raises(ExceptionGroup, match="the chaos server failed"):
            async with ChaosServer() as server:
                monkeypatch.setattr("thunderagent.testing.chaos.server.accepting", lambda *_, **__: 1 / 0)
                async with raw(server) as (reader, _):
                    assert await reader.read() == b""
                await server.wait_for(lambda: not server.open)

    run(main())


# frames


SIZES: Final = (0, 125, 126, 127, 65_535, 65_536)
"""Of a payload: where its length is written in another way."""


@given(
    st.lists(
        st.builds(
            Frame,
            opcode=st.integers(0, 15),
            payload=st.one_of(st.binary(max_size=200), st.sampled_from(SIZES).map(bytes)),
            last=st.booleans(),
            reserved=st.integers(0, 7),
            mask=st.none() | st.binary(min_size=4, max_size=4),
        ),
        max_size=3,
    ),
    st.integers(1, 5000),
)
@settings(deadline=None, max_examples=50)
def test_frames_are_read_as_they_were_written_however_they_are_cut(frames: list[Frame], size: int) -> None:
    data = b"".join(frame.encode() for frame in frames)
    parser = FrameParser()
    assert [frame for at in range(0, len(data), size) for frame in parser.feed(data[at : at + size])] == frames


# a process of its own


@asynccontextmanager
async def feed_process(*arguments: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A feed in a process, and its URL."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "thunderagent.testing.chaos", *arguments, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout
        yield process, (await process.stdout.readline()).decode().strip()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def test_a_feed_in_a_process_can_be_stopped_and_goes_on_and_ends_on_sigterm() -> None:
    async def main() -> None:
        async with feed_process("--rate", "50", "--history", "3", "--from-start") as (process, url):
            assert url.startswith("ws://127.0.0.1:")
            async with connect(url, proxy=None, ping_interval=None, close_timeout=0.1) as socket:
                await subscribe(socket, since=None)
                assert await seqs(socket, 5) == [1, 2, 3, 4, 5]
                os.kill(process.pid, signal.SIGSTOP)
                pong = await socket.ping()
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.3):
                        await asyncio.shield(pong)
                os.kill(process.pid, signal.SIGCONT)
                await pong
                process.terminate()
                end = await closing_after_data(socket)
                assert end.rcvd is None
            assert await process.wait() == 0

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


async def closing_after_data(socket: ClientConnection) -> ConnectionClosed:
    try:
        while True:
            await socket.recv()
    except ConnectionClosed as end:
        return end
