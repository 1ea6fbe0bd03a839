"""The stream as its handler sees it: gaps, duplicates, places to go on from, holding back and the end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosedOK

from tests.support.connections import PROMPT, Keeper, Message, a_feed, now, position, run, streaming, subscribe
from thunderagent.model.errors import ConfigurationError, LeaseLost, StreamFailed
from thunderagent.streams.connection import feed as feeds
from thunderagent.streams.connection.connection import Connection
from thunderagent.streams.connection.ending import State
from thunderagent.streams.connection.verdicts import FATAL
from thunderagent.streams.cursor import Cursor, Gap, GapAction
from thunderagent.testing.chaos import ChaosServer, Close, Cut, Feed, Refuse, Silence

pytestmark = pytest.mark.slow

SKIPPING = Feed(skip={3, 4})


def gap(after: int, before: int, cause: str = "missing") -> Gap:
    return Gap(after=Cursor(after, "epoch-1"), before=Cursor(before, "epoch-1"), cause=cause)


class Gate:
    """A handler that waits at one message until it is let go."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.reached = asyncio.Event()
        self.let_go = asyncio.Event()

    async def __call__(self, message: Message) -> None:
        if message["seq"] == self.at:
            self.reached.set()
            await self.let_go.wait()


def made(**arguments: Any) -> feeds.Feed[Any]:
    return a_feed("ws://peer.test/", **arguments)


# What cannot work


def test_a_snapshot_needs_a_function() -> None:
    with pytest.raises(ConfigurationError, match="give connect\\(\\) a `snapshot` function"):
        made(on_gap=GapAction.SNAPSHOT)


def test_two_connections_at_once_need_positions() -> None:
    with pytest.raises(ConfigurationError, match="exclusive=False needs positions"):
        made(overlap=True)


# Messages


def test_without_decode_the_handler_gets_what_came() -> None:
    async def main() -> None:
        async with ChaosServer(from_start=True) as server:
            server.publish_many(1)
            async with streaming(server, decode=None, position=None) as stand:
                await stand.until_handled(1)
                assert json.loads(stand.handled[0])["seq"] == 1  # type: ignore[arg-type]

    run(main(), fast=True)


def test_duplicates_are_dropped_and_counted() -> None:
    async def main() -> None:
        async with ChaosServer(Feed(duplicate_each=2), from_start=True) as server, streaming(server) as stand:
            server.publish_many(10)
            await stand.until_handled(10)
            server.publish_many(1)
            await stand.until_handled(11)
            assert stand.seqs == list(range(1, 12))
            assert stand.feed.duplicates == 5
            assert stand.feed.handled == 11
            assert not stand.keeper.gaps

    run(main(), fast=True)


def test_messages_without_a_place_are_handed_out() -> None:
    async def main() -> None:
        async with ChaosServer(from_start=True, auto_subscribe=True) as server:
            server.publish_many(3)
            async with streaming(server, on_open=None, position=lambda message: None) as stand:
                await stand.until_handled(3)
                server.drop_all(Cut())
                await stand.until_handled(6)
                assert stand.seqs == [1, 2, 3, 1, 2, 3]

    run(main(), fast=True)


def test_a_place_may_be_a_number() -> None:
    async def main() -> None:
        async with ChaosServer(Feed(duplicate_each=1), from_start=True) as server:
            server.publish_many(3)
            async with streaming(server, position=lambda message: message["seq"]) as stand:
                await stand.until_handled(3)
                assert stand.seqs == [1, 2, 3]

    run(main(), fast=True)


# Where to go on


def test_a_stream_goes_on_behind_its_cursor() -> None:
    async def main() -> None:
        async with ChaosServer() as server:
            server.publish_many(10)
            async with streaming(server, keeper=Keeper(Cursor(7, "epoch-1"))) as stand:
                await stand.until_handled(3)
                assert stand.seqs == [8, 9, 10]
                assert not stand.keeper.gaps

    run(main(), fast=True)


def test_a_stream_goes_on_behind_the_newest_message_that_was_read() -> None:
    async def main() -> None:
        gate = Gate(2)
        async with ChaosServer(from_start=True) as server:
            server.publish_many(10)
            async with streaming(server, handle=gate) as stand:
                await gate.reached.wait()
                await stand.until_buffered(8)
                server.drop_all(Cut())
                await stand.keeper.until(State.LIVE, times=2)
                assert [one.since for one in server.subscriptions] == [None, 10]
                server.publish_many(1)
                gate.let_go.set()
                await stand.until_handled(11)
                assert stand.seqs == list(range(1, 12))
                assert not stand.keeper.gaps
                assert stand.feed.duplicates == 0

    run(main(), fast=True)


