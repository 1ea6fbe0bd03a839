"""Streams against a server that is not ours, and what its like do: leave, refuse for a while, want pings answered."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.support.connections import PROMPT, Message, governor, run, streaming
from tests.support.foreign import foreign_server
from thunderagent.streams.connection.connection import Connection
from thunderagent.streams.connection.ending import State
from thunderagent.streams.cursor import Cursor

QUICK = replace(PROMPT, backoff_base_s=0.01, backoff_cap_s=0.05)


@pytest.fixture(scope="module")
def peer() -> Iterator[str]:
    with foreign_server() as url:
        yield url


async def slow(_: Message) -> None:
    await asyncio.sleep(0.03)


def arguments(**others: Any) -> dict[str, Any]:
    return {"on_open": None, "position": None, "options": QUICK, **others}


@pytest.mark.slow
def test_sending_when_the_peer_has_left_with_messages_buffered_is_no_error_of_the_handler(peer: str) -> None:
    sent: list[bool] = []

    async def main() -> None:
        async def answers(_: Message) -> None:
            await slow(_)
            sent.append(await stand.feed.send_json({"op": "seen"}))

        async with streaming(f"{peer}/leaves", handle=answers, **arguments()) as stand:
            await stand.until_handled(25)
            assert False in sent
            assert stand.feed.unsent == sent.count(False)
            assert stand.feed.connects >= 2

    run(main())


def test_what_is_sent_reaches_the_peer(peer: str) -> None:
    async def main() -> None:
        async with streaming(f"{peer}/echo", **arguments()) as stand:
            assert not await stand.feed.send("nobody is there yet")
            await stand.keeper.until(State.LIVE)
            assert await stand.feed.send("hello")
            await stand.until_handled(1)
            assert (stand.handled[0]["got"], stand.feed.unsent) == ("hello", 1)

    run(main())


@pytest.mark.slow
@pytest.mark.parametrize("status", [400, 403, 404])
def test_refusals_at_the_upgrade_that_pass_leave_the_stream_alive(peer: str, status: int) -> None:
    """An ingress without a backend answers so for a minute."""

    async def main() -> None:
        url = f"{peer}/leaves?status={status}&refusals=4"
        async with streaming(url, **arguments()) as stand:
            await stand.until_handled(1)
            refused = [reason for reason in stand.keeper.reasons(State.BACKOFF) if reason.startswith(f"http {status}")]
            assert len(refused) == 4

    run(main())


def test_what_came_instead_of_the_expected_answer_is_in_the_journal(peer: str) -> None:
    async def on_open(connection: Connection, cursor: Cursor | None) -> None:
        await connection.send_json({"op": "subscribe", "symbol": "XYZ"})
        await connection.expect(op="subscribed")

    async def main() -> None:
        options = replace(QUICK, subscribe_timeout_s=0.2)
        async with streaming(f"{peer}/refuses-symbol", **arguments(on_open=on_open, options=options)) as stand:
            await stand.keeper.until(State.BACKOFF)
            [reason, *_] = stand.keeper.reasons(State.BACKOFF)
            assert reason.startswith(
                "subscribe (TimeoutError: on_open took longer than 0.2 s; instead of op='subscribed' came "
                '{"type":"welcome"} and {"type":"error","message":"unknown symbol XYZ"}); next attempt in '
            )

    run(main())


def test_the_expected_answer_is_decoded_as_the_streams_messages_are(peer: str) -> None:
    async def on_open(connection: Connection, cursor: Cursor | None) -> None:
        await connection.send("subscribe")
        assert await connection.expect(op="subscribed") == {"op": "subscribed"}

    def decode(raw: bytes) -> Any:
        return json.loads(zlib.decompress(raw))

    async def main() -> None:
        async with streaming(f"{peer}/zipped", **arguments(on_open=on_open), decode=decode) as stand:
            await stand.until_handled(1)
            assert stand.handled == [{"n": 1}]

    run(main())


@pytest.mark.slow
def test_pings_of_the_protocol_are_answered_before_buffered_messages_are_handled(peer: str) -> None:
    def answer(message: Message) -> Message | None:
        return {"pong": message["id"]} if message.get("op") == "ping" else None

    async def main() -> None:
        async with streaming(f"{peer}/pings", handle=slow, answer=answer, **arguments()) as stand:
            await stand.until_handled(40)
            assert stand.feed.connects == 1
            assert stand.handled == [{"n": number} for number in range(1, 41)], "a ping is no message of the handler's"

    run(main())


@pytest.mark.slow
def test_a_connection_is_kept_alive_while_the_reader_waits_for_a_slow_handler(peer: str) -> None:
    async def main() -> None:
        options = replace(QUICK, max_pending=4)
        async with streaming(
            f"{peer}/wants-pings", handle=slow, keepalive=("ping", 0.1), chance=governor(), **arguments(options=options)
        ) as stand:
            await stand.until_handled(40)
            assert stand.feed.connects == 1

    run(main())
