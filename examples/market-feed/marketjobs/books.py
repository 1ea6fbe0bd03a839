"""`market.follow`: the order books of several symbols over one connection, each symbol with numbers of its own."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from thunderagent import Connection, Cursor, Gap, GapAction, Span, StreamContext, StreamOptions, stream


class Market(BaseModel):
    url: str
    symbols: list[str]


@dataclass
class Book:
    bids: dict[str, str] = field(default_factory=dict)
    asks: dict[str, str] = field(default_factory=dict)

    def take(self, message: dict[str, Any]) -> None:
        if message["type"] == "snapshot":
            self.bids, self.asks = {}, {}
        for book, changes in ((self.bids, message["bids"]), (self.asks, message["asks"])):
            book.update(changes)
            for price in [price for price, size in changes.items() if size == "0"]:
                del book[price]

    @property
    def quote(self) -> list[str | None]:
        """The best bid and the best ask."""
        return [max(self.bids, key=float, default=None), min(self.asks, key=float, default=None)]


def position(message: dict[str, Any]) -> Span | None:
    """Where a message is in the numbers of its symbol; a heartbeat has no place."""
    match message["type"]:
        case "delta":
            return Span(first=message["first"], last=message["last"], key=message["symbol"])
        case "snapshot":
            return Span(first=message["last"], last=message["last"], key=message["symbol"], snapshot=True)
    return None


@stream("market.follow")
async def follow(ctx: StreamContext, payload: Market) -> None:
    books = {symbol: Book() for symbol in payload.symbols}

    async def subscribe(connection: Connection, cursor: Cursor | None) -> None:
        await connection.send_json({"op": "subscribe", "symbols": payload.symbols})
        await connection.expect(type="subscribed")  # a snapshot of each symbol follows

    async def resubscribe(gap: Gap) -> GapAction:
        """Deltas are missing: ask for a snapshot, and take no more of this symbol before it is here."""
        await market.send_json({"op": "resubscribe", "symbols": [gap.key]})
        return GapAction.AWAIT

    market = ctx.connect(
        payload.url,
        decode=json.loads,
        on_open=subscribe,
        position=position,
        on_gap=resubscribe,
        options=StreamOptions(idle_timeout_s=3.0),  # heartbeats come each second, so silence is a dead peer
    )
    async for message in market:
        if message["type"] not in ("delta", "snapshot"):
            continue
        books[message["symbol"]].take(message)
        ctx.checkpoint(seq=message["last"], key=message["symbol"])
        ctx.progress({symbol: book.quote for symbol, book in books.items()})