def test_without_positions_a_stream_goes_on_behind_what_was_checkpointed() -> None:
    async def main() -> None:
        async with ChaosServer(from_start=True) as server:
            server.publish_many(5)
            async with streaming(server, position=None) as stand:
                await stand.until_handled(5)
                stand.keeper.cursor = Cursor(3, "epoch-1")
                server.drop_all(Cut())
                await stand.until_handled(7)
                assert stand.seqs == [1, 2, 3, 4, 5, 4, 5]

    run(main(), fast=True)


# Gaps


@pytest.mark.parametrize("form", ["value", "function", "coroutine", "text"])
def test_a_gap_is_recorded_and_the_stream_goes_on(form: str) -> None:
    found: list[Gap] = []

    def function(gap: Gap) -> GapAction:
        found.append(gap)
        return GapAction.CONTINUE

    async def coroutine(gap: Gap) -> GapAction:
        await asyncio.sleep(1)
        return function(gap)

    async def text(gap: Gap) -> str:
        function(gap)
        return "continue"

    forms: dict[str, Any] = {
        "value": GapAction.CONTINUE,
        "function": function,
        "coroutine": coroutine,
        "text": text,
    }

    async def main() -> None:
        async with ChaosServer(SKIPPING, from_start=True) as server:
            server.publish_many(6)
            async with streaming(server, on_gap=forms[form]) as stand:
                await stand.until_handled(4)
                assert stand.seqs == [1, 2, 5, 6]
                assert stand.keeper.gaps == [(gap(2, 5), GapAction.CONTINUE)]
                assert stand.keeper.gaps[0][0].missed == 2
                assert stand.feed.connects == 1
        assert len(found) == (form != "value")

    run(main(), fast=True)


@pytest.mark.parametrize("is_coroutine", [False, True])
def test_a_gap_is_bridged_by_a_snapshot(is_coroutine: bool) -> None:
    """The snapshot holds everything up to 5: the message behind the gap is not handed out again."""
    asked: list[Gap] = []

    def snapshot(gap: Gap) -> Cursor | Awaitable[Cursor]:
        asked.append(gap)
        return later() if is_coroutine else Cursor(5, "epoch-1")

    async def later() -> Cursor:
        await asyncio.sleep(3)
        return Cursor(5, "epoch-1")

    async def main() -> None:
        async with ChaosServer(SKIPPING, from_start=True) as server:
            server.publish_many(7)
            async with streaming(server, on_gap=GapAction.SNAPSHOT, snapshot=snapshot) as stand:
                await stand.until_handled(4)
                assert stand.seqs == [1, 2, 6, 7]
                assert stand.keeper.gaps == [(gap(2, 5), GapAction.SNAPSHOT)]
        assert asked == [gap(2, 5)]

    run(main(), fast=True)


def test_a_snapshot_that_was_decided_for_needs_its_function() -> None:
    async def main() -> None:
        async with ChaosServer(SKIPPING, from_start=True) as server:
            server.publish_many(7)
            async with streaming(server, on_gap=lambda gap: GapAction.SNAPSHOT) as stand:
                assert isinstance(await stand.failure(), ConfigurationError)

    run(main(), fast=True)


def test_an_end_of_the_connection_during_a_snapshot_loses_nothing() -> None:
    async def main() -> None:
        async with ChaosServer(SKIPPING, Feed(), from_start=True) as server:
            server.publish_many(7)

            async def snapshot(_: Gap) -> Cursor:
                server.drop_all(Cut())
                await asyncio.sleep(5)
                server.publish_many(3)
                return Cursor(6, "epoch-1")

            async with streaming(server, on_gap=GapAction.SNAPSHOT, snapshot=snapshot) as stand:
                await stand.until_handled(6)
                assert stand.seqs == [1, 2, 7, 8, 9, 10]
                assert len(stand.keeper.gaps) == 1

    run(main(), fast=True)


