"""A stand-in for DNS with health checks: one name, and which region it leads to.

As `infra/failover.yaml` sets it up: a canary tries each region once a minute, two bad minutes in a row make a region
unhealthy, and the name leads to the primary unless it is and the other is not. Here a region is healthy again after
five good ones, as the canary's metric says it. Who asks keeps the answer for its time to live. No agent asks.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from drills.pace import Pace
from thunderagent.regions.hysteresis import Hysteresis
from thunderagent.websocket_api.canary.probe import Prober
from thunderagent.websocket_api.canary.tokens import Tokens

TRY_S: Final = 60.0
"""Time between two looks of the canary: a Lambda function of a rule `rate(1 minute)`."""
TTL_S: Final = 60.0
"""How long an answer is kept: `RecordTtl`."""
HOST: Final = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Switch:
    """The name leads somewhere else from now on."""

    region: str
    reason: str


class Names:
    """Tries the regions and answers whoever asks, in a thread of its own.

    Args:
        urls: of the regions, the primary first.
        token_from: where the token of the canary is.
        pace: of the drill.
        told: called in the thread with each switch.
    """

    def __init__(self, urls: Mapping[str, str], token_from: str, pace: Pace, told: Callable[[Switch], None]) -> None:
        self._urls = dict(urls)
        self._pace = pace
        self._told = told
        self._prober = Prober("names", Tokens(token_from), who="names")
        self.health = {region: Hysteresis(is_up=True) for region in urls}
        self.region = next(iter(urls))
        """Where the name leads now."""
        self.port = 0
        self.failure: BaseException | None = None
        self._started = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="names", daemon=True)

    def start(self) -> None:
        """Begin; the port is known then."""
        self._thread.start()
        if not self._started.wait(10.0):
            raise TimeoutError("the stand-in for DNS did not start within 10 s")

    def close(self) -> None:
        """End."""
        if self._loop is not None and self._stop is not None:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10.0)

    def _run(self) -> None:
        try:
            asyncio.run(self._whole())
        except BaseException as error:
            self.failure = error
        finally:
            self._started.set()

    async def _whole(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._answer, HOST, 0)
        self.port = server.sockets[0].getsockname()[1]
        self._started.set()
        async with server:
            while not self._stop.is_set():
                await self._look()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), self._pace.s(TRY_S))

    async def _look(self) -> None:
        for result in await self._prober.probe_all(self._urls):
            self.health[result.target] = self.health[result.target].after(result.ok)
        primary, other = self._urls
        leads_to = other if not self.health[primary].is_up and self.health[other].is_up else primary
        if leads_to != self.region:
            self.region = leads_to
            one = self.health[primary]
            many = f"{one.failures} bad" if one.failures else f"{one.successes} good"
            self._told(Switch(leads_to, f"{many} looks in a row at {primary}"))

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(json.dumps({"url": self._urls[self.region], "ttl": self._pace.s(TTL_S)}).encode() + b"\n")
        with suppress(OSError):
            await writer.drain()
        writer.close()
