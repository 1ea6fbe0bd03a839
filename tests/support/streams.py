"""What the tests of streams have in common: a feed in a thread, a job that follows it, engines that are watched."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from tests.support.engine import LONG_S, Stage, settings
from thunderagent.agent.executors.loop import LoopExecutor
from thunderagent.client import Client
from thunderagent.jobs.context import Context
from thunderagent.jobs.job import Job
from thunderagent.model.conditions import Write
from thunderagent.model.task import Lease, Page, Row, Status, Task
from thunderagent.stores.engine import Applied, Engine
from thunderagent.stores.sqlite.engine import SqliteEngine
from thunderagent.stores.tasks import TaskStore
from thunderagent.streams.connection.connection import Connection
from thunderagent.streams.connection.options import StreamOptions
from thunderagent.streams.connection.verdicts import FATAL
from thunderagent.streams.context import StreamContext
from thunderagent.streams.cursor import Cursor
from thunderagent.streams.job import stream
from thunderagent.testing import memory_store
from thunderagent.testing.chaos import Behaviour, ChaosServer
from thunderagent.testing.faulty_engine import FaultyEngine

T = TypeVar("T")

PROMPT: Final = StreamOptions(proxy=False, close_timeout_s=0.3, backoff_base_s=0.05, backoff_cap_s=0.2)
"""Options with which nothing makes a test wait."""
STRICT: Final = replace(PROMPT, classify=lambda end: FATAL if end.status == 404 else None)
"""The same for a peer that means its first 404."""


class FeedThread:
    """A `ChaosServer` in a loop and a thread of its own."""

    def __init__(self, *behaviours: Behaviour, **options: Any) -> None:
        self.server = ChaosServer(*behaviours, per_key=True, **options)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="feed", daemon=True)

    def __enter__(self) -> FeedThread:
        self._thread.start()
        self._await(self.server.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._await(self.server.__aexit__())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(LONG_S)
            self._loop.close()

    @property
    def url(self) -> str:
        return self.server.url

    def do(self, call: Callable[[], T]) -> T:
        """Do it in the loop of the server."""

        async def whole() -> T:
            return call()

        answer: T = self._await(whole())
        return answer

    def publish(self, count: int) -> int:
        """Publish so many messages; the number of the last."""
        return self.do(lambda: self.server.publish_many(count))

    def until(self, predicate: Callable[[], object]) -> None:
        """Wait until the server has seen it."""
        self._await(self.server.wait_for(predicate, LONG_S))

    def _await(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(LONG_S)


class Handled(NamedTuple):
    """A message that a handler was given."""

    fence: int
    seq: int
    task: str


class Log:
    """What handlers were given, in order, for all agents of a test."""

    def __init__(self) -> None:
        self.handled: list[Handled] = []
        self.runs: list[tuple[int, Cursor | None]] = []
        """Fence and cursor of each run as it began."""
        self.contexts: list[StreamContext] = []
        self._changed = threading.Condition()

    def add(self, one: Handled) -> None:
        with self._changed:
            self.handled.append(one)
            self._changed.notify_all()

    def began(self, ctx: StreamContext) -> None:
        with self._changed:
            self.runs.append((ctx.fence, ctx.cursor))
            self.contexts.append(ctx)
            self._changed.notify_all()

    def wait(self, predicate: Callable[[], object]) -> None:
        """Wait until it holds; asked whenever a message was handled or a run began."""
        with self._changed:
            assert self._changed.wait_for(lambda: bool(predicate()), LONG_S), (self.handled[-20:], self.runs)

    def until(self, seq: int, *, fence: int | None = None) -> None:
        """Wait until a message was handled."""
        self.wait(lambda: any(one.seq == seq and fence in (None, one.fence) for one in self.handled))

    @property
    def seqs(self) -> list[int]:
        return [one.seq for one in self.handled]

    @property
    def fences(self) -> list[int]:
        return [one.fence for one in self.handled]


async def subscribe(connection: Connection, cursor: Cursor | None) -> None:
    """Ask a `ChaosServer` for what comes behind the cursor, and for everything at the very beginning."""
    since, epoch = (cursor.seq, cursor.epoch) if cursor else (0, None)
    await connection.send_json({"op": "subscribe", "since": since, "epoch": epoch})
    await connection.expect(op="subscribed")


def position(message: Any) -> Cursor | None:
    """The place of a message of a `ChaosServer`."""
    return Cursor(message["seq"], message["epoch"])


Each = Callable[[StreamContext, Mapping[str, Any]], Any]


def follower(
    log: Log,
    name: str = "test.stream",
    *,
    each: Each | None = None,
    options: StreamOptions = PROMPT,
    **job_options: Any,
) -> Job[Any]:
    """A stream that follows the feed at the URL of its payload, and checkpoints each message.

    Args:
        log: what was handled.
        each: awaited for each message, before it counts as handled.
        options: of the connection.
        job_options: of `stream`.
    """
    import json

    async def follow(ctx: StreamContext, payload: dict[str, Any]) -> None:
        log.began(ctx)
        url = f"{payload['url']}?stream={ctx.task_id}"
        async for message in ctx.connect(url, decode=json.loads, on_open=subscribe, position=position, options=options):
            if each is not None:
                await each(ctx, message)
            log.add(Handled(ctx.fence, message["seq"], ctx.task_id))
            ctx.checkpoint(seq=message["seq"], epoch=message["epoch"])

    values: dict[str, Any] = {"lease_s": 6.0, "heartbeat_s": 0.1, "queue": "streams"}
    return stream(name, **{**values, **job_options})(follow)


class Watched(FaultyEngine):
    """An engine that keeps what was written and which parts of the index were read."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.batches: list[list[Write]] = []
        self.pages: list[str] = []
        self.gets: list[Sequence[str]] = []
        self.before: list[Callable[[Sequence[Write]], None]] = []
        """Called with each batch, before it is done."""

    def apply(self, batch: Sequence[Write]) -> list[Applied]:
        for hook in list(self.before):
            hook(batch)
        self.batches.append(list(batch))
        return super().apply(batch)

    def page(self, status_value: str, **options: Any) -> Page:
        self.pages.append(status_value)
        return super().page(status_value, **options)

    def get(self, task_ids: Sequence[str]) -> dict[str, Row]:
        self.gets.append(task_ids)
        return super().get(task_ids)

    def writes_of(self, task_id: str) -> list[Write]:
        """The writes on a task so far."""
        return [write for batch in list(self.batches) for write in batch if write.task_id == task_id]

    def verbs_of(self, task_id: str) -> list[str]:
        return [write.verb for write in self.writes_of(task_id)]