def test_a_gap_can_be_filled_by_connecting_again() -> None:
    async def main() -> None:
        async with ChaosServer(SKIPPING, Feed(), from_start=True) as server:
            server.publish_many(300)
            async with streaming(server, on_gap=GapAction.RECONNECT) as stand:
                await stand.until_handled(300)
                assert stand.seqs == list(range(1, 301))
                assert stand.keeper.gaps == [(gap(2, 5), GapAction.RECONNECT)]
                assert [one.since for one in server.subscriptions] == [None, 2]

    run(main(), fast=True)


def test_a_gap_that_stays_is_gone_over_after_two_more_connections() -> None:
    async def main() -> None:
        async with ChaosServer(SKIPPING, from_start=True) as server:
            server.publish_many(6)
            async with streaming(server, on_gap=GapAction.RECONNECT) as stand:
                await stand.until_handled(4)
                assert stand.seqs == [1, 2, 5, 6]
                actions = [action for _, action in stand.keeper.gaps]
                assert actions == [GapAction.RECONNECT, GapAction.RECONNECT, GapAction.CONTINUE]
                assert len(server.attempts) == 3
                server.publish_many(2)
                await stand.until_handled(6)

    run(main(), fast=True)


@pytest.mark.parametrize("during", [State.BACKOFF, State.CONNECTING, State.SUBSCRIBING])
def test_a_gap_that_is_found_while_an_attempt_is_under_way_is_filled_as_well(during: State) -> None:
    """What was read behind the gap is forgotten, so an attempt that goes on from there would lose it."""

    async def main() -> None:
        decided = asyncio.Event()
        asked: list[Gap] = []

        async def on_gap(found: Gap) -> GapAction:
            asked.append(found)
            await decided.wait()
            return GapAction.RECONNECT if len(asked) == 1 else GapAction.CONTINUE

        second: Any = {
            State.BACKOFF: Refuse(status=503),
            State.CONNECTING: Feed(handshake_s=5.0),
            State.SUBSCRIBING: Feed(),
        }[during]

        async def on_open(connection: Connection, cursor: Cursor | None) -> None:
            if len(server.attempts) == 2 and during is State.SUBSCRIBING:
                await asyncio.sleep(5.0)
            await subscribe(connection, cursor)

        async with ChaosServer(SKIPPING, second, Feed(), from_start=True) as server:
            server.publish_many(20)
            async with streaming(server, on_gap=on_gap, on_open=on_open) as stand:
                await stand.until_handled(2)
                await stand.until_buffered(15)
                server.drop_all(Cut())
                await stand.keeper.until(during, times=1 if during is State.BACKOFF else 2)
                await server.wait_for(lambda: len(server.attempts) == 2)
                decided.set()
                await stand.until_handled(20, timeout_s=120)
                assert stand.seqs == list(range(1, 21))
                assert asked == [gap(2, 5)]

    run(main(), fast=True)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_gap_that_is_found_during_a_rotation_is_filled_as_well(overlap: bool) -> None:
    async def main() -> None:
        decided = asyncio.Event()
        asked: list[Gap] = []

        async def on_gap(found: Gap) -> GapAction:
            asked.append(found)
            await decided.wait()
            return GapAction.RECONNECT if len(asked) == 1 else GapAction.CONTINUE

        async with ChaosServer(SKIPPING, Feed(handshake_s=1.0), Feed(), from_start=True) as server:
            server.publish_many(20)
            options = replace(PROMPT, max_connection_age_s=50.0)
            async with streaming(server, on_gap=on_gap, options=options, overlap=overlap) as stand:
                await server.wait_for(lambda: len(server.attempts) == 2, timeout_s=60)
                decided.set()
                await stand.until_handled(20, timeout_s=120)
                assert stand.seqs == list(range(1, 21))
                assert asked == [gap(2, 5)]

    run(main(), fast=True)


def test_a_gap_can_end_the_stream() -> None:
    async def main() -> None:
        async with ChaosServer(SKIPPING, from_start=True) as server:
            server.publish_many(6)
            async with streaming(server, on_gap=GapAction.FAIL) as stand:
                error = await stand.failure()
                assert isinstance(error, StreamFailed)
                assert str(error).startswith("messages are missing (missing): after Cursor(seq=2,")
                assert stand.seqs == [1, 2]
                assert stand.keeper.gaps == [(gap(2, 5), GapAction.FAIL)]

    run(main(), fast=True)


def test_numbers_that_may_jump_are_no_gap() -> None:
    async def main() -> None:
        async with ChaosServer(SKIPPING, from_start=True) as server:
            server.publish_many(6)
            options = replace(PROMPT, contiguous=False)
            async with streaming(server, on_gap=GapAction.FAIL, options=options) as stand:
                await stand.until_handled(4)
                assert not stand.keeper.gaps

    run(main(), fast=True)


