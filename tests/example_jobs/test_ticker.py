"""`ticker.follow`: each tick of a feed is in the files exactly once, whatever becomes of feed, agents and cursor."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import pytest
from pydantic import ValidationError

import jobs.minutes
import jobs.ticker
from jobs.minutes import MinuteFiles
from jobs.ticker import BadTick, Tick, TickerPayload, decode, follow
from thunderagent.agent.loop import Agent
from thunderagent.client import Client
from thunderagent.jobs.registry import Registry
from thunderagent.model import events
from thunderagent.model.errors import StreamStopped
from thunderagent.model.task import Status
from thunderagent.settings import Settings
from thunderagent.streams.context import StreamContext
from thunderagent.streams.job import stream
from thunderagent.testing import Recorder, make_lease, memory_store
from thunderagent.testing.chaos import ChaosServer, Close, Cut, Feed

pytestmark = pytest.mark.slow

LONG_S: Final = 20.0
T = TypeVar("T")


def tick(seq: int) -> dict[str, Any]:
    """Ten ticks a minute."""
    return {"time": f"2026-07-01T10:{seq // 10:02}:{seq % 10 * 6:02}+00:00", "symbol": "IBM", "price": 90.5 + seq}


def encode(epoch: str, seq: int, data: Any) -> str:
    """A message as the ticker expects it: what is published stands beside epoch and seq."""
    return json.dumps({"epoch": epoch, "seq": seq} | (data if isinstance(data, dict) else tick(seq)))


class TickServer(ChaosServer):
    """A chaos server whose messages are ticks; `publish_many` publishes them."""

    def __init__(self, *behaviours: Feed, **options: Any) -> None:
        super().__init__(*behaviours, from_start=True, encode=encode, **options)


def context(server: ChaosServer, folder: Path, **task: Any) -> StreamContext:
    payload = TickerPayload(url=server.url, folder=folder)
    return StreamContext(make_lease(follow, payload, task_id="ticker", submitted_at=100.0, **task))


def lines(folder: Path) -> list[dict[str, Any]]:
    """All lines of all files in order, each found in the file of its minute."""
    found = []
    for path in sorted((folder / "ticker").glob("*.jsonl")):
        for text in path.read_text().splitlines():
            found.append(json.loads(text))
            assert found[-1]["time"][:16].replace(":", "-") == path.stem
    return found


def seqs(folder: Path) -> list[int]:
    return [one["seq"] for one in lines(folder)]


def newest(folder: Path) -> int:
    """How many whole lines there are by now; a line may just be on its way."""
    return sum(path.read_bytes().count(b"\n") for path in (folder / "ticker").glob("*.jsonl"))


def await_lines(folder: Path, number: int, *, unless: Callable[[], bool] = lambda: False) -> None:
    until = time.monotonic() + LONG_S
    while newest(folder) < number and not unless():
        assert time.monotonic() < until, f"only {newest(folder)} of {number} lines came"
        time.sleep(0.01)


@asynccontextmanager
async def following(ctx: StreamContext, folder: Path, *, until: int) -> AsyncIterator[asyncio.Task[None]]:
    """Run the handler until so many lines are written and the block has ended; then stop it as an agent would."""
    payload = follow.load_payload(ctx.lease.task.payload_text)
    task: asyncio.Task[None] = asyncio.create_task(follow.handler(ctx, payload))
    try:
        async with asyncio.timeout(LONG_S):
            await asyncio.to_thread(await_lines, folder, until, unless=task.done)
            yield task
            if not task.done():
                assert ctx.ends_softly(StreamStopped())
            await task
    finally:
        task.cancel()
        await ctx.close()


def run(main: Callable[[], Any]) -> None:
    asyncio.run(main())


# One agent


def test_each_tick_is_a_line_in_the_file_of_its_minute_with_all_that_the_feed_tells(tmp_path: Path) -> None:
    async def main() -> None:
        async with TickServer() as server:
            server.publish_many(25)
            ctx = context(server, tmp_path)
            async with following(ctx, tmp_path, until=25):
                pass
            assert [one.since for one in server.subscriptions] == [None]
            assert json.loads(server.received[0].data)["symbol"] is None
            assert ctx.cursor is not None and ctx.cursor.to_map() == {"seq": 25, "epoch": "epoch-1"}

    run(main)
    assert seqs(tmp_path) == list(range(1, 26))
    assert len(list((tmp_path / "ticker").glob("*.jsonl"))) == 3
    first = {"epoch": "epoch-1", "seq": 1, "time": "2026-07-01T10:00:06Z", "price": 91.5, "symbol": "IBM"}
    assert lines(tmp_path)[0] == first


@pytest.mark.parametrize("behaviour", [Feed(duplicate_each=2), Feed(ending=Cut(after_messages=4)), Feed(skip={3, 4})])
def test_a_feed_that_repeats_breaks_or_skips_leaves_each_tick_once(tmp_path: Path, behaviour: Feed) -> None:
    async def main() -> None:
        async with TickServer(behaviour, Feed()) as server:
            server.publish_many(12)
            async with following(context(server, tmp_path), tmp_path, until=12):
                pass

    run(main)
    assert seqs(tmp_path) == list(range(1, 13))


def test_what_the_feed_tells_about_itself_is_no_tick(tmp_path: Path) -> None:
    async def main() -> None:
        async with TickServer() as server:
            server.publish({"op": "notice", "text": "maintenance at noon"})
            server.publish_many(3)
            async with following(context(server, tmp_path), tmp_path, until=3):
                pass

    run(main)
    assert seqs(tmp_path) == [2, 3, 4]


def test_a_new_epoch_is_followed_from_its_first_tick(tmp_path: Path) -> None:
    async def main() -> None:
        async with TickServer() as server:
            server.publish_many(5)
            async with following(context(server, tmp_path), tmp_path, until=5):
                pass
            server.new_epoch()
            server.publish_many(3)
            async with following(context(server, tmp_path, fence=2), tmp_path, until=8):
                server.new_epoch()
                server.publish_many(2)
                await asyncio.to_thread(await_lines, tmp_path, 10)

    run(main)
    found = sorted((one["epoch"], one["seq"]) for one in lines(tmp_path))
    assert found == [(f"epoch-{epoch}", seq) for epoch, last in ((1, 5), (2, 3), (3, 2)) for seq in range(1, last + 1)]


# One run after the other


@pytest.mark.parametrize("torn", ["", '{"epoch":"epoch-1","seq":8,"ti'])
def test_after_a_crash_the_files_tell_where_to_go_on_and_not_the_older_cursor(tmp_path: Path, torn: str) -> None:
    async def main() -> None:
        async with TickServer() as server:
            server.publish_many(7)
            async with following(context(server, tmp_path), tmp_path, until=7):
                pass
            with (tmp_path / "ticker" / "2026-07-01T10-00.jsonl").open("a") as file:
                file.write(torn)
            server.publish_many(7)
            ctx = context(server, tmp_path, fence=2, last_seq={"seq": 2, "epoch": "epoch-1"})
            async with following(ctx, tmp_path, until=14):
                pass
            asked = [(one.since, one.epoch) for one in server.subscriptions]
            assert asked == [(None, None), (7, "epoch-1")]

    run(main)
    assert seqs(tmp_path) == list(range(1, 15))


def test_where_the_files_were_taken_away_the_cursor_tells_where_to_go_on(tmp_path: Path) -> None:
    async def main() -> None:
        async with TickServer() as server:
            server.publish_many(8)
            ctx = context(server, tmp_path, fence=2, last_seq={"seq": 5, "epoch": "epoch-1"})
            async with following(ctx, tmp_path, until=3):
                pass

    run(main)
    assert seqs(tmp_path) == [6, 7, 8]


def test_what_a_checkpoint_covers_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved, told = [0], list[tuple[int, int]]()

    async def save(files: MinuteFiles) -> None:
        saved.append(files.place.seq if files.place else 0)

    class Context(StreamContext):
        def checkpoint(
            self, *, seq: int, epoch: str | int | None = None, token: str | None = None, key: str | None = None
        ) -> None:
            told.append((seq, saved[-1]))
            super().checkpoint(seq=seq, epoch=epoch, token=token, key=key)

    monkeypatch.setattr(MinuteFiles, "save", save)
    monkeypatch.setattr(jobs.ticker, "SAVE_S", 0.0)

    async def main() -> None:
        async with TickServer() as server:
            server.publish_many(30)
            async with following(Context(context(server, tmp_path).lease), tmp_path, until=30):
                pass

    run(main)
    assert len(told) >= 30
    assert [on_disk for _, on_disk in told] == [seq for seq, _ in told]


# Wrong messages

WRONG: Final = [
    ("{", "Expecting property name"),
    ("7", "Input should be a valid dictionary"),
    (json.dumps({"epoch": "e", "seq": 1, "time": "2026-07-01T10:00:00Z"}), "price Field required"),
    (json.dumps({"epoch": "e", "seq": 1, "time": "2026-07-01T10:00:00", "price": 1}), "timezone"),
    (json.dumps({"epoch": "e", "seq": 1.5, "time": "2026-07-01T10:00:00Z", "price": 1}), "seq Input should be"),
    ('{"epoch": "e", "seq": 1, "time": "2026-07-01T10:00:00Z", "price": NaN}', "finite number"),
    (json.dumps({"epoch": "e" * 51, "seq": 1, "time": "2026-07-01T10:00:00Z", "price": 1}), "at most 50"),
]


@pytest.mark.parametrize(("message", "why"), WRONG)
def test_a_message_that_is_no_tick_is_told_with_the_reason(message: str, why: str) -> None:
    with pytest.raises(BadTick, match="is no tick: .*" + why) as caught:
        decode(message)
    assert "\n" not in str(caught.value)
    assert BadTick in follow.fatal


def test_a_tick_may_come_as_bytes_and_with_more() -> None:
    found = decode(b'{"epoch": 3, "seq": 1, "time": "2026-07-01T12:00:00+02:00", "price": 1, "bid": [0.9, 4]}')
    assert isinstance(found, Tick)
    assert json.loads(found.model_dump_json())["bid"] == [0.9, 4]


def test_the_payload_must_name_feed_and_folder() -> None:
    with pytest.raises(ValidationError):
        TickerPayload.model_validate({"url": "ws://127.0.0.1/"})


# Agents


class Serving:
    """A tick server in a thread of its own."""

    def __init__(self, server: TickServer) -> None:
        self.server = server
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="feed", daemon=True)

    def do(self, action: Callable[[], T]) -> T:
        async def call() -> T:
            return action()

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(LONG_S)

    def __enter__(self) -> Serving:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self.server.__aenter__(), self._loop).result(LONG_S)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self.server.__aexit__(), self._loop).result(LONG_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LONG_S)
        self._loop.close()


ticker = stream("ticker.test", lease_s=1.5, heartbeat_s=0.3, max_retry=0, fatal=follow.fatal)(follow.handler)
QUICK: Final = Settings(poll_min_s=0.05, poll_max_s=0.1, poll_idle_s=0.1, sweep_s=0.1, clock_guard_s=0.1)


@contextmanager
def agent(client: Client) -> Iterator[tuple[Agent, Recorder]]:
    """An agent in a thread."""
    one = Agent(client.store, Registry(ticker), QUICK, first_poll_s=0.0)
    recorder = Recorder(one.bus)
    thread = threading.Thread(target=one.run, name=one.name, daemon=True)
    thread.start()
    try:
        yield one, recorder
    finally:
        one.stop()
        thread.join(LONG_S)
        assert not thread.is_alive()


@contextmanager
def served(folder: Path, *behaviours: Feed) -> Iterator[tuple[Serving, Client]]:
    """A feed with ten ticks, and a task that is to follow it."""
    with Serving(TickServer(*behaviours)) as serving:
        client = Client(memory_store(), QUICK)
        serving.do(lambda: serving.server.publish_many(10))
        client.enqueue(ticker, TickerPayload(url=serving.server.url, folder=folder), task_id="ticker")
        yield serving, client


def test_a_stream_that_is_stopped_and_started_goes_on_where_it_was(tmp_path: Path) -> None:
    with served(tmp_path) as (serving, client), agent(client):
        await_lines(tmp_path, 10)
        client.streams.stop("ticker")
        task = client.wait("ticker", timeout_s=LONG_S)
        assert (task.status, task.done_reason, task.last_seq) == (
            Status.DONE,
            "stopped",
            {"seq": 10, "epoch": "epoch-1"},
        )
        serving.do(lambda: serving.server.publish_many(10))
        client.streams.start("ticker")
        await_lines(tmp_path, 20)
    assert seqs(tmp_path) == list(range(1, 21))


def test_an_agent_that_stops_gives_the_stream_to_the_next(tmp_path: Path) -> None:
    with served(tmp_path) as (serving, client):
        with agent(client):
            await_lines(tmp_path, 10)
        with agent(client):
            serving.do(lambda: serving.server.publish_many(10))
            await_lines(tmp_path, 20)
    assert seqs(tmp_path) == list(range(1, 21))


def test_a_bad_tick_fails_the_stream_at_once_and_what_came_before_it_is_kept(tmp_path: Path) -> None:
    with served(tmp_path) as (serving, client), agent(client):
        serving.do(lambda: serving.server.publish({"time": "noon", "price": 1}))
        task = client.wait("ticker", timeout_s=LONG_S)
        assert task.status is Status.FAILED
        assert task.error is not None and "is no tick: 1 validation error for Tick time" in task.error
    assert seqs(tmp_path) == list(range(1, 11))


def test_a_former_holder_that_wakes_up_in_an_append_appends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asleep, thaw = threading.Event(), threading.Event()
    real = jobs.minutes._locked

    def locked(descriptor: int) -> bool:
        """The one who is about to append the eleventh tick falls asleep for longer than its lease."""
        if newest(tmp_path) == 10 and not asleep.is_set():
            asleep.set()
            assert thaw.wait(LONG_S)
        return real(descriptor)

    monkeypatch.setattr(jobs.minutes, "_locked", locked)
    monkeypatch.setattr(sys.modules[StreamContext.__module__], "LOOP_LATE_S", 0.9)
    with served(tmp_path) as (serving, client), agent(client) as (_, former):
        await_lines(tmp_path, 10)
        serving.do(lambda: serving.server.publish_many(1))
        assert asleep.wait(LONG_S)
        with agent(client) as (_, new):
            new.wait_for(events.TaskTakenOver, timeout_s=LONG_S)
            await_lines(tmp_path, 11)
            serving.do(lambda: serving.server.publish_many(9))
            await_lines(tmp_path, 20)
            thaw.set()
            former.wait_for(events.LeaseLost, timeout_s=LONG_S)
            serving.do(lambda: serving.server.publish_many(5))
            await_lines(tmp_path, 25)
    assert seqs(tmp_path) == list(range(1, 26))


@pytest.mark.parametrize("ending", [Cut(after_messages=3), Close(code=1011, after_messages=3)])
def test_ticks_that_come_while_the_feed_is_away_are_asked_for(tmp_path: Path, ending: Cut | Close) -> None:
    with served(tmp_path, Feed(ending=ending), Feed(ending=ending), Feed()) as (_, client), agent(client):
        await_lines(tmp_path, 10)
        assert client.get("ticker").status is Status.RUNNING
    assert seqs(tmp_path) == list(range(1, 11))
