"""`ticker.follow`: follow a feed of prices over a WebSocket, into one file for each minute."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated, Final

from pydantic import AwareDatetime, BaseModel, ConfigDict, FiniteFloat, StrictInt, StringConstraints

from jobs.files import file_name
from jobs.minutes import MinuteFiles
from thunderagent import Connection, Cursor, Gap, GapAction, StreamContext, stream

SAVE_S: Final = 1.0
"""Time between two checkpoints; before each the file must be on the disk."""


class TickerPayload(BaseModel):
    """The feed, the folder in which the task gets one of its own, and the symbol to follow; without one, all."""

    url: str
    folder: Path
    symbol: str | None = None


class Tick(BaseModel):
    """A price. What else the feed tells about it is kept too."""

    model_config = ConfigDict(extra="allow")

    epoch: Annotated[str, StringConstraints(max_length=50)] | StrictInt
    seq: StrictInt
    time: AwareDatetime
    price: FiniteFloat

    @property
    def place(self) -> Cursor:
        """Where it is in the stream."""
        return Cursor(self.seq, self.epoch)


class BadTick(Exception):
    """A message that is no tick. The feed would send the same again, and to skip it would leave a hole in the files.

    So the stream fails, and says why; `thunderagent streams start` lets it go on there, with a job that knows better.
    """


@stream("ticker.follow", max_retry=20, fatal=(BadTick,))
async def follow(ctx: StreamContext, payload: TickerPayload) -> None:
    """Each tick is in the files exactly once: they tell where to go on, and refuse a run that is over."""

    async def subscribe(connection: Connection, since: Cursor | None) -> None:
        place = {"since": since.seq, "epoch": since.epoch} if since else {"since": None}
        await connection.send_json({"op": "subscribe", "symbol": payload.symbol, **place})
        await connection.expect(op="subscribed")

    async with MinuteFiles(payload.folder / file_name(ctx.task_id, ""), ctx) as files:
        if files.place:  # further than the cursor, which rides on heartbeats
            ctx.checkpoint(seq=files.place.seq, epoch=files.place.epoch)
        ticks = ctx.connect(payload.url, decode=decode, on_open=subscribe, position=position, on_gap=on_gap)
        clock = asyncio.get_running_loop().time
        due = clock()
        async for tick in ticks:
            if tick is None:
                continue
            await files.append(tick.model_dump_json(), tick.place, tick.time)
            if clock() >= due:
                await files.save()
                ctx.checkpoint(seq=tick.seq, epoch=tick.epoch)
                due = clock() + SAVE_S
        if files.place:
            await files.save()
            ctx.checkpoint(seq=files.place.seq, epoch=files.place.epoch)


def decode(message: str | bytes) -> Tick | None:
    """A tick, or None for what the feed tells about itself, which has an `op`."""
    try:
        value = json.loads(message)
        return None if isinstance(value, dict) and "op" in value else Tick.model_validate(value)
    except ValueError as error:
        why = " ".join(str(error).split())
        raise BadTick(f"{message[:200]!r} is no tick: {why}") from error


def position(tick: Tick | None) -> Cursor | None:
    """The place of a tick."""
    return tick.place if tick else None


def on_gap(gap: Gap) -> GapAction:
    """Ask for what is missing; when the feed has begun a new epoch, the old one is over."""
    return GapAction.CONTINUE if gap.cause == "epoch" else GapAction.RECONNECT