def watched_memory() -> tuple[TaskStore, Watched]:
    """A store in memory that is watched."""
    engine = Watched(memory_store().engine)
    return TaskStore(engine), engine


class Fleet:
    """Several agents on one SQLite file, and a client."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.stages: list[Stage] = []
        self.engines: list[Watched] = []
        self.store = TaskStore(SqliteEngine(str(path)))
        self.client = Client(self.store, settings())

    def add(self, *jobs: Job[Any], start: bool = True, **changes: Any) -> Stage:
        """One more agent."""
        engine = Watched(SqliteEngine(str(self._path)))
        self.engines.append(engine)
        values: dict[str, Any] = {"clock_guard_s": 0.2, "drain_s": 10.0, "poll_max_s": 0.2, "poll_idle_s": 0.2}
        stage = Stage(jobs, store=TaskStore(engine), **{**values, **changes})
        stage.agent._core.rng.seed(len(self.stages))
        self.stages.append(stage)
        if start:
            stage.start()
        return stage

    def row(self, task: Task | str) -> Task:
        return self.client.get(task)

    def introduce(self) -> None:
        """Let every agent know of all."""
        for stage in self.stages:
            stage.agent._housekeeping._announce()
        for stage in self.stages:
            stage.agent._parts.fleet.learn(stage.store.agents())

    def close(self) -> None:
        for stage in self.stages:
            if stage.is_running:
                stage.agent.stop()
                stage.agent.stop()
        for stage in self.stages:
            if stage.is_running:
                stage.join()
            stage.store.engine.close()
        self.store.engine.close()


@contextmanager
def fleet(folder: Path) -> Iterator[Fleet]:
    """A fleet without agents yet."""
    made = Fleet(folder / "fleet.db")
    try:
        yield made
    finally:
        made.close()


def lease_of(**fields: Any) -> Lease:
    """A lease of a stream that no store knows, held from the monotonic second 1000."""
    values: dict[str, Any] = {
        "task_id": "a",
        "status": Status.RUNNING,
        "created_at": 1.0,
        "submitted_at": 1.0,
        "job": "test.stream",
        "kind": "stream",
        "payload_text": "{}",
        "fence": 1,
        "lease_owner": "me",
        "hb": 0,
    }
    task = Task(**{**values, **fields})
    return Lease(task=task, owner="me", fence=task.fence, lease_s=20.0, held_from=1000.0)


class Loop:
    """A `LoopExecutor` that is closed at the end, with the outcomes of its handlers."""

    def __init__(self, **options: Any) -> None:
        self.outcomes: list[Any] = []
        self._ended = threading.Condition()
        self.executor = LoopExecutor(self._done, **options)
        self.executor.open()

    def _done(self, running: Any, outcome: Any) -> None:
        with self._ended:
            self.outcomes.append(outcome)
            self._ended.notify_all()

    def outcome(self) -> Any:
        with self._ended:
            assert self._ended.wait_for(lambda: self.outcomes, LONG_S), "the handler did not end"
            return self.outcomes[0]

    def do(self, call: Callable[[], T]) -> T:
        """Do it in the loop and answer with what came of it."""
        loop, answers, done = self.executor._loop, list[T](), threading.Event()

        def whole() -> None:
            answers.append(call())
            done.set()

        loop.call_soon_threadsafe(whole)
        assert done.wait(LONG_S)
        return answers[0]


@contextmanager
def a_loop(**options: Any) -> Iterator[Loop]:
    made = Loop(**options)
    try:
        yield made
    finally:
        made.executor.close()


def plain_stream(ctx: Context, payload: dict[str, Any]) -> None:
    """Not a coroutine function."""


def seeded(seed: int = 1) -> random.Random:
    return random.Random(seed)
