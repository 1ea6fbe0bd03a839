"""Public bug reports about clients that keep dead connections or cut healthy ones, each as a promise."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Final

import pytest

from tests.support.connections import HOUR_S, PROMPT, Keeper, Message, now, run, streaming
from thunderagent.streams.connection.ending import State
from thunderagent.testing.chaos import ChaosServer, Feed, Silence

pytestmark = pytest.mark.slow

SEED_MESSAGES: Final = 3


@asynccontextmanager
async def chaos_process(*arguments: str) -> AsyncIterator[tuple[Process, str]]:
    """A feed in a process of its own, and its URL."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "thunderagent.testing.chaos", *arguments, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout
        async with asyncio.timeout(15):
            url = (await process.stdout.readline()).decode().strip()
        yield process, f"{url}?stream=s"
    finally:
        process.kill()
        await process.communicate()


def test_a_peer_that_only_answers_pings_is_left_once_when_silence_is_limited() -> None:
    """Row 1, https://github.com/alpacahq/alpaca-py/issues/740: no data for hours, and nobody noticed."""

    async def main() -> None:
        async with ChaosServer(Feed(sends_data=False), Feed(), from_start=True) as server:
            server.publish_many(SEED_MESSAGES)
            async with streaming(server, options=replace(PROMPT, idle_timeout_s=60.0)) as stand:
                start = now()
                await stand.until_handled(SEED_MESSAGES, timeout_s=120)
                assert 60.0 <= now() - start <= 62.0
                for _ in range(20):
                    await asyncio.sleep(30)
                    server.publish_many(1)
                await stand.until_handled(SEED_MESSAGES + 20)
                assert len(server.attempts) == 2
                [reason] = stand.keeper.reasons(State.BACKOFF)
                assert reason.startswith("idle (no message for 60 s)")

    run(main(), fast=True)


def test_a_sparse_stream_lives_on_for_an_hour_as_silence_is_not_limited_by_default() -> None:
    """Row 2, https://github.com/alpacahq/alpaca-py/pull/744: the mend of row 1 cut healthy sparse streams."""

    async def main() -> None:
        async with ChaosServer() as server, streaming(server) as stand:
            await stand.keeper.until(State.LIVE)
            await asyncio.sleep(HOUR_S)
            server.publish_many(1)
            await stand.until_handled(1)
            assert stand.feed.connects == len(server.attempts) == 1
            assert 200 <= server.pings <= 241

    run(main(), fast=True, quiet_s=0.002)


def test_a_connection_survives_a_handler_that_is_slower_than_the_peer() -> None:
    """Row 7, https://github.com/massive-com/client-python/issues/844 and
    https://github.com/python-websockets/websockets/issues/1012: the pong waits behind messages that are not read.
    """

    async def slow(_: Message) -> None:
        await asyncio.sleep(0.5)

    async def main() -> None:
        async with ChaosServer(from_start=True) as server:
            for _ in range(3000):
                server.publish("x" * 10_000)
            options = replace(PROMPT, ping_interval_s=1.0, max_pending=16)
            async with streaming(server, options=options, handle=slow) as stand:
                await stand.until_handled(60, timeout_s=60)
                assert server.pings, "no ping was on its way while nothing was read"
                assert State.PAUSED in stand.keeper.states
                assert State.BACKOFF not in stand.keeper.states
                assert stand.seqs == list(range(1, 61))
                stand.feed.abort()  # or the server would have all the rest to send first

    run(main(), fast=True)


def test_a_stopped_peer_is_found_within_two_intervals_and_is_no_clean_end() -> None:
    """Row 8, https://github.com/aio-libs/aiohttp/issues/8540, 4153 and 2309: the missed pong went unseen."""

    async def main() -> None:
        options = replace(PROMPT, ping_interval_s=0.3)
        async with (
            chaos_process("--history", "3", "--from-start") as (process, url),
            streaming(url, options=options) as stand,
        ):
            await stand.until_handled(3)
            process.send_signal(signal.SIGSTOP)
            start = now()
            await stand.keeper.until(State.BACKOFF)
            assert now() - start <= 2 * 0.3 + 1.0
            assert stand.keeper.reasons(State.BACKOFF)[0].startswith("zombie (2 pings were not answered)")
            assert not stand.consumer.done()
            process.send_signal(signal.SIGCONT)
            await stand.keeper.until(State.LIVE, times=2)

    run(main())