@pytest.mark.parametrize("contiguous", [True, False])
def test_what_was_dropped_for_want_of_room_is_a_gap_on_record(contiguous: bool) -> None:
    async def main() -> None:
        gate = Gate(1)
        async with ChaosServer(from_start=True) as server:
            server.publish_many(1)
            options = replace(PROMPT, max_pending=10, on_full="drop_oldest", contiguous=contiguous)
            async with streaming(server, handle=gate, options=options) as stand:
                await gate.reached.wait()
                server.publish_many(99)
                await stand.until(lambda: stand.feed._buffer.dropped == 89)
                gate.let_go.set()
                await stand.until_handled(11)
                assert stand.seqs == [1, *range(91, 101)]
                assert stand.keeper.gaps == [(gap(1, 91, "dropped"), GapAction.CONTINUE)]

    run(main(), fast=True)


def test_a_new_epoch_is_a_gap_and_its_numbers_start_afresh() -> None:
    async def main() -> None:
        async with ChaosServer(Feed(new_epoch_after=3), from_start=True) as server:
            server.publish_many(8)
            async with streaming(server) as stand:
                await stand.until_handled(8)
                assert stand.seqs == [1, 2, 3, 1, 2, 3, 4, 5]
                [(found, action)] = stand.keeper.gaps
                assert (found.cause, found.missed, action) == ("epoch", None, GapAction.CONTINUE)
                assert (found.after, found.before) == (Cursor(3, "epoch-1"), Cursor(1, "epoch-2"))

    run(main(), fast=True)


def test_a_peer_that_lost_its_history_leaves_a_gap() -> None:
    async def main() -> None:
        async with ChaosServer(from_start=True) as server, streaming(server) as stand:
            server.publish_many(3)
            await stand.until_handled(3)
            server.stop_listening()
            server.drop_all(Cut())
            server.publish_many(4)
            server.forget()
            server.publish_many(1)
            server.listen_again()
            await stand.until_handled(4)
            assert stand.seqs == [1, 2, 3, 8]
            assert stand.keeper.gaps == [(gap(3, 8), GapAction.CONTINUE)]

    run(main(), fast=True)


# Too slow, or over


def test_a_handler_that_is_too_slow_fails_the_stream_if_that_is_wanted() -> None:
    async def main() -> None:
        gate = Gate(1)
        async with ChaosServer(from_start=True) as server:
            server.publish_many(1)
            async with streaming(server, handle=gate, options=replace(PROMPT, max_pending=10, on_full="fail")) as stand:
                await gate.reached.wait()
                server.publish_many(99)
                await stand.keeper.until(State.FAILED)
                gate.let_go.set()
                assert "the handler is too slow: 10 messages" in str(await stand.failure())
                assert len(stand.seqs) == 11, "what was read before is handed out first"

    run(main(), fast=True)


def test_no_message_is_handed_out_after_the_right_to_it_is_lost() -> None:
    async def main() -> None:
        gate = Gate(2)
        async with ChaosServer(from_start=True) as server:
            server.publish_many(5)
            async with streaming(server, handle=gate) as stand:
                await gate.reached.wait()
                stand.keeper.is_lost = True
                gate.let_go.set()
                assert isinstance(await stand.failure(), LeaseLost)
                assert stand.seqs == [1, 2]

    run(main(), fast=True)


def test_the_time_of_the_handler_is_known() -> None:
    async def main() -> None:
        gate = Gate(1)
        async with ChaosServer(from_start=True) as server, streaming(server, handle=gate) as stand:
            await stand.keeper.until(State.LIVE)
            await asyncio.sleep(50)
            assert stand.feed.handling_s() == 0.0
            server.publish_many(1)
            await gate.reached.wait()
            await asyncio.sleep(70)
            assert 69.0 <= stand.feed.handling_s() <= 71.0
            assert stand.feed.handled == 0
            gate.let_go.set()
            await stand.until_handled(1)
            await asyncio.sleep(0)
            assert stand.feed.handling_s() == 0.0
            assert stand.feed.handled == 1

    run(main(), fast=True)


