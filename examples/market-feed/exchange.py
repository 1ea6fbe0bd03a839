"""An exchange on 127.0.0.1 that loses messages and restarts on request: `python exchange.py --lose 0.05`.

    to it    {"op": "subscribe", "symbols": ["BTCUSDT", "ETHUSDT"]}, or "resubscribe"
    from it  {"type": "subscribed"}
             {"type": "snapshot", "symbol": "BTCUSDT", "last": 41, "bids": {"59999.90": "0.5", …}, "asks": {…}}
             {"type": "delta", "symbol": "BTCUSDT", "first": 42, "last": 44, "bids": {"59999.80": "0"}, "asks": {…}}
             {"type": "heartbeat"}

Each symbol counts its changes by itself, and a delta has several of them; a size of "0" takes its price out of the
book. A subscription is answered with a snapshot of each symbol. Nothing is sent again: a client that misses a
delta subscribes once more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

HOST: Final = "127.0.0.1"
CENTS: Final = {"BTCUSDT": 6_000_000, "ETHUSDT": 300_000, "ADAUSDT": 50}
"""The symbols, with their prices at the beginning."""

LEVELS: Final = 5


@dataclass
class Book:
    """The orders for one symbol: sizes by price, and the number of the last change."""

    middle: int
    last: int = 0
    bids: dict[str, str] = field(default_factory=dict)
    asks: dict[str, str] = field(default_factory=dict)

    def change(self, rng: random.Random) -> dict[str, Any]:
        """Some changes at once, as the members of a delta."""
        first, changed = self.last + 1, {"bids": dict[str, str](), "asks": dict[str, str]()}
        for _ in range(rng.randint(1, 3)):
            side = rng.choice(("bids", "asks"))
            away = rng.randint(1, LEVELS)
            price = f"{(self.middle - away if side == 'bids' else self.middle + away) / 100:.2f}"
            size = rng.choice(("0", f"{rng.randint(1, 999) / 100:.2f}"))
            changed[side][price] = size
            book = self.bids if side == "bids" else self.asks
            if size == "0":
                book.pop(price, None)
            else:
                book[price] = size
            self.last += 1
        return {"first": first, "last": self.last, **changed}

    @property
    def quote(self) -> list[str | None]:
        """The best bid and the best ask."""
        return [max(self.bids, key=float, default=None), min(self.asks, key=float, default=None)]


class Exchange:
    """Trades, and tells its subscribers.

    Args:
        seed: makes a run repeatable.
        every_s: time between two deltas; heartbeats come each second.
        lose: share of the deltas that a subscriber is not sent.
    """

    def __init__(self, *, seed: int = 1, every_s: float = 0.05, lose: float = 0.0) -> None:
        self.books = {symbol: Book(middle) for symbol, middle in CENTS.items()}
        self.lost = 0
        self.subscriptions: dict[ServerConnection, set[str]] = {}
        self.lose = lose
        self._rng = random.Random(seed)
        self._every_s = every_s

    async def serve(self, connection: ServerConnection) -> None:
        """One client, until it leaves."""
        wanted = self.subscriptions[connection] = set()
        try:
            with suppress(ConnectionClosed):  # a restart, or a client that was killed
                async for request in connection:
                    symbols = [symbol for symbol in json.loads(request)["symbols"] if symbol in self.books]
                    wanted.update(symbols)
                    await self._tell(connection, {"type": "subscribed"})
                    for symbol in symbols:
                        book = self.books[symbol]
                        state = {"last": book.last, "bids": book.bids, "asks": book.asks}
                        await self._tell(connection, {"type": "snapshot", "symbol": symbol, **state})
        finally:
            del self.subscriptions[connection]

    async def trade(self) -> None:
        """Change the books for ever."""
        while True:
            await asyncio.sleep(self._every_s)
            await self.change()

    async def change(self) -> None:
        """Change a book, and tell its subscribers, but for those that lose it."""
        symbol = self._rng.choice(sorted(self.books))
        delta = {"type": "delta", "symbol": symbol, **self.books[symbol].change(self._rng)}
        for connection, wanted in list(self.subscriptions.items()):
            if symbol in wanted and self._rng.random() >= self.lose:
                await self._tell(connection, delta)
            else:
                self.lost += symbol in wanted

    async def beat(self) -> None:
        """Tell every subscriber each second that it is there."""
        while True:
            await asyncio.sleep(1.0)
            for connection in list(self.subscriptions):
                await self._tell(connection, {"type": "heartbeat"})

    async def restart(self) -> None:
        """Send every client away with the code of a restart."""
        await asyncio.gather(*(connection.close(1012) for connection in list(self.subscriptions)))

    async def _tell(self, connection: ServerConnection, message: dict[str, Any]) -> None:
        with suppress(ConnectionClosed):
            await connection.send(json.dumps(message))


async def main() -> None:
    parser = argparse.ArgumentParser(description="An exchange for the example.")
    parser.add_argument("--port", type=int, default=9870, help="0: a free one")
    parser.add_argument("--lose", type=float, default=0.0, help="share of the deltas that are lost")
    parser.add_argument("--restart-s", type=float, default=float("inf"), help="seconds between two restarts")
    options = parser.parse_args()
    exchange, loop, stopped = Exchange(lose=options.lose), asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    async with serve(exchange.serve, HOST, options.port, close_timeout=1.0) as server, asyncio.TaskGroup() as group:
        print(f"ws://{HOST}:{server.sockets[0].getsockname()[1]}/", flush=True)
        tasks = [group.create_task(exchange.trade()), group.create_task(exchange.beat())]
        while not stopped.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), min(options.restart_s, 86400.0))
                break
            await exchange.restart()
        for task in tasks:
            task.cancel()


if __name__ == "__main__":
    asyncio.run(main())
