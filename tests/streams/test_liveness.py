"""How a dead peer is told from a slow handler and from a loop that was blocked."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosedError

from tests.support.connections import now, run
from thunderagent.streams.connection.ending import Cause
from thunderagent.streams.connection.liveness import Liveness
from thunderagent.streams.connection.options import StreamOptions


class Peer:
    """Answers pings after some seconds, or never.

    Args:
        answer_s: seconds until the answer; None: never.
        error: what sending a ping raises.
        settles: an answer counts for all pings before it, as in the protocol; a request of an application answers one.
        lost: says of the number of a ping whether its answer gets lost.
    """

    def __init__(
        self,
        answer_s: float | None = None,
        error: Exception | None = None,
        *,
        settles: bool = True,
        lost: Callable[[int], bool] = lambda number: False,
    ) -> None:
        self.answer_s = answer_s
        self.error = error
        self.settles = settles
        self.lost = lost
        self.is_stuck = False
        self.pinged: list[float] = []
        self._open: list[asyncio.Future[float]] = []

    async def ping(self) -> Awaitable[float]:
        if self.is_stuck:
            await asyncio.get_running_loop().create_future()
        if self.error is not None:
            raise self.error
        self.pinged.append(now())
        pong: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._open.append(pong)
        if self.answer_s is not None and not self.lost(len(self.pinged)):
            asyncio.get_running_loop().call_later(self.answer_s, self.answer, pong)
        return pong

    def answer(self, pong: asyncio.Future[float]) -> None:
        while pong in self._open:
            one = self._open.pop(0)
            if not one.done() and (self.settles or one is pong):
                one.set_result(0.0)


class Watch:
    """A liveness with what it did."""

    def __init__(self, peer: Peer, **options: Any) -> None:
        self.start = now()
        self.cuts: list[tuple[Cause, float]] = []
        self.liveness = Liveness(peer, StreamOptions(**options), self._cut)

    def _cut(self, cause: Cause, detail: str) -> None:
        assert detail
        self.cuts.append((cause, now() - self.start))

    def message(self) -> None:
        """A message comes and is taken at once."""
        self.liveness.heard()
        self.liveness.listening()


@asynccontextmanager
async def watching(peer: Peer, *, listening: bool = True, **options: Any) -> AsyncIterator[Watch]:
    watch = Watch(peer, **options)
    watch.liveness.start()
    if listening:
        watch.liveness.listening()
    yield watch
    watch.liveness.stop()


@pytest.mark.parametrize("interval_s", [0.3, 1.0, 7.0, 15.0])
@pytest.mark.parametrize(("misses", "at"), [(1, 1.5), (2, 2.0), (4, 3.0)])
def test_halves_of_an_interval_pass_before_a_peer_is_given_up(interval_s: float, misses: int, at: float) -> None:
    async def main() -> None:
        peer = Peer()
        async with watching(peer, ping_interval_s=interval_s, pong_misses=misses) as watch:
            await asyncio.sleep(interval_s * 10)
            [(cause, moment)] = watch.cuts
            assert cause is Cause.ZOMBIE
            assert interval_s * at - 0.01 <= moment <= interval_s * at + 0.05
            assert len(peer.pinged) == misses

    run(main(), fast=True)


@pytest.mark.slow
@pytest.mark.parametrize("answer_s", [0.0, 1.0, 7.4])
def test_a_peer_that_answers_is_pinged_each_interval_and_kept(answer_s: float) -> None:
    async def main() -> None:
        peer = Peer(answer_s)
        async with watching(peer, ping_interval_s=15.0) as watch:
            await asyncio.sleep(600)
            assert not watch.cuts
            assert 35 <= len(peer.pinged) <= 40

    run(main(), fast=True)


@pytest.mark.slow
def test_a_pong_that_comes_late_tells_that_the_peer_is_there() -> None:
    async def main() -> None:
        async with watching(Peer(9.0), ping_interval_s=15.0) as watch:
            await asyncio.sleep(600)
            assert not watch.cuts

    run(main(), fast=True)


@pytest.mark.parametrize("settles", [True, False])
@pytest.mark.parametrize("misses", [2, 3])
def test_answers_that_are_lost_far_apart_are_no_misses_in_a_row(misses: int, settles: bool) -> None:
    async def main() -> None:
        peer = Peer(0.1, settles=settles, lost=lambda number: number % 50 == 3)
        async with watching(peer, ping_interval_s=30.0, pong_misses=misses, only_pongs_count=True) as watch:
            await asyncio.sleep(7 * 3600.0)
            assert not watch.cuts
            assert len(peer.pinged) > 800  # it still asks
            assert not watch.liveness._asking

    run(main(), fast=True, quiet_s=0.0)


def test_a_connection_is_cut_when_the_misses_are_in_a_row_and_not_before() -> None:
    rng = random.Random(5)
    lost = [rng.random() < 0.1 for _ in range(600)]
    due = next(number for number in range(1, 600) if lost[number - 1] and lost[number])

    async def main() -> None:
        peer = Peer(0.1, settles=False, lost=lambda number: lost[number - 1])
        async with watching(peer, ping_interval_s=30.0, only_pongs_count=True) as watch:
            await asyncio.sleep(600 * 30.0)
            assert [cause for cause, _ in watch.cuts] == [Cause.ZOMBIE]
            assert len(peer.pinged) == due + 1
            assert sum(lost[:due]) > 2, "the seed tries nothing"

    run(main(), fast=True, quiet_s=0.0)


@pytest.mark.slow
def test_time_in_which_the_handler_is_slow_does_not_count() -> None:
    async def main() -> None:
        async with watching(Peer(), listening=False, ping_interval_s=1.0, idle_timeout_s=3.0) as watch:
            await asyncio.sleep(100)
            assert not watch.cuts
            for _ in range(10):  # a little listening in between adds up, but each message starts it afresh
                watch.liveness.listening()
                await asyncio.sleep(0.4)
                watch.liveness.heard()
                await asyncio.sleep(5)
            assert not watch.cuts
            watch.liveness.listening()
            start = now()
            await asyncio.sleep(10)
            assert watch.cuts[0][0] is Cause.ZOMBIE
            assert watch.cuts[0][1] + watch.start - start <= 1.5

    run(main(), fast=True)


@pytest.mark.slow
def test_data_counts_as_a_pong() -> None:
    async def main() -> None:
        peer = Peer()
        async with watching(peer, ping_interval_s=4.0) as watch:
            for _ in range(200):
                await asyncio.sleep(1.9)
                watch.message()
            assert not watch.cuts
            await asyncio.sleep(10)
            assert [cause for cause, _ in watch.cuts] == [Cause.ZOMBIE]

    run(main(), fast=True, quiet_s=0.002)


@pytest.mark.slow
@pytest.mark.parametrize("spacing_s", [0.05, 0.7, 3.0])
def test_data_does_not_count_where_only_pongs_do(spacing_s: float) -> None:
    async def main() -> None:
        async with watching(Peer(), ping_interval_s=10.0, only_pongs_count=True) as watch:
            while not watch.cuts:
                await asyncio.sleep(spacing_s)
                watch.message()
            [(cause, at)] = watch.cuts
            assert cause is Cause.ZOMBIE
            assert 20.0 <= at <= 20.0 + 2.5

    run(main(), fast=True)


@pytest.mark.slow
def test_time_in_which_the_handler_is_slow_does_not_count_either_where_only_pongs_do() -> None:
    async def main() -> None:
        async with watching(Peer(), ping_interval_s=10.0, only_pongs_count=True) as watch:
            watch.liveness.heard()  # and its handler takes ten minutes
            await asyncio.sleep(600.0)
            assert watch.cuts == []
            watch.liveness.listening()
            await asyncio.sleep(25.0)
            assert len(watch.cuts) == 1

    run(main(), fast=True)


@pytest.mark.slow
def test_a_peer_that_never_answers_but_sends_is_not_pinged_for_ever() -> None:
    async def main() -> None:
        peer = Peer()
        async with watching(peer, ping_interval_s=4.0, pong_misses=3) as watch:
            for _ in range(200):
                await asyncio.sleep(3.3)  # over half an interval: a miss each time
                watch.message()
            assert not watch.cuts
            assert len(peer.pinged) <= 3
            assert len(watch.liveness._asking) <= 3

    run(main(), fast=True, quiet_s=0.002)


def test_a_ping_that_cannot_be_sent_is_not_answered_either() -> None:
    async def main() -> None:
        peer = Peer(0.0)
        peer.is_stuck = True
        async with watching(peer, ping_interval_s=1.0) as watch:
            await asyncio.sleep(5)
            assert [cause for cause, _ in watch.cuts] == [Cause.ZOMBIE]

    run(main(), fast=True)


@pytest.mark.parametrize("error", [ConnectionClosedError(None, None), RuntimeError("closing"), OSError("gone")])
def test_an_error_of_a_ping_is_no_answer(error: Exception) -> None:
    async def main() -> None:
        async with watching(Peer(error=error), ping_interval_s=1.0) as watch:
            await asyncio.sleep(5)
            assert [cause for cause, _ in watch.cuts] == [Cause.ZOMBIE]

    run(main(), fast=True)


@pytest.mark.parametrize("ping_interval_s", [None, 1.0, 100.0])
def test_silence_is_limited_from_the_beginning(ping_interval_s: float | None) -> None:
    async def main() -> None:
        async with watching(Peer(0.0), ping_interval_s=ping_interval_s, idle_timeout_s=10.0) as watch:
            await asyncio.sleep(9.9)
            assert not watch.cuts
            await asyncio.sleep(2.6)
            [(cause, _)] = watch.cuts
            assert cause is Cause.IDLE

    run(main(), fast=True)


@pytest.mark.slow
def test_pings_end_no_silence_but_messages_do() -> None:
    async def main() -> None:
        async with watching(Peer(0.0), ping_interval_s=5.0, idle_timeout_s=10.0) as watch:
            for _ in range(20):
                await asyncio.sleep(9.0)
                watch.message()
            assert not watch.cuts
            await asyncio.sleep(11.0)
            assert [cause for cause, _ in watch.cuts] == [Cause.IDLE]

    run(main(), fast=True)


@pytest.mark.slow
def test_a_timer_that_comes_late_counts_as_one_tick() -> None:
    async def main() -> None:
        async with watching(Peer(0.0), ping_interval_s=None, idle_timeout_s=0.4) as watch:
            time.sleep(0.5)  # noqa: ASYNC251  # what is to be survived
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not watch.cuts
            watch.message()

    run(main())


def test_without_pings_and_limit_nothing_is_watched() -> None:
    async def main() -> None:
        async with watching(Peer(), ping_interval_s=None) as watch:
            assert watch.liveness._timer is None
            await asyncio.sleep(1e6)
            assert not watch.cuts

    run(main(), fast=True)


def test_who_gave_a_peer_up_watches_no_more() -> None:
    async def main() -> None:
        peer = Peer()
        async with watching(peer, ping_interval_s=1.0, idle_timeout_s=2.0) as watch:
            await asyncio.sleep(100)
            assert len(watch.cuts) == 1
            assert len(peer.pinged) <= 2

    run(main(), fast=True)
