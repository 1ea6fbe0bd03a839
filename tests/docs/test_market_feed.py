"""The example of a market feed: its books are those of an exchange that loses messages and restarts."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from websockets.asyncio.server import serve

from tests.support.connections import run
from tests.support.stands import eventually, patience
from thunderagent.client import Client
from thunderagent.model.task import Status
from thunderagent.settings import load_settings
from thunderagent.stores import open_store
from thunderagent.streams.context import StreamContext
from thunderagent.streams.cursor import Cursor
from thunderagent.testing import run_stream

ROOT: Final = Path(__file__).parents[2]
EXAMPLE: Final = ROOT / "examples" / "market-feed"
SYMBOLS: Final = ["BTCUSDT", "ETHUSDT", "ADAUSDT"]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The modules of the example."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import exchange  # type: ignore[import-not-found, unused-ignore]
    import marketjobs.books  # type: ignore[import-not-found, unused-ignore]

    yield exchange, marketjobs.books
    for name in ("exchange", "marketjobs", "marketjobs.books"):
        sys.modules.pop(name, None)


def places(cursor: Cursor) -> dict[str | None, int]:
    return {place.key: place.seq for place in cursor.places}


def test_the_books_are_those_of_an_exchange_that_loses_messages_and_restarts(example: Any) -> None:
    exchange, books = example

    async def main() -> None:
        market = exchange.Exchange()
        async with serve(market.serve, exchange.HOST, 0, close_timeout=1.0, ping_interval=None) as server:
            beating = asyncio.create_task(market.beat())
            url = f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
            over, seen = asyncio.Event(), list[StreamContext]()

            def until(ctx: StreamContext) -> bool:
                seen[:] = [ctx]
                return over.is_set()

            async def until_equal() -> None:
                numbers = {symbol: book.last for symbol, book in market.books.items()}
                while not (seen and seen[0].cursor and places(seen[0].cursor) == numbers):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)

            payload = books.Market(url=url, symbols=SYMBOLS)
            following = asyncio.create_task(run_stream(books.follow, payload, until=until, timeout_s=60.0))
            for lose in (0.0, 0.1, 0.0):
                await until_equal()
                market.lose = lose
                for _ in range(100):
                    await market.change()
            await until_equal()
            for _ in range(2):
                await market.restart()
                await market.change()  # nobody is there to hear of it
                await until_equal()
            over.set()
            ctx = await following
            beating.cancel()
            quotes = {symbol: book.quote for symbol, book in market.books.items()}
            assert json.loads(ctx.take_progress() or "") == quotes
            account = ctx.journal.take(0.0, **ctx.counts)
            assert account is not None
            assert account["connects"] == 3
            actions = [gap["action"] for gap in account["gaps"]]
            assert market.lost > 5
            assert "await" in actions
            assert "snapshot" in actions
            assert "continue" not in actions
            assert {gap["after"]["key"] for gap in account["gaps"]} == set(SYMBOLS)

    run(main(), fast=True)


def test_the_guide_shows_the_example_as_it_is() -> None:
    guide = (ROOT / "docs" / "guides" / "streams.md").read_text()
    [shown] = re.findall(r"```python\n# examples/market-feed/marketjobs/books\.py\n(.*?)```", guide, flags=re.DOTALL)
    code = (EXAMPLE / "marketjobs" / "books.py").read_text()
    for part in shown.split("\n...\n"):
        assert part.strip("\n") in code


@pytest.mark.processes
def test_the_commands_of_the_readme_follow_the_market(tmp_path: Path, example: Any) -> None:
    """The exchange and an agent as processes, as a fresh clone runs them."""
    _, books = example
    text = (EXAMPLE / "README.md").read_text()
    payload = json.loads(re.findall(r"enqueue market.follow '(.*?)'", text)[0])
    settings = load_settings(store=f"sqlite:///{tmp_path}/tasks.db")
    environment = {**os.environ, "THUNDERAGENT_STORE": settings.store}

    @contextmanager
    def process(*command: str) -> Iterator[subprocess.Popen[str]]:
        with subprocess.Popen(
            [sys.executable, *command],
            cwd=EXAMPLE,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as started:
            try:
                yield started
            finally:
                started.send_signal(signal.SIGTERM)

    client = Client(open_store(settings), settings)
    with process("exchange.py", "--port", "0") as exchange, process("-m", "thunderagent", "run", "marketjobs"):
        assert exchange.stdout is not None
        payload["url"] = exchange.stdout.readline().strip()
        task = client.enqueue(books.follow, books.Market(**payload))
        eventually(lambda: set(client.get(task).progress or {}) == set(payload["symbols"]))
        client.streams.stop(task)
        assert client.wait(task, timeout_s=20.0 * patience()).status is Status.DONE
    client.close()
