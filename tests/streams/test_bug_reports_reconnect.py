"""Public bug reports about clients that come back too often, not at all or to the wrong place; each as a promise."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection

from tests.support.connections import PROMPT, governor, now, run, streaming
from thunderagent.model.errors import StreamFailed
from thunderagent.streams.connection.ending import State
from thunderagent.streams.connection.endpoint import Attempt
from thunderagent.streams.connection.options import StreamOptions
from thunderagent.streams.connection.pump import FLOOR_S, ROTATION_RETRY_S, SLOW_S
from thunderagent.streams.connection.transport import open_connection
from thunderagent.testing.chaos import (
    Behaviour,
    BrokenTls,
    ChaosServer,
    Close,
    Cut,
    Feed,
    HangUp,
    Redirect,
    Refuse,
    Unanswered,
)

pytestmark = pytest.mark.slow

DEFAULT = StreamOptions(proxy=False)
EARLY = 1e-3
"""What the clock of the server, which notes the accept, may be behind."""


def pauses(server: ChaosServer) -> list[float]:
    """Seconds between the attempts that the server saw."""
    return [after.time - before.time for before, after in itertools.pairwise(server.attempts)]


@pytest.mark.parametrize("refusal", [HangUp(), HangUp(reset=False), Refuse(status=500)])
def test_refused_attempts_obey_the_envelope_of_the_backoff(refusal: Behaviour) -> None:
    """Row 1, https://github.com/alpacahq/alpaca-py/issues/740: reconnects each 10 ms until the peer answered 429."""

    async def main() -> None:
        async with ChaosServer(*[refusal] * 15, Feed()) as server, streaming(server, options=DEFAULT) as stand:
            await stand.keeper.until(State.LIVE, timeout_s=1000)
            assert len(server.attempts) == 16
            for number, pause in enumerate(pauses(server)):
                assert FLOOR_S - EARLY <= pause <= min(60.0, 0.5 * 2**number) + 0.2
            assert max(pauses(server)) > 10.0

    run(main(), fast=True)


def test_an_outage_of_half_an_hour_is_survived() -> None:
    """Row 5, https://github.com/sammchardy/python-binance/issues/1057 and pull 1008: five attempts, then nothing."""

    async def main() -> None:
        async with ChaosServer(from_start=True) as server:
            numbers: list[int] = []

            def endpoint(attempt: Attempt) -> str:
                numbers.append(attempt.number)
                return f"{server.url}?stream=s"

            async with streaming(endpoint, options=DEFAULT) as stand:
                server.publish_many(5)
                await stand.until_handled(5)
                server.stop_listening()
                server.drop_all(Cut())
                await asyncio.sleep(1800)
                server.publish_many(5)
                assert len(numbers) > 30
                server.listen_again()
                await stand.until_handled(10, timeout_s=61)
                assert stand.seqs == list(range(1, 11))
                assert State.FAILED not in stand.keeper.states

    run(main(), fast=True)


@pytest.mark.parametrize("stopped", [HangUp(), Unanswered(), None])
def test_the_next_endpoint_is_tried_when_one_does_not_answer(stopped: Behaviour | None) -> None:
    """Row 14, https://github.com/nats-io/nats.py/issues/320: a TimeoutError was not caught, no next server tried."""

    async def main() -> None:
        async with ChaosServer(stopped or Feed()) as first, ChaosServer() as second:
            if stopped is None:
                first.stop_listening()
            async with streaming([f"{first.url}?stream=s", f"{second.url}?stream=s"]) as stand:
                await stand.keeper.until(State.LIVE, timeout_s=15)
                assert second.open_of("s") == 1

    run(main(), fast=True)


