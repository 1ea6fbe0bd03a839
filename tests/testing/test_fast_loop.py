"""The clock that jumps: time passes for the loop, and hardly any for the one who waits."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
import time
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from thunderagent.model.errors import WaitTimeout
from thunderagent.testing import fast_loop as fasttime
from thunderagent.testing.fast_loop import FastLoop, run_fast

HOUR_S = 3600.0
LONG_S = 60.0


def now() -> float:
    return asyncio.get_running_loop().time()


def jumps() -> int:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, FastLoop)
    return loop.jumps


def test_an_hour_passes_in_a_moment() -> None:
    async def main() -> float:
        start = now()
        await asyncio.sleep(HOUR_S)
        return now() - start

    before = time.monotonic()
    assert run_fast(main()) == pytest.approx(HOUR_S, abs=1.0)
    assert time.monotonic() - before < LONG_S


def test_timers_fire_in_their_order_and_at_their_times() -> None:
    async def main() -> list[tuple[int, float]]:
        start, fired = now(), list[tuple[int, float]]()

        async def one(seconds: int) -> None:
            await asyncio.sleep(seconds)
            fired.append((seconds, now() - start))

        await asyncio.gather(*(one(seconds) for seconds in (500, 3, 100_000, 70)))
        return fired

    fired = run_fast(main())
    assert [seconds for seconds, _ in fired] == [3, 70, 500, 100_000]
    assert all(seconds <= at < seconds + 1.0 for seconds, at in fired)


def test_a_timer_over_a_day_away_is_reached_too() -> None:
    async def main() -> float:
        start = now()
        await asyncio.sleep(10 * 24 * HOUR_S)
        return now() - start

    assert run_fast(main()) == pytest.approx(10 * 24 * HOUR_S, abs=1.0)


@pytest.mark.slow
def test_the_clock_waits_for_sockets_of_the_same_loop() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(line)
        writer.close()

    async def main() -> int:
        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            before = jumps()
            timer = asyncio.get_running_loop().call_later(HOUR_S, writer.close)
            for number in range(3000):
                writer.write(b"%d\n" % number)
                assert await reader.readline() == b"%d\n" % number
            timer.cancel()
            writer.close()
            await writer.wait_closed()
            return jumps() - before

    assert run_fast(main()) == 0


@pytest.mark.slow
def test_a_timeout_of_a_peer_that_never_answers_comes_at_once() -> None:
    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(mute, "127.0.0.1", 0)
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            start = now()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(HOUR_S):
                    await reader.readline()
            assert now() - start >= HOUR_S
            writer.close()
            await writer.wait_closed()

    before = time.monotonic()
    run_fast(main())
    assert time.monotonic() - before < LONG_S


@pytest.mark.slow
def test_the_clock_does_not_jump_while_a_thread_of_the_executor_works() -> None:
    async def main() -> tuple[str, int]:
        before = jumps()
        async with asyncio.timeout(HOUR_S):
            await asyncio.to_thread(time.sleep, 0.3)
        between = jumps() - before
        await asyncio.sleep(HOUR_S)
        assert jumps() > before
        return "done", between

    assert run_fast(main()) == ("done", 0)


def test_what_a_thread_takes_is_real_time_of_the_loop() -> None:
    async def main() -> float:
        start = now()
        await asyncio.to_thread(time.sleep, 0.2)
        return now() - start

    assert 0.2 <= run_fast(main()) < 5.0


def test_a_call_from_another_thread_is_heard_where_there_is_no_timer() -> None:
    async def main() -> bool:
        heard = asyncio.Event()
        loop = asyncio.get_running_loop()
        thread = threading.Timer(0.1, lambda: loop.call_soon_threadsafe(heard.set))
        thread.start()
        await heard.wait()
        thread.join()
        return heard.is_set()

    assert run_fast(main())


def test_the_limit_is_of_real_time_and_names_what_is_open() -> None:
    async def waits_for_nothing() -> None:
        await asyncio.get_running_loop().create_future()

    before = time.monotonic()
    with pytest.raises(WaitTimeout, match="waits_for_nothing"):
        run_fast(waits_for_nothing(), limit_s=0.2)
    assert 0.2 <= time.monotonic() - before < LONG_S


def test_a_loop_that_is_always_busy_meets_the_limit_too() -> None:
    async def main() -> None:
        for _ in itertools.repeat(None):
            await asyncio.sleep(0)

    with pytest.raises(WaitTimeout):
        run_fast(main(), limit_s=0.2)


def test_a_loop_that_jumps_for_ever_meets_the_limit_too() -> None:
    async def main() -> None:
        for _ in itertools.repeat(None):
            await asyncio.sleep(HOUR_S)

    with pytest.raises(WaitTimeout):
        run_fast(main(), limit_s=0.2)


def test_what_the_limit_ends_may_still_clean_up() -> None:
    ended = []

    async def main() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await asyncio.sleep(10.0)
            ended.append("main")

    with pytest.raises(WaitTimeout):
        run_fast(main(), limit_s=0.1)
    assert ended == ["main"]


@pytest.mark.slow
def test_what_refuses_to_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fasttime, "_END_S", 0.2)

    async def main() -> None:
        for _ in itertools.repeat(None):
            with suppress(asyncio.CancelledError):
                await asyncio.get_running_loop().create_future()

    before = time.monotonic()
    with pytest.raises(WaitTimeout, match=r"0\.2 real seconds"):
        run_fast(main(), limit_s=0.1)
    assert time.monotonic() - before < LONG_S
    gc.collect()  # asyncio complains of the task when it is collected, which then is here


def test_leftover_tasks_are_cancelled_and_generators_closed() -> None:
    ended = []
    kept: list[object] = []

    async def forever() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append("task")

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
        finally:
            await asyncio.sleep(HOUR_S)
            ended.append("generator")

    async def main() -> object:
        numbered = numbers()
        kept.extend([asyncio.create_task(forever()), numbered])
        await asyncio.sleep(0)
        return await anext(numbered)

    assert run_fast(main()) == 1
    assert ended == ["task", "generator"]


def test_an_error_comes_out_as_it_is() -> None:
    async def main() -> None:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        run_fast(main())