@pytest.mark.parametrize("after_s", [0.0, 3.7, 7.4, 14.9, 15.1, 29.9])
def test_a_peer_that_is_gone_is_found_within_two_intervals_whenever_it_goes(after_s: float) -> None:
    """Row 8 with the default interval of 15 s."""

    async def main() -> None:
        feed = ChaosServer(Feed(ending=Silence(after_s=after_s)), Feed())
        async with feed as server, streaming(server, on_open=None) as stand:
            await stand.keeper.until(State.LIVE)
            start = now()
            await stand.keeper.until(State.BACKOFF, timeout_s=70)
            assert now() - start - after_s <= 31.0
            assert stand.keeper.reasons(State.BACKOFF)[0].startswith("zombie")
            await stand.keeper.until(State.LIVE, times=2)

    run(main(), fast=True)


def test_a_connection_survives_a_handler_that_waits_for_five_intervals() -> None:
    """Row 9, https://github.com/aio-libs/aiohttp/pull/10544: pongs were seen only while the handler asked for more."""

    async def slow(_: Message) -> None:
        await asyncio.sleep(5.0)

    async def main() -> None:
        async with ChaosServer(from_start=True) as server:
            server.publish_many(3)
            async with streaming(server, options=replace(PROMPT, ping_interval_s=1.0), handle=slow) as stand:
                await stand.until_handled(3, timeout_s=20)
                assert stand.feed.connects == 1
                assert server.pings >= 12

    run(main(), fast=True)


def test_a_connection_survives_a_loop_that_is_blocked_for_five_intervals_again_and_again() -> None:
    """Row 9, when the handler blocks the event loop: the time limit must not win over the pong in the socket."""

    async def blocking(message: Message) -> None:
        for _ in range(8):
            time.sleep(0.25)  # noqa: ASYNC251  # blocks on purpose
            await asyncio.sleep(0)

    async def main() -> None:
        async with chaos_process("--history", "1", "--from-start") as (_, url):
            options = replace(PROMPT, ping_interval_s=0.4, pong_misses=1)
            async with streaming(url, options=options, handle=blocking) as stand:
                await stand.until_handled(1)
                await asyncio.sleep(0.1)
                assert stand.feed.connects == 1
                assert State.BACKOFF not in stand.keeper.states

    run(main())


def test_each_connection_is_watched_on_its_own() -> None:
    """Row 11, https://github.com/bmoscon/cryptofeed/pull/902: the watch of the old connection killed each new one."""

    async def main() -> None:
        async with (
            ChaosServer() as server,
            streaming(server, options=replace(PROMPT, idle_timeout_s=60.0)) as stand,
        ):
            await stand.keeper.until(State.LIVE)
            await asyncio.sleep(20)
            server.publish_many(1)
            await stand.keeper.until(State.LIVE, times=2, timeout_s=70)
            await asyncio.sleep(50)  # the last message is 110 s old, but this connection is young
            assert stand.feed.connects == 2
            server.publish_many(1)
            await asyncio.sleep(50)
            assert stand.feed.connects == 2
            assert stand.seqs == [1, 2]

    run(main(), fast=True)


@pytest.mark.parametrize("ping_interval_s", [None, 15.0, 1000.0])
def test_silence_is_limited_before_the_first_message_too(ping_interval_s: float | None) -> None:
    """Row 11: the watch was armed by the first message, which never came."""

    async def main() -> None:
        async with ChaosServer(Feed(sends_data=False)) as server:
            options = replace(PROMPT, idle_timeout_s=10.0, ping_interval_s=ping_interval_s)
            async with streaming(server, options=options, keeper=Keeper()) as stand:
                await stand.keeper.until(State.LIVE)
                start = now()
                await stand.keeper.until(State.BACKOFF, timeout_s=20)
                assert 10.0 - 0.2 <= now() - start <= 10.1

    run(main(), fast=True)
