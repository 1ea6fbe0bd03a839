"""What everybody writes first: `async for socket in websockets.connect(url)`, once for each stream.

    python -m benchmarks.streams_naive '{"loop": "asyncio", "url": "ws://127.0.0.1:8000/"}'

Only the beginning is gentler than that: connections are opened some at a time, so that all of them come about.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any, Final

from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from benchmarks.streams_children import raise_open_files, say, serve
from benchmarks.streams_probe import PROBE

AT_ONCE: Final = 16


class Loops:
    """All the loops of this process."""

    def __init__(self) -> None:
        self.live = 0
        self.last_live = 0.0
        self._room = asyncio.Semaphore(AT_ONCE)

    async def begin(self, url: str) -> None:
        """Open a connection when it is its turn, and go on for ever."""
        await self._room.acquire()
        await self._follow(url)

    async def _follow(self, url: str) -> None:
        is_first = True
        async for socket in connect(url):
            if is_first:
                is_first = False
                self._room.release()
            self.live += 1
            self.last_live = time.monotonic()
            try:
                async for message in socket:
                    PROBE.handled += 1
                    if PROBE.mode != "raw":
                        json.loads(message)
            except ConnectionClosed:
                continue
            finally:
                self.live -= 1


async def main(url: str) -> None:
    """Follow as many streams of this server as are asked for."""
    raise_open_files()
    loop = asyncio.get_running_loop()
    loops = Loops()
    followers: list[asyncio.Task[None]] = []
    timer = loop.create_task(PROBE.tick())

    def begin(number: int) -> None:
        first = len(followers)
        followers.extend(loop.create_task(loops.begin(f"{url}{first + index}")) for index in range(number))

    def answer(do: str, **arguments: Any) -> dict[str, Any]:
        if do == "begin":
            loop.call_soon_threadsafe(begin, int(arguments["number"]))
            return {}
        return PROBE.answer(do, lambda: {"live": loops.live, "last_live": loops.last_live}, **arguments)

    say({"pid": os.getpid()})
    serve(answer)
    await timer


if __name__ == "__main__":
    wanted: dict[str, Any] = json.loads(sys.argv[1])
    if wanted["loop"] == "uvloop":
        import uvloop

        uvloop.run(main(wanted["url"]))
    else:
        asyncio.run(main(wanted["url"]))