@pytest.mark.parametrize("is_down", [True, False], ids=["down from the start", "down since then"])
def test_a_rotation_tries_the_next_endpoint_when_the_first_is_down(is_down: bool) -> None:
    """Row 14 for the planned replacement."""

    async def main() -> None:
        async with ChaosServer() as first, ChaosServer() as second:
            if is_down:
                first.stop_listening()
            options = replace(PROMPT, max_connection_age_s=600.0)
            urls = [f"{first.url}?stream=s", f"{second.url}?stream=s"]
            async with streaming(urls, options=options, overlap=True) as stand:
                await stand.keeper.until(State.LIVE)
                first.stop_listening()
                await stand.keeper.until(State.LIVE, times=2, timeout_s=600 + 2 * ROTATION_RETRY_S)
                assert stand.keeper.states.count(State.BACKOFF) == is_down
                assert second.most_open == {"s": 2 if is_down else 1}
                await asyncio.sleep(0.1)
                assert first.open == 0

    run(main(), fast=True)


@pytest.mark.parametrize("status", [401, 403, 404, 410, 429, 500, 503])
def test_each_status_of_http_follows_its_policy(status: int) -> None:
    """Row 17, https://github.com/baking-bad/pysignalr/issues/20: a fatal status went round the backoff."""
    fatal = status in (401, 403, 404, 410)

    async def main() -> None:
        refreshed: list[bool] = []
        async with ChaosServer(Refuse(status=status)) as server:

            def endpoint(attempt: Attempt) -> str:
                refreshed.append(attempt.auth_failed)
                return server.url

            async with streaming(endpoint, options=DEFAULT) as stand:
                if fatal:
                    error = await stand.failure(timeout_s=400)
                    assert isinstance(error, StreamFailed)
                    assert f"http {status}, refused {len(refreshed)} times in 3" in str(error)
                    assert stand.keeper.states[-1] is stand.feed.state is State.FAILED
                    assert not refreshed[0] and set(refreshed[1:]) == {status in (401, 403)}
                else:
                    await asyncio.sleep(600)
                    assert not stand.consumer.done()
                    assert 5 <= len(server.attempts) <= 60
                assert min(pauses(server)) >= (SLOW_S if status in (429, 503) else FLOOR_S) - EARLY

    run(main(), fast=True)


def test_the_peers_wish_to_be_left_alone_is_obeyed() -> None:
    """Row 17: Retry-After."""

    async def main() -> None:
        async with (
            ChaosServer(Refuse(status=429, retry_after=120), Feed()) as server,
            streaming(server, options=DEFAULT) as stand,
        ):
            await stand.keeper.until(State.LIVE, timeout_s=200)
            [pause] = pauses(server)
            assert 120.0 - EARLY <= pause <= 180.2

    run(main(), fast=True)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("code", [1000, 1001, 1005, 1006, 1011, 4321])
def test_a_peer_that_accepts_and_closes_is_not_stormed(code: int, seed: int) -> None:
    """Row 18, measured: another client made 2,519 connects in 2 s, as each handshake reset its backoff."""

    async def main() -> None:
        ending = Cut() if code == 1006 else Close(code=None if code == 1005 else code)
        async with ChaosServer(Feed(ending=ending)) as server:
            options = replace(DEFAULT, classify=None)
            chance = governor(seed, spread_s=1.0)
            async with streaming(server, options=options, chance=chance, on_open=None) as stand:
                await stand.keeper.until(State.LIVE)
                start = now()
                await asyncio.sleep(60)
                assert 2 <= len(server.attempts) <= 12, pauses(server)
                assert min(pauses(server)) >= FLOOR_S - EARLY
                if code == 4321:
                    assert isinstance(await stand.failure(timeout_s=1000), StreamFailed)
                    assert 10 <= len(server.attempts) <= 60
                else:
                    assert not stand.consumer.done()
                assert now() >= start

    run(main(), fast=True)


