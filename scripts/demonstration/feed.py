"""A WebSocket feed of real prices on 127.0.0.1, for the demo: `python scripts/demonstration/feed.py --rate 20`.

It replays the public monthly stock prices that `vega_datasets` ships, over and over, at a steady rate. What the tick
with a number is follows from the number alone, so any place can be resumed:

    to it    {"op": "subscribe", "since": 41, "epoch": "…", "symbol": "IBM"}
    from it  {"op": "subscribed"}
             {"epoch": "…", "seq": 42, "time": "2026-07-01T10:05:00.050+00:00", "symbol": "IBM", "price": 92.11, …}

Without a symbol all are sent. With `since` null it sends what comes from then on. The epoch is another after each
start; a place of another epoch means the whole of this one. SIGTERM ends it.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

HOST: Final = "127.0.0.1"
Row = dict[str, Any]


def prices(symbol: str | None = None) -> list[Row]:
    """The prices of a symbol, or of all, in the order of their months.

    The file is found without an import of its package, which would load pandas.

    Raises:
        FileNotFoundError: the package is not installed.
    """
    found = find_spec("vega_datasets")
    for folder in (found and found.submodule_search_locations) or ():
        if (path := Path(folder, "_data", "stocks.csv")).is_file():
            with path.open(encoding="utf-8", newline="") as file:
                return sorted(
                    (_row(**row) for row in csv.DictReader(file) if symbol in (None, row["symbol"])),
                    key=lambda row: (row["month"], row["symbol"]),
                )
    raise FileNotFoundError("the sample prices are missing; install with: pip install 'thunderagent[demo]'")


def _row(symbol: str, date: str, price: str) -> Row:
    month = datetime.strptime(date, "%b %d %Y").replace(tzinfo=UTC)
    return {"symbol": symbol, "month": f"{month:%Y-%m}", "price": float(price)}


class Ticks:
    """Every tick of one symbol, or of all: the one with the number n comes n / rate seconds after the start."""

    def __init__(self, rows: Sequence[Row], *, epoch: str, start: float, rate: float) -> None:
        self._rows = rows
        self._epoch = epoch
        self._start = start
        self._rate = rate

    def due(self, seq: int) -> float:
        """Epoch seconds at which a tick comes."""
        return self._start + seq / self._rate

    def newest(self, now: float) -> int:
        """The number of the last tick that has come; 0: none has."""
        return max(0, int((now - self._start) * self._rate))

    def tick(self, seq: int) -> Row:
        """The tick with this number, from 1."""
        at = datetime.fromtimestamp(self.due(seq), UTC).isoformat(timespec="milliseconds")
        return {"epoch": self._epoch, "seq": seq, "time": at, **self._rows[(seq - 1) % len(self._rows)]}

    def since(self, place: Any, epoch: Any, now: float) -> int:
        """The number behind which a subscriber begins."""
        if place is None:
            return self.newest(now)
        return max(0, int(place)) if epoch in (None, self._epoch) else 0


class Feed:
    """Serves ticks to any number of subscribers."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._start = time.time()
        self._epoch = f"{self._start:.3f}"

    async def serve(self, connection: ServerConnection) -> None:
        """One connection, from its request to its end."""
        with suppress(ConnectionClosed):
            request = json.loads(await connection.recv())
            rows = prices(request.get("symbol"))
            if request.get("op") != "subscribe" or not rows:
                await connection.close(1008, f"this is no subscription to a symbol that is here: {request}"[:120])
                return
            ticks = Ticks(rows, epoch=self._epoch, start=self._start, rate=self._rate)
            seq = ticks.since(request.get("since"), request.get("epoch"), time.time())
            await connection.send(json.dumps({"op": "subscribed"}))
            while True:
                seq += 1
                await asyncio.sleep(max(0.0, ticks.due(seq) - time.time()))
                await connection.send(json.dumps(ticks.tick(seq)))


async def run(port: int, rate: float) -> None:
    """Serve until SIGTERM or SIGINT, and tell the URL."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with serve(Feed(rate).serve, HOST, port, compression=None, close_timeout=1.0) as server:
        (listener,) = server.sockets
        print(f"ws://{HOST}:{listener.getsockname()[1]}/", flush=True)
        await stop.wait()


def main(arguments: Sequence[str]) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="A WebSocket feed of stock prices on 127.0.0.1, until SIGTERM.")
    parser.add_argument("--port", type=int, default=0, help="the port; 0 takes a free one (default)")
    parser.add_argument("--rate", type=float, default=20.0, help="ticks in a second (default: 20)")
    given = parser.parse_args(arguments)
    if not given.rate > 0:
        parser.error("--rate must be over 0")
    asyncio.run(run(given.port, given.rate))


if __name__ == "__main__":
    main(sys.argv[1:])
