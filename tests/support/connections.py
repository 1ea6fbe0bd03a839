"""What tests of streams share: a keeper that writes down, a feed that is consumed, and bounded runs."""

from __future__ import annotations

import asyncio
import gc
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Final

from thunderagent.model.errors import LeaseLost
from thunderagent.streams.connection.connection import Connection, Peer
from thunderagent.streams.connection.ending import State
from thunderagent.streams.connection.endpoint import EndpointSource
from thunderagent.streams.connection.feed import Feed
from thunderagent.streams.connection.governor import Governor
from thunderagent.streams.connection.options import StreamOptions
from thunderagent.streams.cursor import Cursor, Gap, GapAction
from thunderagent.testing.chaos import ChaosServer
from thunderagent.testing.fast_loop import run_fast

Message = dict[str, Any]
Handle = Callable[[Message], Awaitable[object]]

HOUR_S: Final = 3600.0
LIMIT_S: Final = 30.0
PROMPT: Final = StreamOptions(proxy=False, close_timeout_s=0.3, backoff_base_s=0.2, backoff_cap_s=1.0)
"""Options of tests that do not look at delays."""


def run(
    main: Coroutine[Any, Any, None], *, fast: bool = False, quiet_s: float = 0.002, limit_s: float = LIMIT_S
) -> None:
    """Run it in bounded real time, on a clock that jumps if `fast`. Nothing may be left, and no error be unseen."""

    async def whole() -> None:
        failures: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
        await main
        for _ in range(5):
            await asyncio.sleep(0)
        gc.collect(1)  # a task whose error nobody asked for tells it as it goes
        await asyncio.sleep(0)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left
        assert not failures

    run_fast(whole(), limit_s=limit_s, quiet_s=quiet_s if fast else limit_s)


def now() -> float:
    """Seconds of the running loop's clock."""
    return asyncio.get_running_loop().time()


class Keeper:
    """Keeps a feed in a test: its cursor, the right to it, and all that happened to it."""

    def __init__(self, cursor: Cursor | None = None) -> None:
        self.cursor = cursor
        self.is_lost = False
        self.moves: list[tuple[float, State, str]] = []
        self.gaps: list[tuple[Gap, GapAction]] = []
        self.warnings: list[str] = []
        self.gone_back: list[str | None] = []
        self._changed = asyncio.Event()

    def guard(self) -> None:
        if self.is_lost:
            raise LeaseLost

    def moved(self, feed: Feed[Any], state: State, reason: str) -> None:
        self.moves.append((now(), state, reason))
        self._changed.set()

    def found_gap(self, gap: Gap, action: GapAction) -> None:
        self.gaps.append((gap, action))
        self._changed.set()

    def goes_back(self, key: str | None) -> None:
        self.gone_back.append(key)

    def warned(self, feed: Feed[Any], reason: str) -> None:
        self.warnings.append(reason)

    @property
    def states(self) -> list[State]:
        """The states in their order."""
        return [state for _, state, _ in self.moves]

    def reasons(self, state: State) -> list[str]:
        """The reasons with which this state was entered."""
        return [reason for _, one, reason in self.moves if one is state]

    async def until(self, state: State, *, times: int = 1, timeout_s: float = 10.0) -> None:
        """Wait until a state was entered so many times, counted from the very beginning."""
        async with asyncio.timeout(timeout_s):
            while self.states.count(state) < times:
                self._changed.clear()
                await self._changed.wait()


async def subscribe(connection: Connection, cursor: Cursor | None) -> None:
    """Ask a `ChaosServer` for what comes behind the cursor."""
    since, epoch = (cursor.seq, cursor.epoch) if cursor else (None, None)
    await connection.send_json({"op": "subscribe", "since": since, "epoch": epoch})
    await connection.expect(op="subscribed")


def position(message: Any) -> Cursor | None:
    """The place of a message of a `ChaosServer`."""
    return Cursor(message["seq"], message["epoch"])


