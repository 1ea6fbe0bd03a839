"""Public bug reports about streams that end without a word, hang or leak, each as a promise."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import random
import ssl
import tracemalloc
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosedError, InvalidHandshake, InvalidURI

from tests.support.connections import (
    PROMPT,
    Keeper,
    Message,
    a_feed,
    governor,
    now,
    position,
    run,
    streaming,
    subscribe,
)
from thunderagent.model.errors import ConfigurationError, LeaseLost, StreamFailed
from thunderagent.streams.connection import feed as feeds
from thunderagent.streams.connection import pump
from thunderagent.streams.connection.connection import Connection
from thunderagent.streams.connection.ending import ConnectionEnd, State
from thunderagent.streams.connection.endpoint import Attempt
from thunderagent.streams.connection.transport import open_connection
from thunderagent.streams.connection.verdicts import Verdict
from thunderagent.streams.cursor import Cursor, GapAction
from thunderagent.testing.chaos import (
    Behaviour,
    BrokenTls,
    ChaosServer,
    Close,
    Cut,
    Feed,
    Refuse,
    Silence,
    TlsFault,
    Unanswered,
)

pytestmark = pytest.mark.slow

ERRORS: list[BaseException] = [
    OSError("no route"),
    ConnectionResetError("reset"),
    ssl.SSLError("bad record"),
    ssl.SSLCertVerificationError("expired"),
    EOFError("cut off"),
    TimeoutError("too late"),
    asyncio.CancelledError("of something else"),
    ValueError("wrong"),
    RuntimeError("broken"),
    StopIteration(),
    StopAsyncIteration(),
    ConnectionClosedError(None, None),
    InvalidHandshake("no"),
    InvalidURI("x", "no"),
    ConfigurationError("no"),
    StreamFailed("for good"),
    LeaseLost("over"),
    SystemExit(3),
    KeyboardInterrupt(),
    GeneratorExit(),
]
FINAL = (StreamFailed, ConfigurationError, InvalidURI)
each_error = pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)


class Fault:
    """Raises so many times, then no more."""

    def __init__(self, error: BaseException, times: int = 2) -> None:
        self.error = error
        self.left = times

    def strike(self) -> None:
        if self.left:
            self.left -= 1
            raise self.error


async def consumed(stand_of: Any) -> BaseException | None:
    """What came out of the handler's loop; here, as SystemExit out of a task of its own would end the event loop."""
    try:
        async for _ in stand_of:
            pass
    except BaseException as error:
        return error
    return None


