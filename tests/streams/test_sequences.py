"""Several sequences on one connection, messages that cover ranges, snapshots, and peers that restart their numbers."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from tests.support.connections import PROMPT, Keeper, a_feed, run, streaming
from thunderagent.model.errors import ConfigurationError, StreamFailed
from thunderagent.streams.connection.connection import Connection
from thunderagent.streams.connection.ending import State
from thunderagent.streams.connection.track import BEGIN_DROPPED, MANY_DROPPED
from thunderagent.streams.cursor import Cursor, Gap, GapAction, Span
from thunderagent.testing.chaos import ChaosServer, Cut

pytestmark = pytest.mark.slow

ACCEPT = replace(PROMPT, restart="accept")


def market(**options: Any) -> ChaosServer:
    """A feed whose messages are what is published, to every connection, from then on."""
    return ChaosServer(auto_subscribe=True, encode=lambda epoch, seq, data: json.dumps(data), **options)


def change(key: str, first: int, last: int | None = None, **rest: Any) -> dict[str, Any]:
    """A message that says changes `first` to `last` of `key`."""
    return {"s": key, "U": first, "u": first if last is None else last, **rest}


def span(message: Any) -> Span:
    return Span(first=message["U"], last=message["u"], key=message["s"], snapshot=message.get("snapshot", False))


def plain(message: Any) -> int:
    number: int = message["u"]
    return number


def places(stand: Any, key: str) -> list[tuple[int, int]]:
    return [(one["U"], one["u"]) for one in stand.handled if one["s"] == key]


def arguments(**more: Any) -> dict[str, Any]:
    return {"on_open": None, "position": span, **more}


# Ranges and keys


def test_two_sequences_on_one_connection_are_told_apart_by_their_keys() -> None:
    async def main() -> None:
        async with market(from_start=True) as server, streaming(server, **arguments()) as stand:
            for number in range(1, 101):
                server.publish(change("BTC", 1000 + number))
                server.publish(change("ETH", number))
            await stand.until_handled(200)
            assert [last for _, last in places(stand, "ETH")] == list(range(1, 101))
            assert (stand.feed.duplicates, stand.keeper.gaps, stand.keeper.warnings) == (0, [], [])

    run(main(), fast=True)


def test_the_second_sequence_without_keys_is_dropped_and_its_owner_warned() -> None:
    async def main() -> None:
        async with market(from_start=True) as server, streaming(server, **arguments(position=plain)) as stand:
            for number in range(1, 101):
                server.publish(change("BTC", 1000 + number))
                server.publish(change("ETH", number))
            await stand.until(lambda: stand.feed.duplicates == 100)
            assert len(stand.handled) == 100
            assert len(stand.keeper.warnings) == 2
            assert f"{MANY_DROPPED} of " in stand.keeper.warnings[0]
            assert "or have several sequences (Span(key=))?" in stand.keeper.warnings[0]

    run(main(), fast=True)


def test_ranges_follow_each_other_overlap_and_leave_gaps_each_in_its_sequence() -> None:
    async def main() -> None:
        async with market(from_start=True) as server, streaming(server, **arguments()) as stand:
            for one in (
                change("BTC", 157, 160),
                change("ETH", 1, 3),
                change("BTC", 161, 165),
                change("BTC", 158, 164),  # has come
                change("ETH", 6, 7),  # 4 and 5 are missing
                change("BTC", 164, 170),  # a part of it has come
            ):
                server.publish(one)
            await stand.until_handled(5)
            assert places(stand, "BTC") == [(157, 160), (161, 165), (164, 170)]
            assert places(stand, "ETH") == [(1, 3), (6, 7)]
            [(gap, action)] = stand.keeper.gaps
            assert gap == Gap(after=Cursor(3, key="ETH"), before=Cursor(6, key="ETH"), cause="missing")
            assert (gap.key, gap.missed, action) == ("ETH", 2, GapAction.CONTINUE)
            assert stand.feed.duplicates == 1

    run(main(), fast=True)


def test_each_sequence_is_resumed_behind_the_newest_message_of_it_that_was_read() -> None:
    async def main() -> None:
        asked: list[Cursor | None] = []

        async def on_open(connection: Connection, cursor: Cursor | None) -> None:
            asked.append(cursor)

        async def handle(message: Any) -> None:
            if message["s"] == "ETH":
                await stand.keeper.until(State.LIVE, times=2)

        kept = Cursor(3, key="LTC", others={"ETH": Cursor(5, key="ETH")})
        async with market(from_start=True) as server:
            server.publish(change("BTC", 10, 12))
            server.publish(change("ETH", 6, 7))
            server.publish(change("BTC", 13))
            async with streaming(server, keeper=Keeper(kept), handle=handle, **arguments(on_open=on_open)) as stand:
                await stand.until_buffered(1)
                server.drop_all(Cut())
                await stand.until_handled(3)
                assert asked[0] == kept
                resumed = asked[1]
                assert resumed is not None
                assert {one.key: one.seq for one in resumed.places} == {"BTC": 13, "ETH": 7, "LTC": 3}
                server.publish(change("LTC", 4))
                await stand.until_handled(4)
                assert not stand.keeper.gaps

    run(main(), fast=True)


def test_a_successor_goes_on_in_each_sequence_where_its_predecessor_stopped() -> None:
    async def main() -> None:
        async with market(from_start=True) as server:
            for one in (change("BTC", 1), change("ETH", 1), change("BTC", 2), change("ETH", 2), change("BTC", 3)):
                server.publish(one)
            more = arguments(on_hold=True, overlap=True)
            async with streaming(server, keeper=Keeper(Cursor(1, key="BTC")), **more) as stand:
                await stand.until_buffered(5)
                stand.feed.release(Cursor(1, key="ETH", others={"BTC": Cursor(2, key="BTC")}))
                await stand.until_handled(2)
                assert [(one["s"], one["u"]) for one in stand.handled] == [("ETH", 2), ("BTC", 3)]

    run(main(), fast=True)


# Snapshots


def test_a_snapshot_replaces_the_state_wherever_its_number_is_and_ends_a_gap() -> None:
    async def main() -> None:
        async with market(from_start=True) as server, streaming(server, **arguments()) as stand:
            for one in (
                change("BTC", 1, 5),
                change("BTC", 40, 40, snapshot=True),  # ahead: what is missing is in it
                change("BTC", 41),
                change("BTC", 38, 38, snapshot=True),  # behind: what follows is handed out again
                change("BTC", 39, 41),
                change("BTC", 41, 41, snapshot=True),
            ):
                server.publish(one)
            await stand.until_handled(6)
            assert [last for _, last in places(stand, "BTC")] == [5, 40, 41, 38, 41, 41]
            [(gap, action)] = stand.keeper.gaps
            assert (gap.after.seq, gap.before.seq, action) == (5, 40, GapAction.SNAPSHOT)
            assert stand.keeper.gone_back == ["BTC"]

    run(main(), fast=True)


def test_a_sequence_with_a_gap_waits_for_its_snapshot_and_the_others_go_on() -> None:
    async def main() -> None:
        asked: list[str | None] = []

        async def ask(gap: Gap) -> GapAction:
            asked.append(gap.key)
            return GapAction.AWAIT

        async with market(from_start=True) as server, streaming(server, **arguments(on_gap=ask)) as stand:
            for one in (
                change("BTC", 1, 5),
                change("BTC", 8),  # 6 and 7 are missing
                change("ETH", 1),
                change("BTC", 9),
                change("BTC", 9, 9, snapshot=True),
                change("BTC", 10),
                change("BTC", 10),  # a duplicate as ever
            ):
                server.publish(one)
            await stand.until_handled(4)
            assert places(stand, "BTC") == [(1, 5), (9, 9), (10, 10)]
            assert places(stand, "ETH") == [(1, 1)]
            assert asked == ["BTC"]
            assert [(gap.missed, action) for gap, action in stand.keeper.gaps] == [(2, GapAction.AWAIT)]

    run(main(), fast=True)


def test_what_is_missing_ends_the_wait_for_a_snapshot_too() -> None:
    async def main() -> None:
        on_gap = GapAction.AWAIT
        async with market(from_start=True) as server, streaming(server, **arguments(on_gap=on_gap)) as stand:
            for one in (change("BTC", 1), change("BTC", 4), change("BTC", 2, 3), change("BTC", 4), change("BTC", 5)):
                server.publish(one)
            await stand.until_handled(4)
            assert [last for _, last in places(stand, "BTC")] == [1, 3, 4, 5]

    run(main(), fast=True)


def test_a_snapshot_that_does_not_come_is_asked_for_with_new_connections_then_the_owner_is_warned() -> None:
    async def main() -> None:
        options = replace(PROMPT, subscribe_timeout_s=5.0)
        more = arguments(on_gap=GapAction.AWAIT)
        async with market() as server, streaming(server, options=options, **more) as stand:
            await stand.keeper.until(State.LIVE)
            server.publish(change("BTC", 1))
            for number in range(3, 20):
                server.publish(change("BTC", number))
                server.publish(change("ETH", number))
                await stand.until_handled(number - 1)
                await asyncio.sleep(1.5)
            assert places(stand, "BTC") == [(1, 1)]
            assert stand.feed.connects == 3
            [warning] = stand.keeper.warnings
            assert "no snapshot of BTC came within 5 s, nor with 2 new connections" in warning
            server.publish(change("BTC", 50, 50, snapshot=True))
            server.publish(change("BTC", 51))
            await stand.until(lambda: places(stand, "BTC")[1:] == [(50, 50), (51, 51)])

    run(main(), fast=True)


@pytest.mark.parametrize("read", [8, Cursor(8), Cursor(8, key="BTC", others={"ETH": Cursor(1, key="ETH")})])
def test_a_snapshot_that_is_read_belongs_to_the_sequence_of_its_gap(read: Any) -> None:
    async def main() -> None:
        more = arguments(on_gap=GapAction.SNAPSHOT, snapshot=lambda gap: read)
        async with market(from_start=True) as server, streaming(server, **more) as stand:
            for one in (change("BTC", 1), change("ETH", 1), change("BTC", 7), change("BTC", 9), change("ETH", 2)):
                server.publish(one)
            await stand.until_handled(4)
            assert [(one["s"], one["u"]) for one in stand.handled] == [("BTC", 1), ("ETH", 1), ("BTC", 9), ("ETH", 2)]

    run(main(), fast=True)


# A peer that restarts its numbers


async def restarted(server: ChaosServer, stand: Any) -> None:
    """The peer has sent up to 900, and counts from 1 on the next connection."""
    await stand.keeper.until(State.LIVE)
    server.publish(change("BTC", 900))
    await stand.until_handled(1)
    server.drop_all(Cut())
    await stand.keeper.until(State.LIVE, times=2)
    for number in range(1, 31):
        server.publish(change("BTC", number))


@pytest.mark.parametrize("position", [plain, span])
def test_a_peer_that_restarts_its_numbers_is_followed_if_that_is_wanted(position: Any) -> None:
    async def main() -> None:
        async with market() as server, streaming(server, options=ACCEPT, **arguments(position=position)) as stand:
            await restarted(server, stand)
            await stand.until_handled(31)
            assert [last for _, last in places(stand, "BTC")] == [900, *range(1, 31)]
            [(gap, action)] = stand.keeper.gaps
            assert (gap.cause, gap.after.seq, gap.before.seq, gap.missed) == ("restart", 900, 1, None)
            assert action is GapAction.CONTINUE
            assert stand.keeper.gone_back == [gap.key]
            server.publish(change("BTC", 5))  # on the same connection it is a duplicate
            server.publish(change("BTC", 31))
            await stand.until_handled(32)
            assert stand.feed.duplicates == 1

    run(main(), fast=True)


def test_a_peer_that_restarts_its_numbers_fails_the_stream_if_that_is_wanted() -> None:
    async def main() -> None:
        options = replace(PROMPT, restart="fail")
        async with market() as server, streaming(server, options=options, **arguments()) as stand:
            await restarted(server, stand)
            error = await stand.failure()
            assert isinstance(error, StreamFailed)
            assert "the peer restarts its numbers" in str(error)
            assert len(stand.handled) == 1

    run(main(), fast=True)


def test_a_peer_that_restarts_its_numbers_is_dropped_otherwise_and_its_owner_warned() -> None:
    async def main() -> None:
        async with market() as server, streaming(server, **arguments()) as stand:
            await restarted(server, stand)
            await stand.until(lambda: stand.feed.duplicates == 30)
            [warning] = stand.keeper.warnings
            assert f"the first {BEGIN_DROPPED} messages of the connection were dropped as duplicates" in warning
            assert "(BTC 20, behind 900)" in warning
            assert not stand.keeper.gaps

    run(main(), fast=True)


def test_what_was_read_before_the_connection_was_lost_is_no_new_beginning() -> None:
    """Messages that wait for the handler came by the connection before."""

    async def main() -> None:
        async def handle(message: Any) -> None:
            if message["u"] == 901:
                await stand.keeper.until(State.LIVE, times=2)

        async with market() as server, streaming(server, options=ACCEPT, handle=handle, **arguments()) as stand:
            await stand.keeper.until(State.LIVE)
            for number in (901, 900, 902):
                server.publish(change("BTC", number))
            await stand.until_buffered(2)
            server.drop_all(Cut())
            await stand.until_handled(2)
            assert [last for _, last in places(stand, "BTC")] == [901, 902]
            assert (stand.feed.duplicates, stand.keeper.gaps) == (1, [])
            server.publish(change("BTC", 902))  # the newest again, as some peers greet
            server.publish(change("BTC", 903))
            await stand.until_handled(3)
            assert (stand.feed.duplicates, stand.keeper.gaps) == (2, [])

    run(main(), fast=True)


def test_a_peer_that_restarts_its_numbers_cannot_be_told_from_a_second_connection() -> None:
    with pytest.raises(ConfigurationError, match="restart='accept' needs exclusive=True"):
        a_feed("ws://peer.test/", options=ACCEPT, position=plain, overlap=True)