def governor(seed: int = 1, **options: Any) -> Governor:
    """One whose chance is repeatable, and which connects again without a spread."""
    return Governor(**{"spread_s": 0.0, "rng": random.Random(seed), **options})


class Stand:
    """A feed with its keeper and the task that consumes it; every message that was handled moves the cursor."""

    def __init__(self, feed: Feed[Message], keeper: Keeper, handle: Handle | None) -> None:
        self.feed = feed
        self.keeper = keeper
        self.handled: list[Message] = []
        self._handle = handle
        self._progress = asyncio.Event()
        self.consumer = asyncio.create_task(self._consume(), name="consumer")

    async def _consume(self) -> None:
        try:
            async for message in self.feed:
                if self._handle is not None:
                    await self._handle(message)
                self.handled.append(message)
                if isinstance(message, dict) and "seq" in message:
                    self.keeper.cursor = Cursor(message["seq"], message.get("epoch"))
                self._progress.set()
        finally:
            self._progress.set()

    @property
    def seqs(self) -> list[int]:
        """The numbers of the messages that were handled."""
        return [message["seq"] for message in self.handled]

    async def until_handled(self, count: int, timeout_s: float = 10.0) -> None:
        """Wait until so many messages were handled; the end of the consumer ends the wait."""
        async with asyncio.timeout(timeout_s):
            while len(self.handled) < count:
                assert not self.consumer.done(), self.consumer
                self._progress.clear()
                await self._progress.wait()

    async def until(self, predicate: Callable[[], bool], timeout_s: float = 10.0) -> None:
        """Wait until it holds, for what tells nobody that it changed."""
        async with asyncio.timeout(timeout_s):
            while not predicate():  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    async def until_buffered(self, count: int) -> None:
        """Wait until so many messages wait for the handler."""
        await self.until(lambda: len(self.feed._buffer) == count)

    async def failure(self, timeout_s: float = 10.0) -> BaseException:
        """What came out of the handler's loop; an end without an error is none."""
        async with asyncio.timeout(timeout_s):
            await asyncio.wait((self.consumer,))
        assert not self.consumer.cancelled()
        error = self.consumer.exception()
        assert error is not None, "the loop ended without a word"
        return error

    async def close(self) -> None:
        """End feed and consumer."""
        self.consumer.cancel()
        await asyncio.wait((self.consumer,))
        if not self.consumer.cancelled():
            self.consumer.exception()
        await self.feed.finish()


def a_feed(
    endpoint: EndpointSource,
    *,
    keeper: Keeper | None = None,
    chance: Governor | None = None,
    options: StreamOptions = PROMPT,
    **arguments: Any,
) -> Feed[Any]:
    """A feed of a peer with these arguments of `connect`."""
    own = {name: arguments.pop(name) for name in ("on_hold", "monotonic") if name in arguments}
    peer = Peer(endpoint=endpoint, options=options, **arguments)
    return Feed(peer, keeper=keeper or Keeper(), governor=chance or governor(), **own)


@asynccontextmanager
async def streaming(
    source: EndpointSource | ChaosServer,
    *,
    keeper: Keeper | None = None,
    options: StreamOptions = PROMPT,
    chance: Governor | None = None,
    handle: Handle | None = None,
    **arguments: Any,
) -> AsyncIterator[Stand]:
    """A feed that is consumed, by default with subscription and positions; it is ended at the end."""
    keeper = keeper or Keeper()
    if isinstance(source, ChaosServer):
        options = replace(options, ssl=source.client_context)
        source = f"{source.url}?stream=s"
    arguments = {
        "decode": json.loads,
        "on_open": subscribe,
        "position": position,
        "monotonic": now,
        **arguments,
    }
    feed: Feed[Message] = a_feed(source, keeper=keeper, chance=chance, options=options, **arguments)
    stand = Stand(feed, keeper, handle)
    try:
        yield stand
    finally:
        await stand.close()
