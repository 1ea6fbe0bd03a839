"""The governor: how attempts to connect begin one after the other."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import time

import pytest

from tests.support.connections import now, run
from thunderagent.streams.connection.governor import Governor

PEER = "ws://peer.test/feed"


def test_attempts_to_one_peer_under_way_at_one_moment_are_limited() -> None:
    async def main() -> None:
        governor = Governor(concurrency=3, rate=1e6)
        most = held = 0

        async def attempt(number: int) -> None:
            nonlocal most, held
            async with governor.turn(f"{PEER}?stream={number}"):
                held += 1
                most = max(most, held)
                await asyncio.sleep(1.0)
                held -= 1

        await asyncio.gather(*(attempt(number) for number in range(10)))
        assert most == 3

    run(main(), fast=True)


def test_a_peer_that_does_not_answer_holds_up_no_other() -> None:
    async def main() -> None:
        governor = Governor(concurrency=2, rate=1e6)

        async def hang() -> None:
            async with governor.turn("wss://dead.test:443/feed"):
                await asyncio.sleep(1000)

        hanging = [asyncio.create_task(hang()) for _ in range(20)]
        await asyncio.sleep(0.01)
        async with asyncio.timeout(1), governor.turn(PEER):
            pass
        for task in hanging:
            task.cancel()
        await asyncio.wait(hanging)

    run(main(), fast=True)


def test_attempts_begin_at_the_rate() -> None:
    async def main() -> None:
        governor, begun = Governor(concurrency=50, rate=20.0), []

        async def attempt(number: int) -> None:
            async with governor.turn(f"ws://peer-{number % 5}.test/"):
                begun.append(now())

        start = now()
        await asyncio.gather(*(attempt(number) for number in range(41)))
        # A machine that stands still between a turn and our look at it makes one gap longer and the next one shorter.
        assert all(at >= start + 0.05 * turn - 1e-6 for turn, at in enumerate(begun))
        gaps = sorted(after - before for before, after in itertools.pairwise(begun))
        assert gaps[len(gaps) // 4] <= 0.06, "nobody waits for longer, but where the machine stands still"

    run(main(), fast=True)


def test_a_loop_that_stood_still_does_not_make_up_for_it_at_once() -> None:
    async def main() -> None:
        governor, begun, two = Governor(concurrency=50, rate=100.0), [], asyncio.Event()

        async def attempt() -> None:
            async with governor.turn(PEER):
                begun.append(now())
                if len(begun) == 2:
                    two.set()

        tasks = [asyncio.create_task(attempt()) for _ in range(10)]
        await two.wait()
        time.sleep(0.1)  # noqa: ASYNC251  # what is to be survived
        stood = now()
        await asyncio.gather(*tasks)
        assert all(at >= stood + 0.01 * turn - 1e-6 for turn, at in enumerate(begun[2:]))

    run(main())


@pytest.mark.parametrize("rate", [0.1, 1e6])
def test_who_gives_up_leaves_room_for_the_next(rate: float) -> None:
    async def main() -> None:
        governor = Governor(concurrency=1, rate=rate)
        release = asyncio.Event()

        async def attempt() -> None:
            async with governor.turn(PEER):
                await release.wait()

        first, second, third = (asyncio.create_task(attempt()) for _ in range(3))
        await asyncio.sleep(0.01)
        second.cancel()
        await asyncio.sleep(0.01)
        release.set()
        start = now()
        await asyncio.wait((first, third), timeout=30)
        assert first.done()
        assert third.done()
        assert now() - start <= 10.1
        first, second = asyncio.create_task(attempt()), asyncio.create_task(attempt())
        await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.wait((first, second), timeout=30)
        assert second.done()

    run(main(), fast=True)


def test_peers_are_forgotten() -> None:
    async def main() -> None:
        governor = Governor(rate=1e9)
        for number in range(100):
            async with governor.turn(f"ws://peer-{number}.test/"):
                pass
        gc.collect(1)
        assert not governor._rooms

    run(main())


def test_the_first_retry_is_spread_over_the_fleet() -> None:
    governor = Governor(spread_s=2.0, fleet=lambda: 10, rng=random.Random(1))
    delays = [governor.first_retry() for _ in range(1000)]
    assert 0.0 <= min(delays) < 1.0
    assert 19.0 < max(delays) <= 20.0
    assert Governor(spread_s=0.0).first_retry() == 0.0