def test_a_failed_stream_stays_failed() -> None:
    async def main() -> None:
        options = replace(PROMPT, classify=lambda end: FATAL)
        async with ChaosServer(Refuse(status=404)) as server, streaming(server, options=options) as stand:
            assert isinstance(await stand.failure(), StreamFailed)
            await stand.feed.finish()
            assert stand.feed.state is State.FAILED
            with pytest.raises(StopAsyncIteration):
                await anext(stand.feed)

    run(main(), fast=True)


def test_a_task_of_ours_that_was_killed_is_no_silent_end() -> None:
    async def main() -> None:
        async with ChaosServer() as server, streaming(server) as stand:
            await stand.keeper.until(State.LIVE)
            pumping = stand.feed._pumping
            assert pumping
            pumping.cancel()
            assert "the task that holds the connection has died" in str(await stand.failure())
            await server.wait_for(lambda: not server.open)

    run(main(), fast=True)


@pytest.mark.parametrize("error", [ValueError("disk full"), SystemError("odd")])
def test_a_keeper_that_fails_is_no_silent_end(error: Exception) -> None:
    class Broken(Keeper):
        def moved(self, feed: feeds.Feed[Any], state: State, reason: str) -> None:
            if state is State.LIVE:
                raise error

    async def main() -> None:
        async with ChaosServer() as server, streaming(server, keeper=Broken()) as stand:
            failure = await stand.failure()
            assert isinstance(failure, RuntimeError)
            assert failure.__cause__ is error

    run(main(), fast=True)


# Handing over


@pytest.mark.parametrize("place", [None, 0, 3, 5, 8])
def test_a_successor_buffers_and_hands_out_behind_the_place_it_is_told(place: int | None) -> None:
    async def main() -> None:
        async with ChaosServer(from_start=True) as server:
            server.publish_many(5)
            keeper = Keeper(Cursor(2, "epoch-1"))
            async with streaming(server, keeper=keeper, on_hold=True) as stand:
                await stand.keeper.until(State.LIVE)
                server.publish_many(5)
                await stand.until_buffered(8)
                await asyncio.sleep(100)
                assert stand.seqs == []
                stand.feed.release(None if place is None else Cursor(place, "epoch-1"))
                first = max(2, place or 0) + 1
                await stand.until_handled(11 - first)
                assert stand.seqs == list(range(first, 11))
                assert not stand.keeper.gaps

    run(main(), fast=True)


def test_a_successor_that_is_told_of_a_place_it_has_not_read_finds_no_gap() -> None:
    async def main() -> None:
        async with ChaosServer(from_start=True) as server, streaming(server, on_hold=True) as stand:
            server.publish_many(5)
            await stand.keeper.until(State.LIVE)
            stand.feed.release(Cursor(9, "epoch-1"))
            server.publish_many(6)
            await stand.until_handled(2)
            assert stand.seqs == [10, 11]
            assert not stand.keeper.gaps

    run(main(), fast=True)


@pytest.mark.parametrize("on_hold", [False, True])
@pytest.mark.parametrize("flush", [False, True])
def test_what_was_read_is_handed_out_before_the_end_if_that_is_wanted(flush: bool, on_hold: bool) -> None:
    async def main() -> None:
        gate = Gate(1)
        async with ChaosServer(from_start=True) as server:
            server.publish_many(6)
            async with streaming(server, handle=gate, on_hold=on_hold) as stand:
                await stand.until_buffered(6 if on_hold else 5)
                closing = stand.feed.finish(flush=flush)
                assert stand.feed.finish() is closing
                gate.let_go.set()
                async with asyncio.timeout(5):
                    await stand.consumer
                expected = 6 if flush else (0 if on_hold else 1)
                assert stand.seqs == list(range(1, expected + 1))
                assert stand.feed.handled == expected
                assert stand.feed.state is State.CLOSED
                assert server.close_codes == [1000]

    run(main(), fast=True)


@pytest.mark.parametrize("where", ["waiting", "holding", "in a gap", "backoff"])
def test_the_iteration_ends_when_the_keeper_ends_the_feed(where: str) -> None:
    async def main() -> None:
        entered = asyncio.Event()

        async def on_gap(_: Gap) -> GapAction:
            entered.set()
            await asyncio.sleep(20)
            return GapAction.RECONNECT

        on_hold = where == "holding"
        async with (
            ChaosServer(SKIPPING, from_start=True) as server,
            streaming(server, on_hold=on_hold, on_gap=on_gap) as stand,
        ):
            await stand.keeper.until(State.LIVE)
            if where == "in a gap":
                server.publish_many(6)
                await entered.wait()
            elif where == "backoff":
                server.stop_listening()
                server.drop_all(Cut())
                await stand.keeper.until(State.BACKOFF)
            await stand.feed.finish()
            async with asyncio.timeout(30):
                await stand.consumer
            assert stand.seqs == ([1, 2] if where == "in a gap" else [])
            assert stand.keeper.states[-1] is State.CLOSED

    run(main(), fast=True)