def test_a_peer_that_accepts_and_closes_for_its_policy_is_given_up_after_minutes() -> None:
    """Row 18: 1008 is not retried for ever, and the endpoint function may fetch new credentials in between."""

    async def main() -> None:
        refreshed: list[bool] = []
        async with ChaosServer(Feed(ending=Close(code=1008, reason="token expired"))) as server:

            def endpoint(attempt: Attempt) -> str:
                refreshed.append(attempt.auth_failed)
                return server.url

            async with streaming(endpoint, options=DEFAULT, on_open=None) as stand:
                error = await stand.failure(timeout_s=400)
                assert isinstance(error, StreamFailed)
                assert str(error).startswith(f"closed 1008, refused {len(refreshed)} times in 3")
                assert str(error).endswith(" s: token expired")
                assert len(server.attempts) == len(refreshed) >= 3
                assert not refreshed[0] and all(refreshed[1:])

    run(main(), fast=True)


def test_a_certificate_that_is_not_trusted_is_told_after_minutes() -> None:
    """Row 19, https://github.com/Quantinuum/qnexus/pull/220: retried without a word for ever."""

    async def main() -> None:
        async with ChaosServer(tls="untrusted") as server, streaming(server, options=DEFAULT) as stand:
            error = await stand.failure(timeout_s=400)
            assert isinstance(error, StreamFailed)
            assert str(error).startswith(f"tls_verify, refused {len(server.attempts)} times in 3")
            assert " s: SSLCertVerificationError" in str(error)

    run(main(), fast=True)


def test_a_reset_while_tls_is_set_up_is_retried() -> None:
    """Row 19: only the certificate is final."""

    async def main() -> None:
        async with ChaosServer(*[BrokenTls()] * 12, Feed(), tls="good", from_start=True) as server:
            server.publish_many(1)
            async with streaming(server) as stand:
                await stand.until_handled(1, timeout_s=60)
                assert len(server.attempts) == 13

    run(main(), fast=True)


def test_a_redirect_to_a_dead_host_is_forgotten_by_the_next_attempt() -> None:
    """Row 21, measured: after one redirect all later attempts of another client went to the new host."""

    async def main() -> None:
        async with ChaosServer() as dead:
            dead.stop_listening()
            async with ChaosServer(Redirect(to=dead.url), Feed()) as server, streaming(server) as stand:
                await stand.keeper.until(State.LIVE)
                assert len(server.attempts) == 2

    run(main(), fast=True)


def test_a_redirect_that_was_followed_does_not_stick() -> None:
    """Row 21: when the other host drops us, the configured one is asked again."""

    async def main() -> None:
        async with (
            ChaosServer() as other,
            ChaosServer(Redirect(to=f"{other.url}?stream=s"), Feed()) as server,
            streaming(server) as stand,
        ):
            await stand.keeper.until(State.LIVE)
            assert other.open_of("s") == 1
            other.drop_all(Close(code=1012))
            await stand.keeper.until(State.LIVE, times=2, timeout_s=40)
            assert server.open_of("s") == 1
            assert len(other.attempts) == 1

    run(main(), fast=True)


