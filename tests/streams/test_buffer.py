"""The buffer between a connection and its handler: its limits, and what happens at them."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.connections import run
from thunderagent.model.errors import StreamFailed
from thunderagent.streams.connection.buffer import Buffer
from thunderagent.streams.connection.options import OnFull


def filled(messages: int, size: int, on_full: OnFull, count: int, *, each: int = 1) -> Buffer:
    buffer = Buffer(messages, size, on_full)
    for number in range(count):
        buffer.put(str(number % 10) * each)
    return buffer


@pytest.mark.parametrize(("messages", "size"), [(4, 1000), (1000, 40)])
def test_a_full_buffer_makes_the_reader_wait(messages: int, size: int) -> None:
    buffer = filled(messages, size, "pause", 3, each=10)
    assert not buffer.must_wait
    buffer.put("x" * 10)
    assert buffer.must_wait
    assert buffer.is_full


def test_one_message_may_be_larger_than_all_that_may_wait() -> None:
    buffer = Buffer(10, 5, "pause")
    assert not buffer.must_wait
    buffer.put("x" * 100)
    assert buffer.must_wait
    assert buffer.get() == "x" * 100
    assert not buffer.must_wait


def test_a_full_buffer_fails_the_stream_if_that_is_wanted() -> None:
    buffer = filled(3, 1000, "fail", 3)
    with pytest.raises(StreamFailed, match="the handler is too slow: 3 messages with 3 bytes wait, and on_full is 'f"):
        buffer.put("x")
    assert not buffer.must_wait
    assert [buffer.get() for _ in range(4)] == ["0", "1", "2", None]


def test_the_oldest_are_dropped_and_counted_if_that_is_wanted() -> None:
    buffer = filled(3, 1000, "drop_oldest", 5)
    assert not buffer.must_wait
    assert (buffer.take_dropped(), buffer.take_dropped()) == (2, 0)
    assert [buffer.get() for _ in range(4)] == ["2", "3", "4", None]


def test_the_oldest_are_dropped_by_size_too_but_never_the_newest() -> None:
    buffer = filled(100, 25, "drop_oldest", 4, each=10)
    assert (buffer.take_dropped(), len(buffer)) == (2, 2)
    buffer.put("x" * 100)
    assert (buffer.take_dropped(), len(buffer), buffer.newest()) == (2, 1, "x" * 100)


def test_the_reader_wakes_when_half_was_taken() -> None:
    async def main() -> None:
        buffer = filled(8, 1000, "pause", 8)
        waiting = asyncio.create_task(buffer.wait_for_room())
        for _ in range(3):
            await asyncio.sleep(0)
            buffer.get()
        await asyncio.sleep(0)
        assert not waiting.done()
        buffer.get()
        await waiting

    run(main())


@pytest.mark.parametrize("messages", [1, 2, 3])
def test_a_small_buffer_wakes_its_reader_too(messages: int) -> None:
    async def main() -> None:
        buffer = filled(messages, 1000, "pause", messages)
        waiting = asyncio.create_task(buffer.wait_for_room())
        await asyncio.sleep(0)
        while buffer.get() is not None:
            pass
        await asyncio.wait_for(waiting, 1)

    run(main())


def test_the_reader_wakes_when_all_is_forgotten() -> None:
    async def main() -> None:
        buffer = filled(4, 1000, "pause", 4)
        waiting = asyncio.create_task(buffer.wait_for_room())
        await asyncio.sleep(0)
        buffer.clear()
        await asyncio.wait_for(waiting, 1)
        assert len(buffer) == 0
        assert buffer.newest() is None
        assert filled(4, 4, "pause", 3).is_full is False

    run(main())


def test_what_was_forgotten_counts_no_more() -> None:
    buffer = filled(100, 10, "pause", 10)
    buffer.clear()
    buffer.put("x")
    assert not buffer.must_wait


@pytest.mark.parametrize("by", ["message", "close"])
def test_the_handler_wakes_for_a_message_and_for_the_end(by: str) -> None:
    async def main() -> None:
        buffer = Buffer(4, 1000, "pause")
        waiting = asyncio.create_task(buffer.wait_for_some())
        await asyncio.sleep(0)
        assert not waiting.done()
        buffer.put("x") if by == "message" else buffer.close()
        await asyncio.wait_for(waiting, 1)
        assert buffer.is_closed is (by == "close")

    run(main())


def test_who_was_cancelled_while_waiting_is_no_trouble_for_the_next() -> None:
    async def main() -> None:
        buffer = Buffer(1, 1000, "pause")
        waiting = asyncio.create_task(buffer.wait_for_some())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait((waiting,))
        buffer.put("x")
        reading = asyncio.create_task(buffer.wait_for_room())
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait((reading,))
        assert buffer.get() == "x"
        await buffer.wait_for_room()

    run(main())