@each_error
@pytest.mark.parametrize("at", ["endpoint", "coroutine", "resolver", "open_connection", "on_open", "classify"])
def test_an_error_while_connecting_ends_in_a_live_stream_or_a_told_failure(
    at: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 4, https://github.com/slackapi/python-slack-sdk/issues/1446: an exception, and dead until the restart."""
    fault = Fault(error)

    async def main() -> None:
        async with ChaosServer(from_start=True) as server:
            server.publish_many(1)
            url = f"{server.url}?stream=s"
            source: Any = url
            chance = governor()
            arguments: dict[str, Any] = {}
            options = PROMPT

            def endpoint(attempt: Attempt) -> str:
                fault.strike()
                return url

            async def coroutine(attempt: Attempt) -> str:
                await asyncio.sleep(0)
                fault.strike()
                return url

            async def addresses(*_: Any) -> list[str]:
                fault.strike()
                return ["127.0.0.1"]

            async def opening(*of: Any) -> Any:
                fault.strike()
                return await opened(*of)

            async def on_open(connection: Connection, cursor: Cursor | None) -> None:
                await subscribe(connection, cursor)
                fault.strike()

            def classify(end: ConnectionEnd) -> Verdict | None:
                fault.strike()
                return None

            match at:
                case "endpoint":
                    source = endpoint
                case "coroutine":
                    source = coroutine
                case "resolver":
                    source = url.replace("127.0.0.1", "peer.test")
                    monkeypatch.setattr(chance.resolver, "addresses", addresses)
                case "open_connection":
                    opened = open_connection
                    monkeypatch.setattr(pump, "open_connection", opening)
                case "on_open":
                    arguments["on_open"] = on_open
                case "classify":
                    options = replace(options, classify=classify)
                    server.script(*[Refuse(status=500)] * 2, Feed())
            async with streaming(source, options=options, chance=chance, **arguments) as stand:
                if at != "classify" and isinstance(error, FINAL):
                    failure = await stand.failure()
                    assert isinstance(failure, StreamFailed)
                    assert "no" in str(failure) or "for good" in str(failure)
                    assert stand.keeper.states[-1] is State.FAILED
                else:
                    await stand.until_handled(1)
                    assert fault.left == 0
                    assert stand.keeper.states[-1] is State.LIVE
                    assert len(stand.keeper.reasons(State.BACKOFF)) == 2
                    assert all(stand.keeper.reasons(State.BACKOFF)), "no reason was given"

    run(main(), fast=True, quiet_s=0.002)


@each_error
@pytest.mark.parametrize(
    ("at", "is_coroutine"),
    [("decode", False), ("position", False), *itertools.product(["on_gap", "snapshot"], [False, True])],
)
def test_an_error_of_a_function_that_reads_messages_reaches_the_handler(
    at: str, is_coroutine: bool, error: BaseException
) -> None:
    """Row 4: what would end a loop without a word, a cancellation or StopAsyncIteration, comes as another error."""

    async def main() -> None:
        fault = Fault(error, times=100)

        def decode(raw: Any) -> Message:
            if at == "decode":
                fault.strike()
            return dict(json.loads(raw))

        def place(message: Message) -> Cursor | None:
            if at == "position":
                fault.strike()
            return position(message)

        async def later(strike: Callable[[], None]) -> Any:
            await asyncio.sleep(0)
            strike()

        def on_gap(_: Any) -> GapAction | Awaitable[GapAction]:
            if at == "on_gap":
                if is_coroutine:
                    return later(fault.strike)
                fault.strike()
            return GapAction.SNAPSHOT

        def snapshot(_: Any) -> Cursor | Awaitable[Cursor]:
            if is_coroutine:
                return later(fault.strike)
            fault.strike()
            raise AssertionError

        async with ChaosServer(Feed(skip={2}), from_start=True) as server:
            server.publish_many(3)
            keeper = Keeper()
            feed: feeds.Feed[Message] = a_feed(
                server.url,
                keeper=keeper,
                decode=decode,
                on_open=subscribe,
                position=place,
                on_gap=on_gap,
                snapshot=snapshot,
            )
            told = await asyncio.create_task(consumed(feed))
            is_silent = isinstance(error, (asyncio.CancelledError, StopAsyncIteration, StopIteration))
            assert isinstance(told, RuntimeError) if is_silent else told is error
            assert (told.__cause__ is error) if is_silent and told else True
            await feed.finish()

    run(main(), fast=True, quiet_s=0.002)


@each_error
@pytest.mark.parametrize("at", ["answer", "keepalive"])
def test_an_error_of_a_function_that_answers_the_peer_reaches_the_handler(at: str, error: BaseException) -> None:
    """Row 4: it is called away from the handler, where nobody would see its error."""

    async def main() -> None:
        fault = Fault(error)

        def strike(*_: Any) -> None:
            fault.strike()

        arguments: dict[str, Any] = {"answer": strike} if at == "answer" else {"keepalive": (strike, 5.0)}
        async with ChaosServer(auto_subscribe=True, from_start=True) as server:
            server.publish_many(1)
            feed: feeds.Feed[Message] = a_feed(
                server.url,
                decode=json.loads,
                **arguments,
            )
            told = await asyncio.create_task(consumed(feed))
            is_silent = isinstance(error, (asyncio.CancelledError, StopAsyncIteration, StopIteration))
            assert isinstance(told, RuntimeError) if is_silent else told is error
            assert (told.__cause__ is error) if is_silent and told else True
            assert feed.connection is None or not feed.connection.is_open
            await feed.finish()

    run(main(), fast=True, quiet_s=0.002)


async def hangs_once_cancelled(*_: Any) -> str:
    """Does not let itself be cancelled: it swallows the cancellation and waits on."""
    while True:
        try:
            await asyncio.sleep(1.0)
        except asyncio.CancelledError:
            await asyncio.sleep(5.0)
            return "ws://127.0.0.1:1/"


async def waits_for_ever(*_: Any) -> str:
    await asyncio.get_running_loop().create_future()
    raise AssertionError


async def swallows(*_: Any) -> None:
    """Takes the cancellation for its own and goes on."""
    try:
        await asyncio.get_running_loop().create_future()
    except asyncio.CancelledError:
        return


async def never_done(_: Message) -> None:
    await asyncio.get_running_loop().create_future()


STATES: dict[str, tuple[State, Behaviour, dict[str, Any]]] = {
    "endpoint": (State.RESOLVING, Feed(), {"source": waits_for_ever}),
    "endpoint that swallows": (State.RESOLVING, Feed(), {"source": swallows}),
    "lookup": (State.CONNECTING, Feed(), {"source": "ws://peer.test/"}),
    "connecting": (State.CONNECTING, Unanswered(), {}),
    "tls": (State.CONNECTING, BrokenTls(fault=TlsFault.UNANSWERED), {}),
    "subscribing": (State.SUBSCRIBING, Feed(acknowledgement=None), {}),
    "subscribing, then mute": (State.SUBSCRIBING, Feed(ending=Silence()), {}),
    "on_open that swallows": (State.SUBSCRIBING, Feed(), {"on_open": swallows}),
    "live": (State.LIVE, Feed(), {}),
    "live, does not answer the close": (State.LIVE, Feed(answers_close=False), {}),
    "live, then mute": (State.LIVE, Feed(ending=Silence(after_messages=1)), {}),
    "paused": (State.PAUSED, Feed(), {"handle": never_done}),
    "paused, then mute": (State.PAUSED, Feed(ending=Silence(after_messages=30)), {"handle": never_done}),
    "backoff": (State.BACKOFF, Refuse(status=503), {}),
}


@pytest.mark.parametrize("way", ["cancel and finish", "finish", "finish and flush", "abort", "abort and finish"])
@pytest.mark.parametrize("name", STATES)
def test_a_stream_ends_in_time_in_each_state(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 15, https://github.com/frankie567/httpx-ws/issues/107 and
    https://github.com/python-websockets/websockets/issues/142: a hang or a leaked task on cancellation.
    """
    state, behaviour, arguments = STATES[name]
    is_paused = state is State.PAUSED

    async def main() -> None:
        async with ChaosServer(behaviour, from_start=True, tls="good" if name == "tls" else None) as server:
            server.publish_many(50 if is_paused else 1)
            chance = governor()
            if name == "lookup":
                monkeypatch.setattr(chance.resolver, "addresses", waits_for_ever)
            options = replace(PROMPT, close_timeout_s=1.0, max_pending=8)
            source = arguments.get("source", server)
            rest = {key: value for key, value in arguments.items() if key != "source"}
            async with streaming(source, options=options, chance=chance, **rest) as stand:
                await stand.keeper.until(state)
                if state is State.LIVE:
                    await stand.until_handled(1)
                start = now()
                if "cancel" in way:
                    stand.consumer.cancel()
                    await asyncio.wait((stand.consumer,))
                    assert stand.consumer.cancelled(), "the cancellation was swallowed"
                if "abort" in way:
                    stand.keeper.is_lost = True
                    stand.feed.abort()
                if "finish" in way:
                    await stand.feed.finish(flush="flush" in way)
                    assert now() - start <= 1.0 + 0.5
                    assert stand.feed.state is State.CLOSED
                if not is_paused and "cancel" not in way:
                    async with asyncio.timeout(1.5):
                        await asyncio.wait((stand.consumer,))
                    if "abort" in way:
                        assert isinstance(stand.consumer.exception(), LeaseLost)
                    else:
                        assert stand.consumer.exception() is None
                assert now() - start <= 1.0 + 0.5
                await server.wait_for(lambda: server.open == 0 or isinstance(behaviour, Refuse))

    run(main(), fast=True)


def test_user_code_that_resists_its_cancellation_delays_no_end() -> None:
    """Row 15: `finish` is bounded, and the attempt that goes on does not come to a connection."""

    async def main() -> None:
        async with streaming(hangs_once_cancelled) as stand:
            await stand.keeper.until(State.RESOLVING)
            await asyncio.sleep(0)
            start = now()
            await stand.feed.finish()
            assert now() - start <= PROMPT.close_timeout_s + 0.5
            await asyncio.wait((stand.consumer,))
            await asyncio.sleep(10)
            assert State.CONNECTING not in stand.keeper.states

    run(main(), fast=True)


@pytest.mark.parametrize("way", ["finish", "abort"])
def test_a_feed_that_was_ended_before_it_is_iterated_never_connects(way: str) -> None:
    """Row 15: the stop came while the handler did something else first."""

    async def main() -> None:
        async with ChaosServer() as server:
            feed: feeds.Feed[Any] = a_feed(server.url)
            if way == "finish":
                await feed.finish()
            else:
                feed.abort()
            told = await consumed(feed)
            assert told is None if way == "finish" else isinstance(told, StreamFailed)
            await asyncio.sleep(5)
            assert not server.attempts

    run(main(), fast=True)


def test_a_burst_that_is_larger_than_the_buffer_comes_whole_over_one_connection() -> None:
    """Row 6, https://github.com/sammchardy/python-binance/issues/1295 and 1016: a full queue, and the socket died."""
    most = 0

    async def main() -> None:
        async with ChaosServer(Feed(burst=10_000)) as server:
            handled = itertools.count(1)

            async def slow(_: Message) -> None:
                nonlocal most
                most = max(most, len(stand.feed._buffer))
                if next(handled) % 100 == 0:
                    await asyncio.sleep(1.0)

            async with streaming(server, handle=slow) as stand:
                await stand.until_handled(10_000, timeout_s=200)
                assert stand.seqs == list(range(1, 10_001))
                assert 200 <= most <= 256
                assert stand.feed.connects == len(server.attempts) == 1
                assert State.PAUSED in stand.keeper.states

    run(main(), fast=True, quiet_s=0.002)


def test_a_server_never_sees_two_sockets_of_a_stream_through_many_handoffs() -> None:
    """Row 23, https://github.com/wireapp/wire-webapp/pull/21448: with two sockets the server fed one of them only."""
    rng = random.Random(23)

    async def main() -> None:
        kinds = [Feed(), Feed(acknowledgement=None), Refuse(status=500), Feed(ending=Cut(after_messages=3))]
        async with ChaosServer(from_start=True) as server:
            keeper = Keeper()
            seqs: list[int] = []
            for number in range(200):
                server.script(*rng.sample(kinds, len(kinds)))
                server.publish_many(rng.randrange(5))
                async with streaming(server, keeper=keeper, chance=governor(number, rate=1e6)) as stand:
                    await asyncio.sleep(rng.choice([0.0, 0.0, 0.001, 0.04, 0.06, 0.5]))
                    await stand.feed.finish(flush=rng.random() < 0.5)
                    await asyncio.wait((stand.consumer,))
                    seqs += stand.seqs
            server.script(Feed())
            server.publish_many(1)
            async with streaming(server, keeper=keeper) as stand:
                await stand.until_handled(server.last_seq - len(seqs))
                seqs += stand.seqs
            assert seqs == list(range(1, server.last_seq + 1))
            assert server.most_open == {"s": 1}
            assert len(server.attempts) > 150

    run(main(), fast=True, quiet_s=0.001)


class Brief:
    """A connection that ends at once; what the library is asked of one."""

    def __init__(self) -> None:
        self.transport = self
        self.request = self.response = None
        self.is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True

    async def recv(self) -> str:
        raise ConnectionClosedError(None, None)


async def grown_by(reconnects: Callable[[int], Awaitable[None]], warm: int, count: int) -> int:
    """Bytes that so many reconnects leave behind, and no task at all."""
    await reconnects(warm)
    gc.collect()
    tracemalloc.start()
    tasks = len(asyncio.all_tasks())
    before = tracemalloc.get_traced_memory()[0]
    await reconnects(count)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert abs(len(asyncio.all_tasks()) - tasks) <= 5
    return grown


@pytest.mark.parametrize(("is_real", "count", "most"), [(False, 10_000, 2**20), (True, 500, 100_000)])
def test_ten_thousand_reconnects_leave_nothing_behind(
    is_real: bool, count: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 26, https://github.com/ccxt/ccxt/issues/29331 and https://github.com/freqtrade/freqtrade/issues/13082:
    futures and orphaned subscriptions grew to gigabytes. Ours alone, and with sockets.
    """
    monkeypatch.setattr(pump, "FLOOR_S", 0.0)

    async def opening(*_: Any) -> Brief:
        await asyncio.sleep(0)
        return Brief()

    async def main() -> None:
        options = replace(PROMPT, backoff_base_s=1e-9, backoff_cap_s=1e-9)
        if not is_real:
            monkeypatch.setattr("thunderagent.streams.connection.pump.open_connection", opening)
        async with ChaosServer(Feed(ending=Close(code=1000))) as server:
            keeper = Keeper()
            chance = governor(rate=1e9)
            async with streaming(server, options=options, keeper=keeper, chance=chance, on_open=None) as stand:

                async def reconnects(number: int) -> None:
                    until = stand.feed.connects + number
                    while stand.feed.connects < until:
                        await keeper.until(State.LIVE, times=100)
                        for seen in (keeper.moves, server.attempts, server.close_codes):
                            seen.clear()

                assert await grown_by(reconnects, 200, count) < most
                assert not stand.consumer.done()

    run(main(), limit_s=60)