def test_five_hundred_streams_come_back_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 22, https://github.com/phoenixframework/phoenix/issues/4045,
    https://github.com/mattermost/mattermost-webapp/pull/10960 and https://github.com/elastic/elastic-agent/pull/13874:
    a herd after each restart.
    """
    streams, rate = 500, 40.0
    begun: list[float] = []

    def opening(*arguments: Any) -> Coroutine[Any, Any, ClientConnection]:
        begun.append(now())
        return open_connection(*arguments)

    monkeypatch.setattr("thunderagent.streams.connection.pump.open_connection", opening)

    async def main() -> None:
        chance = governor(rate=1e6, concurrency=16, spread_s=1.0)
        async with ChaosServer() as server, AsyncExitStack() as stack:
            stands = [
                await stack.enter_async_context(
                    streaming(
                        f"{server.url}?stream={number}", chance=chance, options=replace(DEFAULT, ping_interval_s=None)
                    )
                )
                for number in range(streams)
            ]
            for stand in stands:
                await stand.keeper.until(State.LIVE, timeout_s=30)
            begun.clear()
            chance._interval_s = 1.0 / rate
            start = now()
            server.drop_all(Cut())
            for stand in stands:
                await stand.keeper.until(State.LIVE, times=2, timeout_s=30)
            assert len(begun) == streams
            assert len(server.attempts) == 2 * streams
            buckets = Counter(int((moment - start) / 0.1) for moment in begun)
            assert max(buckets.values()) <= rate * 0.1 + 1
            window = range(int(streams / rate / 0.1))
            assert sum(bucket in buckets for bucket in window) >= 0.8 * len(window)
            assert set(server.most_open.values()) == {1}

    run(main(), fast=True, quiet_s=0.002, limit_s=60)


def test_sockets_are_given_back_at_each_reconnect() -> None:
    """Row 30, https://github.com/slackapi/node-slack-sdk/issues/2709: sockets leaked up to the cap of the server."""

    async def main() -> None:
        async with ChaosServer(most_per_key=2) as server, streaming(server) as stand:
            for number in range(1, 101):
                await stand.keeper.until(State.LIVE, times=number)
                stand.feed.reconnect()
            await stand.keeper.until(State.LIVE, times=101)
            assert all(attempt.accepted for attempt in server.attempts)
            assert len(server.attempts) == 101
            assert server.open == 1

    run(main(), fast=True)


def test_a_message_over_our_limit_ends_the_stream_after_minutes() -> None:
    """Row 32, https://github.com/cube-js/cube/pull/10246: 1009 was retried for ever."""

    async def main() -> None:
        async with ChaosServer(Feed(big_bytes=5000), from_start=True) as server:
            server.publish_many(1)
            async with streaming(server, options=replace(DEFAULT, max_size=1024)) as stand:
                error = await stand.failure(timeout_s=400)
                assert isinstance(error, StreamFailed)
                assert str(error).startswith(f"message_too_big 1009, refused {len(server.attempts)} times in 3")
                assert str(error).endswith("; max_size is 1024 bytes")
                assert "5000" in str(error) or "500" in str(error)
                assert min(pauses(server)) >= FLOOR_S - EARLY
                assert set(server.close_codes) == {1009}

    run(main(), fast=True)


def test_a_peer_that_finds_our_message_too_big_ends_the_stream_after_minutes() -> None:
    """Row 32, the other way round."""

    async def main() -> None:
        async with (
            ChaosServer(Feed(ending=Close(code=1009))) as server,
            streaming(server, options=DEFAULT, on_open=None) as stand,
        ):
            assert str(await stand.failure(timeout_s=400)).startswith("closed 1009, refused ")

    run(main(), fast=True)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_two_hours_of_api_gateway_are_survived_without_loss_or_duplicate(overlap: bool) -> None:
    """Row 33, https://github.com/robtaussig/react-use-websocket/issues/92: cut off by the limit on the age."""

    async def main() -> None:
        limited = Feed(ending=Close(code=1001, reason="Going away", after_s=7200.0))
        async with ChaosServer(limited, from_start=True) as server:
            options = replace(DEFAULT, profile="apigateway", ping_interval_s=60.0)
            async with streaming(server, options=options, overlap=overlap) as stand:
                await stand.keeper.until(State.LIVE)
                start = now()
                while now() < start + 7260.0:
                    await asyncio.sleep(20.0)
                    server.publish_many(10)
                await stand.until_handled(server.last_seq)
                assert stand.seqs == list(range(1, server.last_seq + 1))
                assert not stand.keeper.gaps
                assert stand.feed.connects == 2
                assert 0.9 * 6300.0 <= server.attempts[1].time - server.attempts[0].time <= 6301.0
                assert server.close_codes == [1000]
                assert server.most_open == {"s": 2 if overlap else 1}
                assert State.FAILED not in stand.keeper.states
                assert (State.BACKOFF in stand.keeper.states) is not overlap

    run(main(), fast=True, quiet_s=0.002)