def test_a_mute_peer_delays_neither_the_handler_nor_the_end() -> None:
    async def main() -> None:
        async with ChaosServer(Feed(ending=Silence(after_messages=1)), from_start=True) as server:
            server.publish_many(1)
            async with streaming(server) as stand:
                await stand.until_handled(1)
                start = now()
                await stand.feed.finish()
                await stand.consumer
                assert now() - start <= PROMPT.close_timeout_s + 0.5

    run(main(), fast=True)


@pytest.mark.parametrize("tls", [None, "good"])
def test_a_stream_that_is_paused_is_closed_as_fast_as_another(tls: Any) -> None:
    """The peer's answer to our close is behind messages that nobody reads any more."""

    async def main() -> None:
        gate = Gate(1)
        async with ChaosServer(from_start=True, tls=tls) as server:
            server.publish_many(1000)
            options = replace(PROMPT, max_pending=8, close_timeout_s=5.0)
            async with streaming(server, handle=gate, options=options) as stand:
                await stand.keeper.until(State.PAUSED)
                await asyncio.sleep(0.5)
                start = now()
                await stand.feed.finish()
                assert now() - start <= 2.0
                assert server.close_codes == [1000]

    run(main(), fast=True)


def test_asking_for_another_connection_without_one_changes_nothing() -> None:
    async def main() -> None:
        async with ChaosServer(Feed(ending=Close(code=1000)), Feed()) as server, streaming(server) as stand:
            await stand.keeper.until(State.BACKOFF)
            stand.feed.reconnect()
            assert stand.feed.connection is None
            await stand.keeper.until(State.LIVE)
            assert stand.feed.connection is not None

    run(main(), fast=True)


def test_a_message_without_a_place_at_the_end_of_the_buffer_is_no_trouble() -> None:
    """The place to go on from is then that of the last message handed out; what comes twice is dropped."""

    def some(message: Message) -> Cursor | None:
        return position(message) if message["seq"] != 5 else None

    async def main() -> None:
        gate = Gate(2)
        async with ChaosServer(from_start=True) as server:
            server.publish_many(5)
            async with streaming(server, handle=gate, position=some) as stand:
                await gate.reached.wait()
                await stand.until_buffered(3)
                server.drop_all(Cut())
                await stand.keeper.until(State.LIVE, times=2)
                assert server.subscriptions[-1].since == 2
                gate.let_go.set()
                server.publish_many(1)
                await stand.until_handled(7)
                assert stand.seqs == [1, 2, 3, 4, 5, 5, 6]
                assert stand.feed.duplicates == 2

    run(main(), fast=True)


def test_a_decoder_that_fails_in_the_reader_fails_where_it_can_be_told() -> None:
    async def main() -> None:
        gate = Gate(1)
        async with ChaosServer(from_start=True) as server:
            server.publish_many(3)
            decode: Callable[[Any], Any] = lambda raw: None if '"seq": 3' in raw else json.loads(raw)  # noqa: E731
            async with streaming(server, handle=gate, decode=decode) as stand:
                await gate.reached.wait()
                await stand.until_buffered(2)
                server.drop_all(Cut())
                await stand.keeper.until(State.LIVE, times=2)
                gate.let_go.set()
                assert isinstance(await stand.failure(), TypeError)
                assert stand.seqs == [1, 2]

    run(main(), fast=True)


@pytest.mark.parametrize("place", [lambda server: Cursor(server.last_seq, server.epoch), None])
def test_a_stream_whose_first_connection_brought_nothing_begins_where_the_peer_said(place: Any) -> None:
    async def main() -> None:
        async def on_open(connection: Connection, cursor: Cursor | None) -> Cursor | None:
            await subscribe(connection, cursor)
            return place(server) if place else None

        async with ChaosServer() as server:
            server.publish_many(3)
            async with streaming(server, on_open=on_open) as stand:
                await stand.keeper.until(State.LIVE)
                server.stop_listening()
                server.drop_all(Cut())
                server.publish_many(2)  # nobody listens
                server.listen_again()
                await stand.keeper.until(State.LIVE, times=2)
                server.publish(None)
                await stand.until_handled(3 if place else 1)
                assert stand.seqs == ([4, 5, 6] if place else [6])

    run(main(), fast=True)


