"""How a connection is kept: delays and their reset, limits of time, rotation, and what counts as an end."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.support.connections import PROMPT, Keeper, Message, governor, now, run, streaming, subscribe
from thunderagent.model.errors import StreamFailed
from thunderagent.streams.connection.connection import Connection
from thunderagent.streams.connection.ending import NEXT_ATTEMPT, Cause, ConnectionEnd, State
from thunderagent.streams.connection.endpoint import Attempt
from thunderagent.streams.connection.options import StreamOptions
from thunderagent.streams.connection.pump import FLOOR_S, LONGEST_S, ROTATION_RETRY_S, SLOW_S, SPREAD_S
from thunderagent.streams.connection.verdicts import FATAL, PLANNED, REFUSED_S, SPREAD, UNKNOWN_S, Verdict
from thunderagent.streams.cursor import Cursor
from thunderagent.testing.chaos import ChaosServer, Close, Cut, Feed, Refuse, Silence, Unanswered

pytestmark = pytest.mark.slow

DEFAULT = StreamOptions(proxy=False)


class Numbers:
    """An endpoint function that keeps the attempts it was asked for."""

    def __init__(self, server: ChaosServer) -> None:
        self.server = server
        self.attempts: list[Attempt] = []
        self.times: list[float] = []

    def __call__(self, attempt: Attempt) -> str:
        self.attempts.append(attempt)
        self.times.append(now())
        return f"{self.server.url}?stream=s"

    @property
    def numbers(self) -> list[int]:
        return [attempt.number for attempt in self.attempts]

    @property
    def pauses(self) -> list[float]:
        return [after - before for before, after in itertools.pairwise(self.times)]


async def never(*_: Any) -> str:
    await asyncio.get_running_loop().create_future()
    raise AssertionError


@pytest.mark.parametrize(
    ("lives_s", "numbers"), [(29.0, [1, 2, 3, 4, 5]), (31.0, [1, 2, 2, 2, 2])], ids=["29 s live", "31 s live"]
)
def test_delays_start_afresh_when_a_connection_lived_for_long_and_not_by_its_handshake(
    lives_s: float, numbers: list[int]
) -> None:
    async def main() -> None:
        async with ChaosServer(Feed(ending=Close(code=1001, after_s=lives_s))) as server:
            endpoint = Numbers(server)
            async with streaming(endpoint, options=DEFAULT) as stand:
                await stand.keeper.until(State.LIVE, times=5, timeout_s=300)
                assert endpoint.numbers == numbers
                assert stand.feed.has_progressed is (lives_s > 30.0)

    run(main(), fast=True)


@pytest.mark.parametrize(("handled", "numbers"), [(99, [1, 2, 3, 4]), (100, [1, 2, 2, 2])])
def test_delays_start_afresh_when_enough_messages_were_handled(handled: int, numbers: list[int]) -> None:
    async def main() -> None:
        async with ChaosServer(Feed(ending=Close(code=1001, after_messages=handled)), from_start=True) as server:
            endpoint = Numbers(server)
            server.publish_many(4 * handled)
            async with streaming(endpoint, options=DEFAULT) as stand:
                await stand.keeper.until(State.LIVE, times=4, timeout_s=300)
                if handled == 99:  # progress is what is handled, on however many connections
                    assert endpoint.numbers[:2] == numbers[:2]
                else:
                    assert endpoint.numbers == numbers
                await stand.until_handled(3 * handled)
                assert stand.feed.has_progressed

    run(main(), fast=True)


@pytest.mark.parametrize("progresses", [False, True])
def test_progress_between_two_ends_of_a_kind_keeps_a_stream_from_failing(progresses: bool) -> None:
    async def main() -> None:
        lives_s = 31.0 if progresses else 1.0
        feed = Feed(ending=Close(code=1008, after_s=lives_s))
        async with ChaosServer(feed) as server, streaming(server, options=DEFAULT) as stand:
            if progresses:
                await stand.keeper.until(State.LIVE, times=8, timeout_s=1000)
            else:
                assert isinstance(await stand.failure(timeout_s=400), StreamFailed)

    run(main(), fast=True)


@pytest.mark.parametrize(
    ("refusal", "number", "least_s"),
    [(Refuse(status=404), 3, REFUSED_S), (Feed(ending=Close(code=4321)), 10, UNKNOWN_S)],
    ids=["404", "an unknown code"],
)
def test_a_peer_that_refuses_for_minutes_ends_the_stream_and_not_before(
    refusal: Any, number: int, least_s: float
) -> None:
    async def main() -> None:
        async with ChaosServer(refusal) as server, streaming(server, options=DEFAULT, on_open=None) as stand:
            start = now()
            error = await stand.failure(timeout_s=least_s + 200)
            assert isinstance(error, StreamFailed)
            assert least_s <= now() - start <= least_s + 65.0
            assert len(server.attempts) > number
            assert f", refused {len(server.attempts)} times in " in str(error)

    run(main(), fast=True)


def test_an_end_that_is_no_refusal_begins_the_count_anew() -> None:
    """A peer that is being replaced refuses, is away for an hour, and refuses once more before it is back."""

    async def main() -> None:
        verdicts = {404: Verdict(fatal_after=3, fatal_after_s=0.0), 500: Verdict()}
        options = replace(PROMPT, classify=lambda end: verdicts[end.status or 0])
        script = [Refuse(status=status) for status in (404, 404, 500, 404, 404)]
        async with ChaosServer(*script, Feed()) as server, streaming(server, options=options) as stand:
            await stand.keeper.until(State.LIVE)
            assert len(server.attempts) == 6

    run(main(), fast=True)


def test_each_handled_message_is_progress_for_a_peer_that_refuses() -> None:
    async def main() -> None:
        options = replace(DEFAULT, classify=lambda end: Verdict(fatal_after=2, fatal_after_s=0.0))
        feed = Feed(ending=Close(code=4000, after_messages=1))
        async with ChaosServer(feed, from_start=True) as server, streaming(server, options=options) as stand:
            server.publish_many(5)
            await stand.until_handled(5, timeout_s=300)
            await stand.keeper.until(State.LIVE, times=6, timeout_s=300)

    run(main(), fast=True)


def test_a_wait_for_retry_after_says_so() -> None:
    async def main() -> None:
        async with (
            ChaosServer(Refuse(status=503, retry_after=200), Refuse(status=503), Feed()) as server,
            streaming(server, options=DEFAULT) as stand,
        ):
            await stand.keeper.until(State.LIVE, timeout_s=600)
            first, second = stand.keeper.reasons(State.BACKOFF)
            assert f", Retry-After 200 s{NEXT_ATTEMPT}" in first
            assert "Retry-After" not in second
            assert float(second.partition(NEXT_ATTEMPT)[2].removesuffix(" s")) == pytest.approx(
                stand.feed.wait_s, abs=0.06
            )

    run(main(), fast=True)


@pytest.mark.parametrize(
    ("end", "least_s", "most_s"),
    [
        (Feed(ending=Close(code=1012)), SPREAD_S[0], SPREAD_S[1]),
        (Feed(ending=Close(code=1013)), SLOW_S, SLOW_S * 1.5),
        (Refuse(status=503), SLOW_S, SLOW_S * 1.5),
        (Refuse(status=503, retry_after=200), 200.0, 300.0),
        (Refuse(status=503, retry_after=3), SLOW_S, SLOW_S * 1.5),
        (Refuse(status=503, retry_after=10**9), LONGEST_S, LONGEST_S * 1.5),
        (Refuse(status=503, retry_after="inf"), SLOW_S, SLOW_S * 1.5),
        (Feed(ending=Close(code=1000)), FLOOR_S, 0.5),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_the_pace_of_a_verdict(end: Any, least_s: float, most_s: float, seed: int) -> None:
    async def main() -> None:
        async with ChaosServer(end, Feed()) as server:
            endpoint = Numbers(server)
            async with streaming(endpoint, options=DEFAULT, chance=governor(seed)) as stand:
                await stand.keeper.until(State.RESOLVING, times=2, timeout_s=2 * LONGEST_S)
                await server.wait_for(lambda: len(server.attempts) == 2)
                assert least_s - 0.1 <= endpoint.pauses[0] <= most_s + 0.2

    run(main(), fast=True)


def test_the_first_retry_after_a_live_connection_is_spread_over_the_fleet() -> None:
    async def main() -> None:
        pauses: list[float] = []
        for seed in range(30):
            async with ChaosServer(Feed(ending=Cut())) as server:
                endpoint = Numbers(server)
                chance = governor(seed, spread_s=1.0, fleet=lambda: 20)
                async with streaming(endpoint, options=DEFAULT, chance=chance, on_open=None) as stand:
                    await stand.keeper.until(State.RESOLVING, times=2, timeout_s=30)
                    await stand.keeper.until(State.LIVE, times=2, timeout_s=30)
                    pauses.append(endpoint.pauses[0])
        assert max(pauses) > 15.0
        assert len({int(pause) for pause in pauses}) > 10

    run(main(), fast=True, quiet_s=0.002)


def test_a_user_decides_about_an_end_before_the_profile_does() -> None:
    ends: list[ConnectionEnd] = []

    def classify(end: ConnectionEnd) -> Verdict | None:
        ends.append(end)
        return {4001: SPREAD, 4002: PLANNED, 4003: FATAL}.get(end.code or 0)

    async def main() -> None:
        script = [Feed(ending=Close(code=code, reason="why")) for code in (4002, 4001, 1000, 4003)]
        async with ChaosServer(*script) as server:
            endpoint = Numbers(server)
            options = replace(DEFAULT, classify=classify)
            async with streaming(endpoint, options=options, on_open=None) as stand:
                assert str(await stand.failure(60)) == "closed 4003: why"
                assert endpoint.pauses[0] < FLOOR_S
                assert endpoint.pauses[1] >= SPREAD_S[0]
        assert [(end.code, end.state) for end in ends] == [(code, State.LIVE) for code in (4002, 4001, 1000, 4003)]

    run(main(), fast=True)


def test_a_planned_end_is_no_reason_for_a_hot_loop() -> None:
    """A peer that always says that it moves, or a handler that always asks, meets the backoff too."""

    async def main() -> None:
        async with ChaosServer(Feed(ending=Close(code=1000))) as server:
            endpoint = Numbers(server)
            options = replace(DEFAULT, classify=lambda end: PLANNED)
            async with streaming(endpoint, options=options, on_open=None):
                await asyncio.sleep(60)
                assert 3 <= len(endpoint.times) <= 14
                assert min(endpoint.pauses[1:]) >= FLOOR_S

    run(main(), fast=True)


@pytest.mark.parametrize(
    ("where", "kind"),
    [
        ("endpoint", "endpoint (TimeoutError: the endpoint function took"),
        ("on_open", "subscribe (TimeoutError: on_open took"),
    ],
)
def test_what_user_code_may_take_is_limited(where: str, kind: str) -> None:
    async def main() -> None:
        async with ChaosServer() as server:
            options = replace(PROMPT, open_timeout_s=3.0, subscribe_timeout_s=3.0)
            arguments: dict[str, Any] = {"on_open": never} if where == "on_open" else {}
            source: Any = never if where == "endpoint" else server
            async with streaming(source, options=options, **arguments) as stand:
                await stand.keeper.until(State.RESOLVING)
                start = now()
                await stand.keeper.until(State.BACKOFF)
                assert 2.9 <= now() - start <= 3.1
                assert stand.keeper.reasons(State.BACKOFF)[0].startswith(kind)
                await server.wait_for(lambda: not server.open)

    run(main(), fast=True)


@pytest.mark.parametrize("words", [True, False], ids=["with words", "without a word"])
def test_a_subscription_that_is_not_acknowledged_ends_the_attempt(words: bool) -> None:
    """A peer that says nothing at all may have an outage: that is no refusal."""
    refusal = Feed(acknowledgement={"error": "unknown symbol"} if words else None)

    async def main() -> None:
        async with ChaosServer(refusal, Feed(), from_start=True) as server:
            server.publish_many(1)
            async with streaming(server, options=DEFAULT) as stand:
                start = now()
                await stand.until_handled(1, timeout_s=20)
                assert 10.0 <= now() - start <= 11.0
                assert server.most_open == {"s": 1}
                [reason] = stand.keeper.reasons(State.BACKOFF)
                begin = (
                    f"{'subscribe' if words else 'network'} (TimeoutError: on_open took longer than 10 s; instead of "
                )
                assert reason.startswith(f"{begin}op='subscribed' came {'{' if words else 'nothing'}")

    run(main(), fast=True)


def test_a_handshake_is_limited_in_time() -> None:
    async def main() -> None:
        async with ChaosServer(Unanswered(), Feed()) as server, streaming(server, options=DEFAULT) as stand:
            await stand.keeper.until(State.LIVE, timeout_s=12)
            assert stand.keeper.reasons(State.BACKOFF)[0].startswith("network (TimeoutError")

    run(main(), fast=True)


# What on_open may do


def test_messages_that_come_before_the_acknowledgement_go_to_the_handler() -> None:
    async def main() -> None:
        async with ChaosServer(auto_subscribe=True, from_start=True) as server:
            server.publish_many(5)

            async def on_open(connection: Connection, cursor: Cursor | None) -> None:
                await connection.expect(seq=4)
                await connection.expect(seq=5)

            async with streaming(server, on_open=on_open) as stand:
                await stand.keeper.until(State.LIVE)
                server.publish_many(1)
                await stand.until_handled(4)
                assert stand.seqs == [1, 2, 3, 6]
                assert stand.feed.duplicates == 0

    run(main(), fast=True)


def test_too_many_messages_before_the_acknowledgement_end_the_attempt() -> None:
    async def main() -> None:
        async with ChaosServer(auto_subscribe=True, from_start=True) as server:
            server.publish_many(10)

            async def on_open(connection: Connection, cursor: Cursor | None) -> None:
                await connection.expect(op="subscribed")

            async with streaming(server, options=replace(PROMPT, max_pending=4), on_open=on_open) as stand:
                await stand.keeper.until(State.BACKOFF)
                [reason] = stand.keeper.reasons(State.BACKOFF)
                assert reason.startswith("subscribe (LookupError: 4 messages came, and none with op='subscribed'; ")
                assert "and 1 more" in reason and '"seq": 1' in reason
                assert not stand.consumer.done()

    run(main(), fast=True)


# Rotation

ROTATING = replace(PROMPT, max_connection_age_s=100.0)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_connection_is_replaced_at_its_age_less_a_tenth_at_most(overlap: bool) -> None:
    async def main() -> None:
        async with ChaosServer() as server:
            endpoint = Numbers(server)
            async with streaming(endpoint, options=ROTATING, overlap=overlap) as stand:
                await stand.keeper.until(State.LIVE, times=6, timeout_s=1000)
                assert all(90.0 - 0.1 <= pause <= 100.2 for pause in endpoint.pauses)
                assert len({round(pause) for pause in endpoint.pauses}) > 2, "there is no jitter"
                assert server.close_codes == [1000] * 5, "the old ones were not closed politely"
                assert stand.feed.connects == 6
                if overlap:
                    assert stand.keeper.states[4:] == [State.LIVE] * 5
                    assert stand.keeper.reasons(State.LIVE)[1].startswith("replaced the connection")

    run(main(), fast=True)


def rotation(
    script: list[Any], during: Callable[[ChaosServer, Keeper], Any], *, options: StreamOptions = ROTATING
) -> Callable[[], Any]:
    """A stream that rotates with overlap, and what happens while the replacement is set up."""

    async def main() -> None:
        async with ChaosServer(*script, from_start=True) as server:
            server.publish_many(3)
            async with streaming(server, options=options, overlap=True) as stand:
                await stand.until_handled(3)
                await server.wait_for(lambda: len(server.attempts) == 2, timeout_s=110)
                await during(server, stand.keeper)
                server.publish_many(3)
                await stand.until_handled(6, timeout_s=60)
                assert stand.seqs == [1, 2, 3, 4, 5, 6]
                assert not stand.keeper.gaps

    return main


@pytest.mark.parametrize("ending", [Cut(), Close(code=1001), Silence()])
def test_an_old_connection_that_ends_during_its_replacement_loses_nothing(ending: Any) -> None:
    async def during(server: ChaosServer, keeper: Keeper) -> None:
        server.drop_all(ending)  # the new one is still in its handshake, and is reset unless it is a silence

    run(rotation([Feed(), Feed(handshake_s=1.0), Feed()], during)(), fast=True)


def test_a_replacement_that_fails_leaves_the_old_connection_and_is_tried_again() -> None:
    async def during(server: ChaosServer, keeper: Keeper) -> None:
        start = now()
        await keeper.until(State.LIVE, times=2, timeout_s=40)
        assert ROTATION_RETRY_S - 0.1 <= now() - start <= ROTATION_RETRY_S + 0.2
        assert State.BACKOFF not in keeper.states

    run(rotation([Feed(), Refuse(status=503), Feed()], during)(), fast=True)


def test_credentials_that_ran_out_are_fetched_anew_for_a_replacement() -> None:
    async def main() -> None:
        async with ChaosServer(Feed(), Refuse(status=401), Feed()) as server:
            endpoint = Numbers(server)
            async with streaming(endpoint, options=ROTATING, overlap=True) as stand:
                await stand.keeper.until(State.LIVE, times=2, timeout_s=200)
                await stand.keeper.until(State.LIVE, times=3, timeout_s=200)
                assert [attempt.auth_failed for attempt in endpoint.attempts] == [False, False, True, False]
                assert str(endpoint.attempts[2].last_end).startswith("http 401")

    run(main(), fast=True)


@pytest.mark.parametrize("state", ["resolving", "handshake", "subscribing", "switching"])
def test_a_rotation_can_be_ended_at_each_of_its_steps(state: str) -> None:
    second: Any = {
        "handshake": Unanswered(),
        "subscribing": Feed(acknowledgement=None),
    }.get(state, Feed())

    async def main() -> None:
        async with ChaosServer(Feed(ending=Silence(after_s=50.0)), second) as server:
            numbers = itertools.count()
            reached = asyncio.Event()

            async def endpoint(attempt: Attempt) -> str:
                if next(numbers) == 1:
                    reached.set()
                    if state == "resolving":
                        await never()
                return f"{server.url}?stream=s"

            options = replace(ROTATING, ping_interval_s=None, close_timeout_s=2.0)
            async with streaming(endpoint, options=options, overlap=True) as stand:
                async with asyncio.timeout(110):
                    await reached.wait()
                if state == "handshake":
                    await server.wait_for(lambda: len(server.attempts) == 2)
                elif state in ("subscribing", "switching"):
                    await server.wait_for(lambda: len(server.subscriptions) == 2)
                    await asyncio.sleep(1.0 if state == "switching" else 0.0)
                start = now()
                await stand.feed.finish()
                assert now() - start <= 2.5
                await asyncio.wait((stand.consumer,))
                assert stand.feed.state is State.CLOSED
            await server.wait_for(lambda: not server.open)

    run(main(), fast=True)


def test_a_rotation_waits_for_what_the_old_connection_has_brought() -> None:
    """A peer that does not go back sends on the new connection only what comes after its subscription."""

    async def slow(_: Message) -> None:
        await asyncio.sleep(0.3)

    async def from_now_on(connection: Connection, cursor: Cursor | None) -> None:
        await subscribe(connection, None)

    async def main() -> None:
        async with ChaosServer(Feed(), Feed(handshake_s=1.0)) as server:
            options = replace(ROTATING, max_pending=4, close_timeout_s=10.0)
            async with streaming(server, options=options, overlap=True, handle=slow, on_open=from_now_on) as stand:
                await stand.keeper.until(State.LIVE)
                await server.wait_for(lambda: len(server.attempts) == 2, timeout_s=110)
                server.publish_many(20)
                await server.wait_for(lambda: len(server.subscriptions) == 2)
                assert len(stand.seqs) < 10
                server.publish_many(5)
                await stand.until_handled(25, timeout_s=30)
                assert stand.seqs == list(range(1, 26))
                assert stand.feed.connects == 2

    run(main(), fast=True)


def test_a_buffer_that_overflows_during_a_rotation_fails_the_stream_all_the_same() -> None:
    async def stuck(_: Message) -> None:
        await release.wait()

    release: asyncio.Event

    async def main() -> None:
        nonlocal release
        release = asyncio.Event()
        async with ChaosServer(Feed(), Feed(handshake_s=5.0)) as server:
            options = replace(ROTATING, max_pending=4, on_full="fail")
            async with streaming(server, options=options, overlap=True, handle=stuck) as stand:
                await stand.keeper.until(State.LIVE)
                await server.wait_for(lambda: len(server.attempts) == 2, timeout_s=110)
                server.publish_many(20)
                await stand.keeper.until(State.FAILED, timeout_s=10)
                release.set()
                assert "on_full is 'fail'" in str(await stand.failure())
            await server.wait_for(lambda: not server.open)

    run(main(), fast=True)


# Ends that are ours


def test_a_reader_that_dies_is_an_end_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = [True]
    whole = Connection.read

    async def read(self: Connection, *arguments: Any) -> ConnectionEnd:
        if broken and broken.pop():
            raise RuntimeError("a bug of ours")
        return await whole(self, *arguments)

    monkeypatch.setattr(Connection, "read", read)

    async def main() -> None:
        async with ChaosServer(from_start=True) as server, streaming(server) as stand:
            server.publish_many(1)
            await stand.until_handled(1)
            assert stand.keeper.reasons(State.BACKOFF)[0].startswith("internal (RuntimeError: a bug of ours)")

    run(main(), fast=True)


def test_a_reader_that_fails_while_the_stream_is_ended_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        fails = asyncio.Event()

        async def read(self: Connection, *arguments: Any) -> ConnectionEnd:
            await fails.wait()
            raise StreamFailed("too late to matter")

        monkeypatch.setattr(Connection, "read", read)
        async with ChaosServer() as server, streaming(server) as stand:
            await stand.keeper.until(State.LIVE)
            await asyncio.sleep(0.01)
            fails.set()
            await stand.feed.finish()
            await stand.consumer
            assert stand.feed.state is State.CLOSED

    run(main(), fast=True)


def test_a_stream_goes_on_by_a_real_clock_as_well() -> None:
    async def main() -> None:
        rng = random.Random(4)
        async with ChaosServer(from_start=True) as server, streaming(server) as stand:
            for number in range(1, 6):
                server.publish_many(10)
                await stand.until_handled(10 * number)
                server.drop_all(rng.choice([Cut(), Cut(reset=False), Close(code=1001)]))
            assert stand.seqs == list(range(1, 51))
            assert stand.feed.handled >= 49

    run(main())


def test_a_feed_that_may_overlap_needs_no_more_than_one_message_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replacement subscribes behind what was read, so that what both bring is handed out once."""

    async def main() -> None:
        async with ChaosServer(Feed(spacing_s=0.01), from_start=True) as server:
            options = replace(PROMPT, max_connection_age_s=2.0, ping_interval_s=None)
            async with streaming(server, options=options, overlap=True) as stand:
                server.publish_many(1000)
                await stand.until_handled(1000, timeout_s=60)
                assert stand.seqs == list(range(1, 1001))
                assert stand.feed.connects >= 5
                assert server.most_open == {"s": 2}
                assert server.subscriptions[0].since is None

    run(main(), fast=True, quiet_s=0.002)


def test_causes_of_our_own_are_told_by_name() -> None:
    async def main() -> None:
        async with ChaosServer() as server, streaming(server, on_open=subscribe) as stand:
            await stand.keeper.until(State.LIVE)
            stand.feed.reconnect("the peer moves")
            await stand.keeper.until(State.LIVE, times=2)
            assert stand.keeper.reasons(State.BACKOFF) == [f"{Cause.ASKED} (the peer moves); next attempt in 0.0 s"]

    run(main(), fast=True)