def test_the_headers_of_the_handshake_are_there_in_on_open_and_forgotten_afterwards() -> None:
    async def main() -> None:
        seen: list[str] = []

        async def on_open(connection: Connection, cursor: Cursor | None) -> None:
            seen.append(connection.response_headers["Upgrade"])
            await subscribe(connection, cursor)

        async with ChaosServer() as server, streaming(server, on_open=on_open) as stand:
            await stand.keeper.until(State.LIVE)
            assert seen == ["websocket"]
            assert stand.feed.connection is not None and not stand.feed.connection.response_headers
            server.publish(1)
            await stand.until_handled(1)

    run(main(), fast=True)


# Sending, answers and signs of life


def test_what_cannot_be_sent_is_counted_and_no_error() -> None:
    async def main() -> None:
        async with ChaosServer() as server, streaming(server) as stand:
            assert not await stand.feed.send("nobody is there yet")
            await stand.keeper.until(State.LIVE)
            assert await stand.feed.send_json({"op": "hello"})
            await server.wait_for(lambda: [one.data for one in server.received][1:] == ['{"op":"hello"}'])
            server.drop_all(Close(code=1001))
            await stand.keeper.until(State.BACKOFF)
            assert not await stand.feed.send_json({"op": "lost"})
            assert stand.feed.unsent == 2

    run(main(), fast=True)


@pytest.mark.parametrize("error", [AttributeError("asyncio's"), ConnectionClosedOK(None, None)])
def test_a_connection_that_ends_while_something_is_sent_is_no_error(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ends(*_: Any) -> None:
        raise error

    async def main() -> None:
        async with ChaosServer() as server, streaming(server) as stand:
            await stand.keeper.until(State.LIVE)
            assert stand.feed.connection is not None
            monkeypatch.setattr(stand.feed.connection._socket, "send", ends)
            assert not await stand.feed.send("x")
            assert stand.feed.unsent == 1

    run(main(), fast=True)


def test_a_sign_of_life_is_sent_each_interval_on_each_connection() -> None:
    async def main() -> None:
        seqs: list[int] = []

        def beat() -> dict[str, Any]:
            seqs.append(len(seqs))
            return {"op": 1, "d": seqs[-1]}

        async with (
            ChaosServer(Feed(ending=Close(code=1001, after_s=50.0))) as server,
            streaming(server, on_open=None, keepalive=(beat, 20.0)) as stand,
        ):
            await stand.keeper.until(State.LIVE, times=2, timeout_s=100)
            begin = now()
            await asyncio.sleep(45.0)
            times = [round(one.time - begin) for one in server.received]
            assert times[-2:] == [20, 40] and len(times) == 4
            assert [json.loads(one.data) for one in server.received] == [{"op": 1, "d": d} for d in range(4)]

    run(main(), fast=True)


def answering(message: Message) -> Message | None:
    return {"pong": message["seq"]} if message.get("seq", 1) % 2 == 0 else None


def test_what_is_answered_in_the_reader_is_no_message_of_the_handler() -> None:
    async def main() -> None:
        gate = Gate(at=1)
        async with (
            ChaosServer(from_start=True) as server,
            streaming(server, position=None, answer=answering, handle=gate) as stand,
        ):
            server.publish_many(6)
            await gate.reached.wait()
            await server.wait_for(lambda: len(server.received) == 4)
            assert [one.data for one in server.received][1:] == [f'{{"pong":{number}}}' for number in (2, 4, 6)]
            gate.let_go.set()
            await stand.until_handled(3)
            assert stand.seqs == [1, 3, 5]

    run(main(), fast=True)


def test_pings_are_answered_while_the_subscription_is_acknowledged_too() -> None:
    async def on_open(connection: Connection, cursor: Cursor | None) -> None:
        await connection.expect(seq=5)

    async def main() -> None:
        async with ChaosServer(auto_subscribe=True, from_start=True) as server:
            server.publish_many(5)
            async with streaming(server, on_open=on_open, position=None, answer=answering) as stand:
                await stand.until_handled(2)
                assert stand.seqs == [1, 3]
                await server.wait_for(lambda: len(server.received) == 2)
                assert [one.data for one in server.received] == ['{"pong":2}', '{"pong":4}']

    run(main(), fast=True)


def test_pings_that_are_answered_do_not_end_a_silence() -> None:
    async def main() -> None:
        options = replace(PROMPT, idle_timeout_s=30.0)
        arguments: dict[str, Any] = {"position": None, "answer": lambda message: message.get("seq") and "pong"}
        async with ChaosServer(Feed(spacing_s=5.0), from_start=True) as server:
            server.publish_many(100)
            async with streaming(server, options=options, **arguments) as stand:
                await stand.keeper.until(State.BACKOFF, timeout_s=60)
                assert stand.keeper.reasons(State.BACKOFF)[0].startswith("idle (no message for 30 s)")

    run(main(), fast=True)


def test_a_peer_that_takes_no_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with (
            ChaosServer(from_start=True) as server,
            streaming(server, position=None, answer=answering) as stand,
        ):
            await stand.keeper.until(State.LIVE)
            assert stand.feed.connection is not None
            monkeypatch.setattr(stand.feed.connection._socket, "send", never)
            server.publish_many(2)
            await stand.keeper.until(State.BACKOFF, timeout_s=20)
            assert stand.keeper.reasons(State.BACKOFF)[0].startswith("zombie (it took no answer to its ping for 10")

    run(main(), fast=True)


async def never(*_: Any) -> None:
    await asyncio.get_running_loop().create_future()


def test_a_message_that_cannot_be_decoded_is_the_handlers_error_and_not_the_answers() -> None:
    async def main() -> None:
        def decode(raw: Any) -> Message:
            raise ValueError("broken")

        arguments: dict[str, Any] = {"decode": decode, "answer": answering, "position": None, "on_open": None}
        async with ChaosServer(auto_subscribe=True, from_start=True) as server:
            server.publish_many(1)
            async with streaming(server, **arguments) as stand:
                assert str(await stand.failure()) == "broken"

    run(main(), fast=True)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"answer": never}, "answer is a coroutine function"),
        ({"keepalive": (never, 1.0)}, "the message of keepalive is a coroutine function"),
        ({"keepalive": "ping"}, "give the message and the seconds between two"),
        ({"keepalive": ({1, 2}, 1.0)}, "the message of keepalive cannot be sent"),
        ({"keepalive": ("ping", 0.0)}, "every_s of keepalive is 0"),
        ({"keepalive": ("ping", "often")}, "every_s of keepalive is 'often'"),
    ],
)
def test_answers_and_signs_of_life_that_cannot_work_are_refused(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        made(**arguments)


@dataclass(frozen=True)
class Typed:
    op: str
    seq: int = 0


@pytest.mark.parametrize("control", ["typed", "dropped", "refused"])
def test_an_answer_is_expected_as_it_is_decoded_or_else_as_json(control: str) -> None:
    """What a peer says of itself is often nothing to the decoder of its data."""

    def decode(raw: Any) -> Typed | None:
        value = json.loads(raw)
        if "op" in value and control == "refused":
            raise ValueError("no tick")
        return None if "op" in value and control == "dropped" else Typed(value.get("op", "tick"), value.get("seq", 0))

    async def on_open(connection: Connection, cursor: Cursor | None) -> None:
        await connection.send_json({"op": "subscribe", "since": 0})
        acknowledgement = await connection.expect(op="subscribed")
        assert acknowledgement == (Typed("subscribed") if control == "typed" else {"op": "subscribed"})

    async def main() -> None:
        async with ChaosServer(from_start=True) as server:
            server.publish_many(1)
            async with streaming(server, decode=decode, on_open=on_open, position=None) as stand:
                await stand.until_handled(1)
                assert [vars(tick) for tick in stand.handled] == [{"op": "tick", "seq": 1}]

    run(main(), fast=True)


def test_secrets_in_what_came_instead_are_not_shown() -> None:
    async def main() -> None:
        acknowledgement = {"token": "s3cret", "op": "welcome"}
        async with ChaosServer(Feed(acknowledgement=acknowledgement)) as server:
            options = replace(PROMPT, subscribe_timeout_s=1.0)
            async with streaming(server, options=options) as stand:
                await stand.keeper.until(State.BACKOFF)
                [reason] = stand.keeper.reasons(State.BACKOFF)
                assert "instead of op='subscribed' came " in reason
                assert "s3cret" not in reason and "welcome" in reason

    run(main(), fast=True)
